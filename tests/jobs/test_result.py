"""Results of jobs: what their events and their output say, of this machine and of a cluster."""

import io
import math
import os
import re
import signal
import time
from pathlib import Path

import pytest
from apiserver import Apiserver
from trainings import pod

from k8sjob.backends.api import JobRef
from k8sjob.backends.cluster.backend import ClusterBackend
from k8sjob.backends.local import LocalBackend
from k8sjob.contract import Event
from k8sjob.errors import JobFailed, JobNotFound, SpecError
from k8sjob.html_card import card, curve, folded, table
from k8sjob.jobs import result as results
from k8sjob.jobs.result import Reached, RunResult
from k8sjob.python_api import plan, run, submit
from k8sjob.spec import JobSpec
from k8sjob.targets.api import JobState


def reached(*events):
    made = Reached()
    for kind, data in events:
        made.add(Event(kind, data, 7.0))
    return made


def progress(epoch, step, loss, **more):
    return "progress", {"epoch": epoch, "step": step, "steps": 2, "loss": loss, **more}


def test_a_history_has_a_row_for_each_report():
    made = reached(
        progress(0, 1, 0.5),
        progress(0, 2, 0.25, epoch_loss=0.375, memory_bytes=12),
        ("metrics", {"accuracy": 0.75, "best": True, "nested": {}}),
        ("checkpoint", {"path": "/checkpoints/step-2"}),
        ("log", {"text": "no number"}),
    )
    assert made.metrics == {"loss": 0.25, "accuracy": 0.75, "best": "True"}
    assert made.checkpoint == "/checkpoints/step-2"
    first, second = made.history
    assert first == {"time": 7.0, "epoch": 1, "step": 1, "steps": 2, "loss": 0.5}
    assert second["epoch_loss"] == 0.375
    assert {type(second[name]) for name in ("epoch", "step", "memory_bytes")} == {int}
    assert (second["accuracy"], second["best"]) == (0.75, "True")
    logged = ("metrics", {"accuracy": 0.5})
    again = reached(progress(0, 1, 0.5), logged, logged, progress(0, 2, 0.25)).history
    assert [row["loss"] for row in again] == [0.5, 0.5, 0.25]


def test_what_a_restart_repeats_is_there_once():
    made = reached(
        progress(0, 1, 4.0),
        progress(0, 2, 3.0),
        ("metrics", {"accuracy": 0.1}),
        progress(1, 1, 2.0),
        progress(0, 2, 3.0),
        ("metrics", {"accuracy": 0.1}),
        progress(1, 1, 1.0),
    )
    assert [row["loss"] for row in made.history if "loss" in row] == [4.0, 3.0, 1.0]
    assert len([row for row in made.history if "accuracy" in row]) == 1


def test_numbers_that_are_none_stay_visible_and_nonsense_is_left_out():
    made = reached(
        progress(0, 1, math.nan),
        ("metrics", {"huge": 10**400, "text": "\x1b[31mdéjà"}),
        ("progress", {"epoch": "x", "step": None}),
        ("progress", {}),
    )
    assert math.isnan(made.metrics["loss"])
    assert reached(("metrics", {"a": 5, "a\x1b[0m": "text"})).metrics == {"a": "text"}
    assert made.metrics["huge"] == math.inf
    assert made.metrics["text"] == "déjà"
    assert len(made.history) == 1


def test_what_a_script_logs_does_not_replace_the_time_nor_the_reported_step():
    logged = ("metrics", {"time": 99.0, "epoch": 0, "step": 7, "accuracy": 0.5})
    before, after = reached(logged, progress(4, 2, 0.5), logged).history
    assert before == {"time": 7.0, "epoch": 0, "step": 7, "accuracy": 0.5}
    assert after == {**before, "epoch": 5, "step": 2, "steps": 2, "loss": 0.5}


def test_a_long_history_is_thinned_out(monkeypatch):
    monkeypatch.setattr(results, "MAX_ROWS", 1000)
    made = reached(*(progress(epoch, 1, 1.0) for epoch in range(5000)))
    assert 400 < len(made.history) <= 1000
    assert (made.history[0]["epoch"], made.history[-1]["epoch"]) == (1, 5000)


@pytest.fixture
def local(tmp_path):
    made = LocalBackend(tmp_path / "state")
    yield made
    made.close()


