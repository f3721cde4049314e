"""Trackers of experiments: rank 0 sends its numbers to MLflow, W&B, Trackio and TensorBoard.

Training neither waits for a tracker nor fails with it: each has a thread and a bounded queue, and
what goes wrong is one warning. A run continues where its checkpoints do: its id lies beside them.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import queue
import re
import secrets
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from k8sjob.contract import TRACKER_PACKAGES, EventKind
from k8sjob.runtime.base.config import TIMEOUTS
from k8sjob.runtime.base.errors import first_line
from k8sjob.runtime.checkpoint.store import content_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from k8sjob.contract import Event
    from k8sjob.runtime.trainer_status import TrainerStatus

_QUEUE: Final = 1000
"""Points that wait for a slow tracker; later ones are dropped."""
_BATCH: Final = 200
"""Points that one call takes."""
_PAUSE: Final = 60.0
"""Seconds between two tries to reach a tracker, at most."""
_IDS: Final = "tracking.json"
_NO_CURVE: Final = frozenset({"epoch", "epochs", "step", "steps", "eta_s", "restart", "slowest"})
_T = TypeVar("_T")


class Point(NamedTuple):
    """Numbers of one step of the whole run, by name, at seconds since the epoch."""

    step: int
    values: Mapping[str, float]
    at: float


class TrackedRun(NamedTuple):
    """The run that a tracker shows.

    Attributes:
        name: the job's.
        id: what the tracker called the run in an earlier attempt; empty: there was none.
        parameters: shown beside its curves.
    """

    name: str
    id: str
    parameters: Mapping[str, str]


class Client(Protocol):
    """One run in one tracker; used by one thread. It may raise anything."""

    id: str

    def log(self, points: Sequence[Point]) -> None:
        """Send numbers."""

    def close(self, state: str) -> None:
        """End the run: "finished", "failed" or "stopped"."""


class _MlflowRun:
    """A run on an MLflow tracking server, or in a folder of it."""

    def __init__(self, settings: Mapping[str, Any], run: TrackedRun) -> None:
        mlflow = importlib.import_module("mlflow")
        entities = importlib.import_module("mlflow.entities")
        self._metric = entities.Metric
        self._client = mlflow.MlflowClient(tracking_uri=settings.get("uri"))
        if run.id:
            self._client.get_run(run.id)  # so that one that was deleted is an error here
            self._client.update_run(run.id, status="RUNNING")
            self.id = run.id
            return
        experiment = self._experiment(settings.get("experiment") or run.name)
        created = self._client.create_run(experiment, run_name=run.name)
        self.id = created.info.run_id
        parameters = [entities.Param(key, value[:500]) for key, value in run.parameters.items()]
        self._client.log_batch(self.id, params=parameters)

    def _experiment(self, name: str) -> str:
        if experiment := self._client.get_experiment_by_name(name):
            return str(experiment.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except Exception:
            if experiment := self._client.get_experiment_by_name(name):  # another job made it
                return str(experiment.experiment_id)
            raise

    def log(self, points: Sequence[Point]) -> None:
        metrics = [
            self._metric(_mlflow_name(name), value, int(point.at * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        # An MLflow server takes at most a thousand metrics in one request.
        for at in range(0, len(metrics), 1000):
            self._client.log_batch(self.id, metrics=metrics[at : at + 1000])

    def close(self, state: str) -> None:
        status = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}[state]
        self._client.set_terminated(self.id, status)


def _mlflow_name(name: str) -> str:
    """The name of a metric as MLflow allows it; of another it refuses the whole batch: `acc@5`."""
    parts = re.sub(r"[^\w.\- :/]", "_", name)[:250].split("/")
    return "/".join(part if part.strip(".") else "_" for part in parts)


class _WandbRun:
    """A run of Weights & Biases, online or in files for `wandb sync`."""

    def __init__(self, settings: Mapping[str, Any], run: TrackedRun) -> None:
        wandb = importlib.import_module("wandb")
        self.id = run.id or secrets.token_hex(4)
        self._run = wandb.init(
            project=settings.get("project") or run.name,
            entity=settings.get("entity"),
            mode="offline" if settings.get("offline") else "online",
            id=self.id,
            resume="allow",
            name=run.name,
            config=dict(run.parameters),
            settings=wandb.Settings(silent=True, console="off", login_timeout=30),
        )
        # A resumed run repeats steps, which the axis of its own does not take.
        self._run.define_metric("*", step_metric="train_step")

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log({**point.values, "train_step": point.step})

    def close(self, state: str) -> None:
        self._run.finish(exit_code=0 if state == "finished" else 1)


class _TrackioRun:
    """A run of Trackio, in its folder on this machine or in a Space."""

    def __init__(self, settings: Mapping[str, Any], run: TrackedRun) -> None:
        trackio = importlib.import_module("trackio")
        self.id = run.id or f"{run.name}-{secrets.token_hex(4)}"
        self._run = trackio.init(
            project=settings.get("project") or run.name,
            name=self.id,
            space_id=settings.get("space"),
            config=dict(run.parameters),
            resume="allow",
            embed=False,
        )

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log(dict(point.values), step=point.step)

    def close(self, state: str) -> None:  # noqa: ARG002 - Trackio's runs have no state
        self._run.finish()


class _TensorBoardRun:
    """Event files in a folder; TensorBoard joins those of all attempts."""

    id = ""

    def __init__(self, settings: Mapping[str, Any], run: TrackedRun) -> None:  # noqa: ARG002 - as the others
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        self._writer = tensorboard.SummaryWriter(settings["dir"])

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            for name, value in point.values.items():
                self._writer.add_scalar(name, value, point.step, point.at)
        self._writer.flush()

    def close(self, state: str) -> None:  # noqa: ARG002 - the files have no state
        self._writer.close()


_CLIENTS: Final[Mapping[str, Callable[[Mapping[str, Any], TrackedRun], Client]]] = {
    "mlflow": _MlflowRun,
    "wandb": _WandbRun,
    "trackio": _TrackioRun,
    "tensorboard": _TensorBoardRun,
}


class Tracker:
    """One tracker, with the thread that sends to it."""

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any],
        run: TrackedRun,
        *,
        warn: Callable[[str], None],
        opened: Callable[[str, str], None] = lambda _name, _id: None,
    ) -> None:
        """Start the thread, which connects.

        The name is a key of _CLIENTS, the settings are those of the spec's `tracking.NAME`. The
        thread calls `warn` once for each kind of trouble, and `opened` with the tracker's name and
        the run's id.
        """
        self._name, self._settings, self._run = name, settings, run
        self._warn, self._opened = warn, opened
        self._points: queue.Queue[Point | str] = queue.Queue(_QUEUE)
        self._ending = threading.Event()
        self._dropped = self._warned = self._down = self._absent = self._reached = False
        self._thread = threading.Thread(target=self._send, name=f"tracking-{name}", daemon=True)
        self._thread.start()

    def add(self, point: Point) -> None:
        """Send numbers, without waiting; those that find the queue full are dropped."""
        try:
            self._points.put_nowait(point)
        except queue.Full:
            if not (self._dropped or self._absent):
                self._warn(f"tracking.{self._name} is slow or unavailable: numbers are dropped")
            self._dropped = True

    def close(self, state: str, deadline: float) -> None:
        """Send what waits, and end the run; give up at `deadline` of the monotonic clock."""
        if self._down:  # it may be for hours: one more try
            deadline = min(deadline, time.monotonic() + TIMEOUTS.join)
        self._ending.set()
        with suppress(queue.Full):
            # The queue may be full: a tracker that is down has let it fill up.
            self._points.put(state, timeout=max(0.0, deadline - time.monotonic()))
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            missing = "the last numbers" if self._reached else "any numbers of this attempt"
            self._warn(f"tracking.{self._name} did not take {missing} in time")
            self._warned = True
            if self._name == "wandb":
                atexit.register(_end_wandb)  # after wandb's own, and so called before it

    def _send(self) -> None:
        try:
            client = self._retried(lambda: _CLIENTS[self._name](self._settings, self._run))
        except ModuleNotFoundError as error:
            self._absent = True
            package = TRACKER_PACKAGES[self._name]
            self._warn(
                f"tracking.{self._name}: {first_line(error)}; training continues without it; add"
                f" {package} to image.pip, or install it where `k8sjob run` trains"
            )
            return
        if client.id:
            self._opened(self._name, client.id)
        state = ""
        while not state:
            points, state = self._next()
            if points:
                self._retried(partial(client.log, points))
                self._reached = True
                # Points add up meanwhile, and travel in one request.
                self._ending.wait(TIMEOUTS.track_every)
        self._retried(partial(client.close, state))

    def _retried(self, call: Callable[[], _T]) -> _T:
        """The result of a call of the tracker, retried until it works."""
        pause = TIMEOUTS.retry
        while True:
            try:
                result = call()
            except ModuleNotFoundError:
                raise
            except BaseException as error:  # noqa: BLE001 - a tracker's own, sys.exit() included
                self._down = True
                if not self._warned:
                    self._warn(
                        f"tracking.{self._name}: {first_line(error)}; training continues, and the"
                        " tracker is tried again"
                    )
                self._warned = True
                # At the end no long pause is taken: close() waits for this thread.
                if self._ending.wait(pause):
                    time.sleep(TIMEOUTS.retry)
                pause = min(2 * pause, _PAUSE)
            else:
                self._down = False
                return result

    def _next(self) -> tuple[list[Point], str]:
        """Points that wait, and the run's end where it is reached; waits for the first."""
        points: list[Point] = []
        event = self._points.get()
        with suppress(queue.Empty):
            while isinstance(event, Point):
                points.append(event)
                if len(points) == _BATCH:
                    break
                event = self._points.get_nowait()
            else:
                return points, event
        return points, ""


