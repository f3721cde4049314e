import json
import os
import posixpath
import re
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest

from k8sjob import runtime
from k8sjob.contract import CONFIG_ENV, Event, EventKind, RuntimeConfig
from k8sjob.runtime.base.config import TIMEOUTS
from k8sjob.runtime.base.event_lines import Reporter
from k8sjob.runtime.tracking import Trackers

MLFLOW = {"mlflow": {"uri": "http://server"}}


class FakeWriter:
    """torch.utils.tensorboard's SummaryWriter, in memory; `written` has what each folder got."""

    written: ClassVar[dict[str, list[tuple[object, ...]]]] = {}

    def __init__(self, folder):
        self.folder, self.waiting = folder, []

    def add_scalar(self, *point):
        self.waiting.append(point)

    def flush(self):
        self.written.setdefault(self.folder, []).extend(self.waiting)
        self.waiting = []

    def close(self):
        self.written[self.folder].append("closed")


def test_progress_and_metrics_are_drawn_along_the_steps_of_the_run(capsys, mlflow):
    reporter, tracking = Reporter(active=True, events=True), Trackers(pytest.fail)
    tracking.open({"mlflow": {}}, "digits", {}, None)
    reporter.sink = tracking
    place = {"epochs": 3, "steps": 10, "eta_s": 1.0, "slowest": 1}
    reporter.emit(EventKind.PROGRESS, epoch=1, step=4, loss=0.5, **place)
    reporter.emit(EventKind.METRICS, epoch=2, accuracy=0.75, note="fine", best=True)
    reporter.emit(EventKind.METRICS, epoch=2, steps=7, accuracy=0.875)
    reporter.emit(EventKind.METRICS, epoch="last", steps=7, step=1, accuracy=1.0)
    reporter.emit(EventKind.WARNING, message="look")
    tracking.close("finished")
    assert mlflow.runs["r0"]["curve"] == [
        ("loss", 14, 0.5),
        ("accuracy", 14, 0.75),
        ("accuracy", 14, 0.875),
        ("accuracy", 14, 1.0),
    ]
    assert len(capsys.readouterr().out.splitlines()) == 5


@pytest.mark.parametrize("by", ["spec", "script"])
def test_tensorboard_has_a_folder_of_the_spec_or_the_script(train, tmp_path, monkeypatch, by):
    board = SimpleNamespace(SummaryWriter=FakeWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    given = {"tensorboard": {"dir": str(tmp_path / "spec")}}
    chosen = {"tensorboard": tmp_path / "script"} if by == "script" else {}
    train(0.75, tracking=given, **chosen)
    (number, end) = FakeWriter.written.pop(str(tmp_path / by))
    assert number[:3] == ("loss", 0.75, 0)
    assert (end, FakeWriter.written) == ("closed", {})
    assert not (tmp_path / "checkpoints" / "tracking.json").exists()


class FakeMlflow:
    """What the client of MLflow is asked for: a server with its runs in memory."""

    def __init__(self, monkeypatch):
        self.runs, self.experiments, self.asked, self.down = {}, {}, [], 0
        self.blocked = threading.Event()
        self.blocked.set()
        named = lambda *names: lambda *values: dict(zip(names, values, strict=True))  # noqa: E731
        entities = SimpleNamespace(
            Metric=named("key", "value", "timestamp", "step"), Param=named("key", "value")
        )
        monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=self.client))
        monkeypatch.setitem(sys.modules, "mlflow.entities", entities)

    def client(self, tracking_uri):
        self.asked.append(tracking_uri)
        if self.down:
            self.down -= 1
            raise ConnectionError("refused")
        return self

    def get_experiment_by_name(self, name):
        return self.experiments.get(name)

    def create_experiment(self, name):
        self.experiments[name] = SimpleNamespace(experiment_id=f"e-{name}")
        return f"e-{name}"

    def create_run(self, experiment, run_name):
        run_id = f"r{len(self.runs)}"
        self.runs[run_id] = {"of": (experiment, run_name), "curve": [], "status": "RUNNING"}
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def get_run(self, run_id):
        return self.runs[run_id]

    def update_run(self, run_id, status):
        self.runs[run_id]["status"] = status

    set_terminated = update_run

    def log_batch(self, run_id, params=(), metrics=()):
        self.blocked.wait()
        assert len(metrics) <= 1000
        for name in (one["key"] for one in metrics):  # MLflow's own rules
            if not re.fullmatch(r"[\w.\- :/]{1,250}", name) or posixpath.normpath(name) != name:
                raise ValueError(f"Invalid value {name!r}")
        run = self.runs[run_id]
        run.setdefault("params", {one["key"]: one["value"] for one in params})
        run["curve"] += [(one["key"], one["step"], one["value"]) for one in metrics]


@pytest.fixture
def mlflow(monkeypatch):
    yield (server := FakeMlflow(monkeypatch))
    server.down = 0
    for thread in threading.enumerate():
        if thread.name.startswith("tracking-"):
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture
def train(monkeypatch, tmp_path):
    """One attempt of a job, with its numbers."""

    def attempt(*losses, error=None, tracking=MLFLOW, **options):
        config = RuntimeConfig(
            job="digits",
            checkpoint_dir=str(tmp_path / "checkpoints"),
            tracking=tracking,
        )
        monkeypatch.setenv(CONFIG_ENV, config.encode())
        with runtime.session(**options) as job:
            for loss in losses:
                job.log(loss=loss)
            if error:
                raise error

    return attempt


