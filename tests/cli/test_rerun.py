"""`k8sjob rerun` on this machine: what it runs, and what it refuses."""

import re

import pytest

JOB = """\
name: counts
image: none
run: {command: [python, train.py, /checkpoints]}
checkpoint: {dir: /checkpoints}
policy: {restart_policy: Never}
"""
TRAIN = """\
import pathlib, sys
folder = pathlib.Path(sys.argv[1])
folder.mkdir(exist_ok=True)
print("version 1,", len(list(folder.iterdir())), "checkpoints")
(folder / "one").touch()
"""


@pytest.fixture
def ran(k8sjob, tmp_path):
    """The folder of a job that has run here."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "job.yaml").write_text(JOB)
    (folder / "train.py").write_text(TRAIN)
    assert "master-0 | version 1, 0 checkpoints" in k8sjob("run", folder).out
    return folder


def test_the_code_of_that_run_from_the_beginning(k8sjob, ran):
    assert "master-0 | version 1, 0 checkpoints" in k8sjob("rerun", "counts").out
    (ran / "train.py").write_text(TRAIN.replace("version 1", "version 2"))
    (ran / "new.py").touch()
    done = k8sjob("rerun", "counts")
    assert done.code == 0
    assert "master-0 | version 1, 0 checkpoints" in done.out
    assert "the code of that run is used; files changed since then: train.py\n" in done.err
    assert "version 1" in k8sjob("rerun", "counts").out, "a rerun of a rerun"
    (ran / "train.py").unlink()
    assert "version 1" in k8sjob("rerun", "counts").out


def test_its_cause_names_the_file_that_the_user_has(k8sjob, ran):
    (ran / "train.py").write_text("def fails():\n    raise ValueError(3)\n\n\nfails()\n")
    k8sjob("run", ran)
    (ran / "train.py").write_text("print('other')\n")
    assert k8sjob("rerun", "counts").code == 100
    places = re.findall(
        r"/\S+train\.py", k8sjob("why", "counts").out + k8sjob("logs", "counts").out
    )
    assert set(places) == {str(ran / "train.py")}


def test_quietly_and_detached_as_run_does(k8sjob, ran):
    assert k8sjob("rerun", "counts", "-q") == (0, "", "")
    assert "--detach shows nothing" in k8sjob("rerun", "counts", "--detach", "-q").err
    done = k8sjob("rerun", "counts", "--detach")
    assert (done.code, done.out) == (0, "local/counts started\n")
    assert k8sjob("watch", "counts").code == 0


def test_a_record_runs_where_its_code_is(k8sjob, ran, tmp_path):
    record = tmp_path / "counts.k8sjob"
    k8sjob("archive", "counts", "-o", record)
    k8sjob("delete", "counts")
    assert "version 1" in k8sjob("rerun", record, "--yes").out
    there = ran.rename(tmp_path / "moved")
    gone = k8sjob("rerun", record, "-y")
    assert (gone.code, gone.out) == (1, "")
    assert f"{ran}, where the job.yaml and the code were, is not a folder" in gone.err
    assert "version 1" in k8sjob("rerun", record, "-y", "--folder", there).out
    (there / "train.py").write_text(TRAIN.replace("version 1", "version 2"))
    other = k8sjob("rerun", record, "-y", "--folder", there)
    assert (other.code, other.out) == (1, "")
    assert f"train.py in {there} is not what the job ran with" in other.err


def test_the_command_of_a_records_file_is_shown_and_asked_for(
    k8sjob, tmp_path, monkeypatch, on_a_terminal
):
    folder = tmp_path / "job"
    folder.mkdir()
    command = f"[touch, {tmp_path}/ran, '\\e[2J::error::x']"
    (folder / "job.yaml").write_text(f"name: odd\nimage: none\nrun: {{command: {command}}}\n")
    record = tmp_path / "odd.k8sjob"
    assert k8sjob("run", folder).code == 0
    k8sjob("archive", "odd", "-o", record)
    (tmp_path / "ran").unlink()
    monkeypatch.setenv("K8SJOB_STATE", str(tmp_path / "others"))
    refused = k8sjob("rerun", record, "-q")
    assert (refused.code, refused.out) == (2, "")
    assert f"on this machine in {folder}:\n" in refused.err
    assert f"\n    - touch\n    - {tmp_path}/ran\n" in refused.err
    assert "nothing was run; read the job above, and add --yes to run it" in refused.err
    code, shown = on_a_terminal("rerun", record, typed="n\n")
    assert code != 0
    assert "    - touch\r\n" in shown
    assert "Run it? [y/N]" in shown
    assert "\x1b[2J" not in shown + refused.err
    assert not (tmp_path / "ran").exists()
    assert on_a_terminal("rerun", record, typed="y\n")[0] == 0
    assert (tmp_path / "ran").exists()


def test_the_job_of_a_records_file_is_submitted_when_it_was_asked_for(
    k8sjob, api, job_file, tmp_path
):
    record = tmp_path / "tiny.k8sjob"
    k8sjob("submit", job_file())
    k8sjob("archive", "tiny", "-o", record)
    jobs = k8sjob("list", "-o", "name").out
    refused = k8sjob("rerun", record, "--detach")
    assert (refused.code, refused.out) == (2, "")
    assert "it runs this in fake, namespace blue:\n\nname: tiny-" in refused.err
    assert "image: " in refused.err
    assert k8sjob("list", "-o", "name").out == jobs
    assert k8sjob("rerun", record, "--detach", "-y").code == 0
    assert len(k8sjob("list", "-o", "name").out.splitlines()) == len(jobs.splitlines()) + 1


def test_a_job_of_a_cluster_has_its_code_in_its_image(k8sjob, api, job_file, tmp_path):
    k8sjob("submit", job_file())
    done = k8sjob("rerun", "tiny", "--folder", tmp_path)
    assert done.code == 2
    assert "--folder: the code of a job in a cluster is in its image" in done.err
    assert "-q is for jobs on this machine" in k8sjob("rerun", "tiny", "-q").err
    done = k8sjob("rerun", "tiny", "--detach")
    assert done.code == 0
    assert re.fullmatch(r"blue/(tiny-\w{5}) created\n", done.out)
    assert "follow it: k8sjob watch blue/tiny-" in done.err