def test_a_result_of_this_machine(local, tmp_path):
    code = """if True:
        import os, pathlib
        print("hello from", os.environ["RANK"])
        print({event!r})
        if os.environ["RANK"] == "0":
            folder = pathlib.Path(os.environ["K8SJOB_CHECKPOINT_DIR"])
            (folder / "last.pt").touch()
            (folder / "best.pt").symlink_to("gone.pt")
            os.utime(folder / "best.pt", (1, 1), follow_symlinks=False)
    """.format(event=Event("progress", {"epoch": 0, "step": 1, "loss": 0.5}, 1.0).encode())
    spec = JobSpec(
        name="job",
        image="r/x:1",
        run={"command": ["python", "-c", code]},
        replicas={"workers": 1},
        checkpoint={"dir": "/checkpoints"},
    )
    result = run(spec, folder=tmp_path, backend=local, view=lambda _: None)
    assert dict(result.logs) == {"master-0": "hello from 0\n", "worker-0": "hello from 1\n"}
    with pytest.raises(KeyError, match="'worker-7' is not one of master-0, worker-0"):
        result.logs["worker-7"]
    assert result.checkpoint == result.checkpoints / "last.pt"
    assert result.metrics == {"loss": 0.5}
    assert result.why == ()
    assert "history" not in repr(result)
    page = result._repr_html_()
    assert "rows: time, epoch, step, loss" in page
    assert "worker-0" in page