def test_a_resumed_job_continues_its_run(mlflow, train):
    with pytest.raises(ValueError, match="broken"):
        train(0.5, error=ValueError("broken"))
    assert mlflow.runs["r0"]["status"] == "FAILED"
    train(0.25)
    (run,) = mlflow.runs.values()
    assert run["of"] == ("e-digits", "digits")
    assert run["status"] == "FINISHED"
    assert run["curve"] == [("loss", 0, 0.5), ("loss", 0, 0.25)]
    assert run["params"]["strategy"] == "ddp"
    assert run["params"]["world_size"] == "1"


def test_names_that_mlflow_refuses_do_not_cost_the_other_numbers(mlflow):
    tracking = Trackers(pytest.fail)
    tracking.open({"mlflow": {}}, "digits", {}, None)
    given = ("acc@5", "top-5 (%)", "val/f1", "a//b", "../x", "", "n" * 300, "loss")
    tracking(Event("metrics", dict.fromkeys(given, 0.5)))
    tracking.close("finished")
    names = [name for name, _, _ in mlflow.runs["r0"]["curve"]]
    expected = ["acc_5", "top-5 ___", "val/f1", "a/_/b", "_/x", "_", "n" * 250, "loss"]
    assert names == expected


@pytest.mark.parametrize("left", ["[", "[1]"])
def test_a_damaged_file_of_ids_begins_a_run(mlflow, train, tmp_path, left):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "tracking.json").write_text(left)
    train(1.0)
    assert list(mlflow.runs) == ["r0"]
    ids = json.loads((tmp_path / "checkpoints" / "tracking.json").read_text())
    assert ids == {"mlflow": "r0"}


def test_ids_that_cannot_be_kept_cost_a_warning_and_no_numbers(mlflow, tmp_path):
    (tmp_path / "full").touch()
    warnings = []
    tracking = Trackers(warnings.append)
    tracking.open({"mlflow": {}}, "digits", {}, tmp_path / "full")
    tracking(Event("metrics", {"loss": 0.5}))
    tracking.close("finished")
    (run,) = mlflow.runs.values()
    assert (run["status"], run["curve"]) == ("FINISHED", [("loss", 0, 0.5)])
    (warning,) = warnings
    assert "tracking.json cannot be written" in warning


@pytest.mark.parametrize("tries", [2, 10**6])
def test_a_tracker_that_is_down_costs_one_warning(mlflow, train, capsys, monkeypatch, tries):
    short = replace(TIMEOUTS, retry=0.001, join=0.2)
    monkeypatch.setattr("k8sjob.runtime.tracking.TIMEOUTS", short)
    mlflow.down = tries
    train(1.0, 0.5)
    out = capsys.readouterr().out
    assert out.count("ConnectionError: refused; training continues") == 1
    curves = [run["curve"] for run in mlflow.runs.values()]
    assert curves == ([[("loss", 0, 1.0), ("loss", 0, 0.5)]] if tries == 2 else [])
    assert ("did not take any numbers of this attempt in time" in out) == (tries > 2)


def test_a_package_that_is_missing_is_named(monkeypatch, train, capsys):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    train(1.0)
    assert "add mlflow-skinny to image.pip" in capsys.readouterr().out


def test_a_slow_tracker_holds_nothing_up(mlflow):
    mlflow.blocked.clear()  # its first request does not return before the last number is there
    warnings = []
    tracking = Trackers(warnings.append)
    tracking.open({"mlflow": {}}, "digits", {}, None)
    for step in range(3000):
        tracking(Event("progress", {"epoch": 0, "step": step, "steps": 3000, "loss": 1.0}))
    assert warnings == ["tracking.mlflow is slow or unavailable: numbers are dropped"]
    mlflow.blocked.set()
    tracking.close("finished")
    (run,) = mlflow.runs.values()
    assert run["status"] == "FINISHED"
    assert [step for _, step, _ in run["curve"]] == list(range(len(run["curve"])))


WANDB = """
import atexit, subprocess, threading

def Settings(**_):
    pass

def init(**_):
    process = subprocess.Popen(["wandb-core", "90"], executable="/bin/sleep")
    atexit.register(process.wait)
    threading.Event().wait()  # the server does not respond
"""


def test_wandbs_own_process_does_not_hold_the_exit_up(tmp_path):
    (tmp_path / "wandb.py").write_text(WANDB)
    script = "from k8sjob import runtime\nwith runtime.session() as job: job.log(loss=1.0)"
    config = RuntimeConfig(job="digits", tracking={"wandb": {}})
    env = {**os.environ, CONFIG_ENV: config.encode()}
    env["K8SJOB_TIMEOUTS"] = json.dumps({"track": 1.0, "join": 0.1})
    out = subprocess.check_output([sys.executable, "-c", script], cwd=tmp_path, env=env, timeout=60)
    assert b"tracking.wandb did not take any numbers of this attempt in time" in out