def _end_wandb() -> None:
    """End wandb's own process, for which Python would wait until the server answers."""
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread may have ended, or another child be gone
            for pid in children.read_text().split():
                if b"wandb-core" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(int(pid), signal.SIGKILL)


class Trackers:
    """All trackers of a session; see Reporter.sink."""

    def __init__(
        self,
        warn: Callable[[str], None] = lambda _message: None,
        status: TrainerStatus | None = None,
    ) -> None:
        """No trackers yet; `status` is that of the TrainJob, where there is one."""
        self._warn, self._status = warn, status
        self._trackers: list[Tracker] = []
        self._step = 0  # of the whole run
        self._lock = threading.Lock()

    def open(
        self,
        settings: Mapping[str, Mapping[str, Any]],
        job: str,
        parameters: Mapping[str, Any],
        folder: Path | None,
    ) -> None:
        """Start the trackers that the spec names; one that this version does not know is ignored.

        `settings` are those of each tracker. The runs' ids lie in the folder of the checkpoints;
        without one each attempt is a run.
        """
        run_ids = _read_ids(folder)
        shown = {key: str(value) for key, value in parameters.items()}

        def opened(name: str, run_id: str) -> None:
            with self._lock:
                run_ids[name] = run_id
                try:
                    if folder is not None:
                        _write_ids(folder, run_ids)
                except OSError as error:
                    self._warn(
                        f"tracking: {_IDS} cannot be written: {error}; training continues, and a"
                        " resumed job starts new runs"
                    )

        for name in settings.keys() & _CLIENTS.keys():
            run = TrackedRun(job, run_ids.get(name, ""), shown)
            self._trackers.append(
                Tracker(name, settings[name], run, warn=self._warn, opened=opened)
            )

    def __call__(self, event: Event) -> None:
        """Pass on the numbers of an event of progress or metrics."""
        progress = event.data if event.kind == EventKind.PROGRESS else None
        if progress:  # metrics have a user's keys
            self._step = progress["epoch"] * progress["steps"] + progress["step"]
        numbers = {
            key: float(value)
            for key, value in event.data.items()
            if type(value) in {int, float} and key not in _NO_CURVE
        }
        for tracker in self._trackers:
            tracker.add(Point(self._step, numbers, event.time))
        if self._status:
            self._status.add(numbers, progress)

    def close(self, state: str) -> None:
        """End the runs: "finished", "failed" or "stopped"; waits for TIMEOUTS.track at most."""
        # The peers of a rank that failed wait for its end.
        seconds = TIMEOUTS.exit / 2 if state == "failed" else TIMEOUTS.track
        deadline = time.monotonic() + seconds
        if self._status:
            self._status.close(state, deadline)
        for tracker in self._trackers:
            tracker.close(state, deadline)


def _read_ids(folder: Path | None) -> dict[str, str]:
    try:
        return dict(json.loads(content_of(folder / _IDS))) if folder else {}
    except (OSError, ValueError, TypeError):
        return {}


def _write_ids(folder: Path, ids: Mapping[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{_IDS}.{os.urandom(4).hex()}"
    try:
        draft.write_text(json.dumps(ids))
        draft.replace(folder / _IDS)
    finally:
        draft.unlink(missing_ok=True)
