import json
import struct
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from k8sjob import runtime
from k8sjob.contract import CONFIG_ENV, EventKind, RuntimeConfig
from k8sjob.runtime.base.config import TIMEOUTS
from k8sjob.runtime.base.event_lines import Reporter
from k8sjob.runtime.tracking import ScalarFile, Tracking, crc32c


@pytest.mark.parametrize(
    ("content", "value"),  # RFC 3720, B.4
    [
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"", 0),
    ],
)
def test_the_checksum_is_castagnolis(content, value):
    assert crc32c(content) == value


def varint(message, at):
    """(the number that begins there, where it ends)."""
    end = next(i for i in range(at, len(message)) if message[i] < 0x80) + 1
    return sum((byte & 0x7F) << 7 * i for i, byte in enumerate(message[at:end])), end


def fields(message):
    """(number, value) of each field of a message of protocol buffers."""
    at = 0
    while at < len(message):
        key, at = varint(message, at)
        if key & 7 == 0:
            value, at = varint(message, at)
        else:
            size, at = varint(message, at) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], at)
            value, at = message[at : at + size], at + size
        yield key >> 3, value


def events(folder):
    """(step, {name: number}) of each event of the one file of a folder, the head left out."""
    (path,) = folder.iterdir()
    content, found = path.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        body = content[12 : 12 + length]
        for part, at in ((content[:8], 8), (body, 12 + length)):
            (told,) = struct.unpack("<I", content[at : at + 4])
            value = crc32c(part)
            assert told == ((value >> 15 | value << 17) + 0xA282EAD8) % 2**32
        found.append(dict(fields(body)))
        content = content[16 + length :]
    assert found[0][3] == b"brain.Event:2"
    for event in found[1:]:
        pairs = [dict(fields(value)) for _, value in fields(event[5])]
        yield event[2], {pair[1].decode(): struct.unpack("<f", pair[2])[0] for pair in pairs}


def written_to(folder, reporter):
    tracking = Tracking(reporter.warn)
    tracking.write_files(folder)
    return tracking


def test_numbers_come_back_with_their_steps(tmp_path):
    file = ScalarFile(tmp_path / "logs")
    file.add(0, {"loss": 2.5}, 1.0)
    file.add(300, {"loss": 0.5, "größe": -1.0}, 2.0)
    file.add(2**40, {"n" * 300: float("inf")}, 3.0)
    assert file.path.name.startswith("events.out.tfevents.")
    assert list(events(tmp_path / "logs")) == [
        (0, {"loss": 2.5}),
        (300, {"loss": 0.5, "größe": -1.0}),
        (2**40, {"n" * 300: float("inf")}),
    ]


def test_progress_and_metrics_are_drawn_along_the_steps_of_the_run(tmp_path, capsys):
    reporter = Reporter(active=True, events=True)
    reporter.sink = written_to(tmp_path, reporter)
    place = {"epochs": 3, "steps": 10, "eta_s": 1.0, "slowest": 1}
    reporter.emit(EventKind.PROGRESS, epoch=1, step=4, loss=0.5, **place)
    reporter.emit(EventKind.METRICS, epoch=2, accuracy=0.75, note="fine", best=True)
    reporter.emit(EventKind.METRICS, epoch=2, steps=7, accuracy=0.875)
    reporter.emit(EventKind.METRICS, epoch="last", steps=7, step=1, accuracy=1.0)
    reporter.emit(EventKind.WARNING, message="look")
    assert list(events(tmp_path)) == [
        (14, {"loss": 0.5}),
        (14, {"accuracy": 0.75}),
        (14, {"accuracy": 0.875}),
        (14, {"accuracy": 1.0}),
    ]
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_a_session_has_a_switch_for_them(tmp_path):
    with runtime.session(tensorboard=tmp_path / "logs") as job:
        job.log(accuracy=0.75)
    assert [numbers for _, numbers in events(tmp_path / "logs")] == [{"accuracy": 0.75}]


def test_without_a_place_training_continues(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    reporter = Reporter(active=True, events=False)
    reporter.sink = written_to(tmp_path / "file" / "logs", reporter)
    reporter.emit(EventKind.METRICS, accuracy=0.5)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("warning: no files for TensorBoard")
    assert second == "accuracy 0.5"


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

    def attempt(*losses, error=None, **settings):
        config = RuntimeConfig(
            job="digits",
            checkpoint_dir=str(tmp_path / "checkpoints"),
            tracking={"mlflow": {"uri": "http://server"}} | settings,
        )
        monkeypatch.setenv(CONFIG_ENV, config.encode())
        with runtime.session() as job:
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


@pytest.mark.parametrize("left", ["", "[", "[1]", '{"mlflow": 3}'])
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
    tracking = Tracking(warnings.append)
    tracking.open({"mlflow": {}}, "digits", {}, tmp_path / "full")
    tracking(1, {"loss": 0.5}, 0.0)
    tracking.close("finished")
    (run,) = mlflow.runs.values()
    assert (run["status"], run["curve"]) == ("FINISHED", [("loss", 1, 0.5)])
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
    tracking = Tracking(warnings.append)
    tracking.open({"mlflow": {}}, "digits", {}, None)
    for step in range(3000):
        tracking(step, {"loss": 1.0}, 0.0)
    assert warnings == ["tracking.mlflow is slow or unavailable: numbers are dropped"]
    mlflow.blocked.set()
    tracking.close("finished")
    (run,) = mlflow.runs.values()
    assert run["status"] == "FINISHED"
    assert [step for _, step, _ in run["curve"]] == list(range(len(run["curve"])))


def test_only_rank_0_tracks(mlflow):
    tracking = Tracking()
    tracking(0, {"loss": 1.0}, 0.0)
    tracking.close("finished")
    assert not mlflow.asked
