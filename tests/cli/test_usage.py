"""`k8sjob usage` over records of jobs."""

import json

import pytest
from inmemory import record
from trainings import job, line, met, pod, step

from k8sjob.errors import JobNotFound


def test_a_table_with_what_could_be_less(k8sjob, records):
    done = k8sjob("usage", *records, "--price", "2")
    assert done.err == ""
    table, note, slow = done.out.split("\n\n")
    header, *rows = (one.split() for one in table.splitlines())
    assert header == ["NAME", "HOURS", "QUEUED", "STARTING", "TRAINING", "WAITING", "COST"]
    assert rows[0] == ["team/one", "2", "GPU", "1.4%", "4.2%", "73.6%", "20.8%", "3.94"]
    assert rows[2] == ["all", "4", "GPU", "1.4%", "4.2%", "73.6%", "20.8%", "7.89"]
    assert note.startswith("0.833 GPU hours (21%) went to waiting; one rank is slower")
    assert slow.startswith("node b was the slowest of 2 jobs: the others waited 0.833 GPU hours")


@pytest.mark.parametrize(
    ("by", "names"),
    [("namespace", {"team"}), ("label:team", {"red"}), ("label:cost/center", {"(no"}),
     ("node", {"a", "b", "all"})],
)  # fmt: skip
def test_other_groups(k8sjob, records, by, names):
    out = k8sjob("usage", *records, "--by", by).out
    assert {row.split()[0] for row in out.split("\n\n")[0].splitlines()[1:]} == names


def test_the_job_with_most_of_a_part_is_that_of_all_its_runs(k8sjob, tmp_path):
    runs = (("one", "a", 60), ("one", "b", 60), ("two", "c", 90))
    for name, run, start in runs:
        made, lines = job(end=100, name=name, workers=0), [line(0), met(0), step(start, 1)]
        made["metadata"]["uid"] = run
        record(tmp_path / f"{run}.k8sjob", made, [pod("master-0", 0, 100)], lines)
    done = k8sjob("usage", *(tmp_path / f"{run}.k8sjob" for _, run, _ in runs))
    assert done.out.endswith("imports help; the most for: team/one\n")


def test_as_json(k8sjob, records):
    one, _ = json.loads(k8sjob("usage", *records, "-o", "json").out)
    assert sum(one["seconds"].values()) == 7200
    assert one["slowed"] == {"b": 1500}
    assert one["cost"] is None


def test_errors(k8sjob, records, tmp_path):
    done = k8sjob("usage", *records, "--by", "team")
    assert (done.code, done.out) == (2, "")
    assert "--by 'team': give job, namespace, node or label:KEY" in done.err
    assert "selector" in k8sjob("usage", "x", "-l", "a=b").err.lower()
    assert k8sjob("usage", *records, "--price", "-1").code == 2
    assert k8sjob("usage", tmp_path / "none.k8sjob").code == 1
    for args in ([*records, "--since", "1h"], []):
        assert k8sjob("usage", *args).err == "no job has used anything in that time\n"


def test_a_job_that_is_gone_hides_no_other(k8sjob, api, job_file, tmp_path, monkeypatch):
    """One is deleted after it was listed; another one's state on this machine is damaged."""
    k8sjob("submit", job_file())
    damaged = tmp_path / "state/jobs/empty-00000001"
    damaged.mkdir(parents=True)
    (damaged / "state.json").touch()

    def gone(_backend, ref):
        raise JobNotFound(f"{ref} is gone")

    monkeypatch.setattr("k8sjob.backends.cluster.backend.ClusterBackend.snapshot", gone)
    done = k8sjob("usage")
    assert (done.code, done.err) == (0, "no job has used anything in that time\n")
    assert k8sjob("usage", "blue/tiny").code == JobNotFound.exit_code