def test_output_that_the_terminal_cannot_show_ends_nothing(local, tmp_path, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    command = ["python", "-c", r"print('\ud55c\uae00')"]
    result = run(
        JobSpec(name="job", image="r/x:1", run={"command": command}), folder=tmp_path, backend=local
    )
    assert result.logs["master-0"] == "한글\n"
    out.flush()
    assert b"master-0 | ??\n" in out.buffer.getvalue()
    assert b"\njob Succeeded after " in out.buffer.getvalue()
    assert out.errors == "strict"


@pytest.mark.parametrize("wrong", [3, None, {"name": "x"}])
def test_what_is_neither_a_spec_nor_a_path_is_refused(wrong):
    for call in (run, plan, submit):
        with pytest.raises(SpecError, match=r"neither a JobSpec nor a path; .* JobSpec\(name="):
            call(wrong)


def test_arguments_that_contradict_each_other_are_refused_before_anything_starts(local):
    for given in ({"fresh": True, "resume": "x"}, {"fresh": True, "backend": local}):
        with pytest.raises(ValueError, match="fresh"):
            run(SPEC, **given)
    cluster = ClusterBackend(Cluster())
    for wrong in (True, "client"):
        with pytest.raises(ValueError, match=f"dry_run={wrong!r}: it can only be 'server'"):
            submit(SPEC, backend=cluster, dry_run=wrong)
    with pytest.raises(ValueError, match="give either backend"):
        submit(SPEC, backend=cluster, namespace="red")
    assert cluster.jobs() == []


def test_a_failure_carries_its_result(local, tmp_path):
    code = "import sys; print('<b>last</b>'); sys.exit('gone \\x1b]0;title\\x07<script>')"
    spec = JobSpec(
        name="job",
        image="r/x:1",
        run={"command": ["python", "-c", code]},
        policy={"max_restarts": 0},
    )
    with pytest.raises(JobFailed) as raised:
        run(spec, folder=tmp_path, backend=local, view=lambda _: None)
    assert raised.value.exit_code == 100
    result = run(spec, folder=tmp_path, backend=local, view=lambda _: None, check=False)
    assert (result.state, result.checkpoints) == (JobState.FAILED, None)
    result = raised.value.result
    assert result.state is JobState.FAILED
    assert "gone <script>" in str(raised.value)
    assert "\x1b" not in str(raised.value)
    assert "<b>last</b>" in result.logs["master-0"]
    assert "<script>" not in result._repr_html_()
    assert "&lt;script&gt;" in result._repr_html_()


# --- in a cluster ---------------------------------------------------------------------------------

SPEC = JobSpec(name="tiny", image="team/tiny@sha256:" + "a" * 64, run={"script": "main.py"})


EVENT = Event("progress", {"epoch": 0, "step": 3, "loss": 0.5}, 1.0).encode()
POD = pod("master-0", 0, node="node-1")
POD["metadata"] |= {"name": "tiny-master-0", "namespace": "blue", "uid": "pod-1"}
POD["metadata"]["labels"]["training.kubeflow.org/job-name"] = "tiny"


class Cluster(Apiserver):
    """Its watches end at once; the pod has written two lines."""

    def stream(self, path, *, query=None, idle=300.0, stop=None):
        if path.endswith("/log"):
            for text in (EVENT, "<b>hello</b> 한글"):
                yield f"2026-01-01T00:00:00.000000000Z {text}\n".encode()
        else:
            time.sleep(0.05)


@pytest.fixture
def api():
    return Cluster()


def test_a_submitted_job_is_its_reference_and_more(api):
    backend = ClusterBackend(api)
    job = submit(SPEC, backend=backend)
    ref = JobRef("tiny", "blue", job.uid, "PyTorchJob")
    assert job == ref
    assert ref == job
    assert {job: 1}[ref] == 1
    assert str(job) == "blue/tiny"
    assert job != JobRef("tiny", "red", job.uid)
    assert job.state is JobState.CREATED
    assert (job.metrics, list(job.history), job.checkpoint) == ({}, [], None)
    assert list(job.logs) == ["master-0"]
    assert isinstance(job.why(), list)
    assert "blue/tiny" in job._repr_html_()
    api.end("blue", "tiny")
    assert job.wait(view=lambda _: None).state is JobState.SUCCEEDED
    job.delete()
    assert "blue/tiny" in job._repr_html_()
    with pytest.raises(JobNotFound):
        job.status()
    with pytest.raises(JobFailed, match="was deleted"):
        job.wait(view=lambda _: None)


def test_what_a_job_in_a_cluster_has_reached_so_far(api):
    job = submit(SPEC, backend=ClusterBackend(api))
    api.pods = [POD]
    assert job.metrics == {"loss": 0.5}
    assert [(row["epoch"], row["step"]) for row in job.history] == [(1, 3)]
    assert job.logs["master-0"] == "<b>hello</b> 한글\n"
    assert "node-1" in job._repr_html_()


def test_a_submitted_job_that_fails_raises_only_from_wait(api):
    job = submit(SPEC, backend=ClusterBackend(api))
    api.end("blue", "tiny", "Failed")
    assert job.result().state is JobState.FAILED
    with pytest.raises(JobFailed) as raised:
        job.wait(view=lambda _: None)
    assert raised.value.result.state is JobState.FAILED
    assert job.wait(view=lambda _: None, check=False).exit_code == 100


def test_an_interrupted_wait_leaves_the_job_alone(api):
    job = submit(SPEC, backend=ClusterBackend(api))
    with pytest.raises(KeyboardInterrupt, match=r"blue/tiny continues; wait\(\)"):
        job.wait(view=lambda _: os.kill(os.getpid(), signal.SIGINT))
    assert job.state is JobState.CREATED
    api.end("blue", "tiny")  # so that the thread that still watches it ends


# --- cards ----------------------------------------------------------------------------------------


def test_a_result_of_many_metrics_shows_its_checkpoint():
    metrics = {"checkpoint": "<b>", **{f"grad/{at}": 0.5 for at in range(99)}}
    page = RunResult(
        JobRef("job", "ns"), JobState.SUCCEEDED, metrics=metrics, checkpoint=Path("/c/step-1")
    )._repr_html_()
    assert "/c/step-1" in page
    assert "and 68 more" in page
    assert "0.333333<" in card("", {"loss": 1 / 3})


def test_colors_can_be_read_on_white_and_on_black():
    def light(color):
        parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    states = ["Running", "Succeeded", "Failed", "Restarting"]
    colors = {c for state in states for c in re.findall("#[0-9a-f]{6}", card("", {}, state=state))}
    assert len(colors) == len(states)
    for color in colors:
        assert 1.05 / (light(color) + 0.05) > 3, "on white"
        assert (light(color) + 0.05) / (light("#1e1e1e") + 0.05) > 3, "on a dark page"


def test_a_curve_of_many_points_is_small_and_of_none_is_nothing():
    many = curve(((at, 1e308 * (-1) ** at) for at in range(100_000)), "loss")
    assert len(many) < 10_000
    assert "nan" not in many
    assert "inf" not in many
    assert curve([(0, math.nan), (1, 2.0)], "loss") == curve([], "loss") == ""
    assert "loss: 3 to nan, lowest 2" in curve([(0, 3.0), (1, 2.0), (2, math.nan)], "loss")


def test_long_texts_and_tables_are_cut():
    assert len(folded("output", "x" * 10**6)) < 30_000
    assert "and 68 more" in table(("n",), [[at] for at in range(100)])
