"""The contract of the client and the container: names, exit codes, events, reasons, settings.

Both sides import this module, so it is stdlib only and travels inside every job's image. An old job
may have a newer watcher: what the two sides exchange (event lines, termination messages, the
runtime's configuration) carries a version and is read leniently.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__version__ = "0.1.0"


JOB_FILE: Final = "job.yaml"
"""The name of a job's file in its folder."""
AGENT: Final = ("python", "-P", "-m", "k8sjob.runtime")
"""Starts the agent; -P: a k8sjob.py in the working directory is not taken for it."""

RUNTIME_HOME: Final = "/opt/k8sjob"
"""The runtime's folder in an image; first on PYTHONPATH."""
WORKDIR: Final = "/app"
"""The build context's folder in an image, and the container's working directory."""
DEPS_HOME: Final = "/opt/deps"
"""The folder, in an image, of packages that were put on a base without running it."""
CONTAINER_NAME: Final = "pytorch"
"""The container that the training operator looks for in each replica (webhook rule)."""
CONTAINER_NAMES: Final = (CONTAINER_NAME, "node")
"""How the container that trains is called, the second one by Kubeflow Trainer (webhook rule)."""
DEFAULT_PORT: Final = 23456
"""MASTER_PORT when the Master names no port (operator default)."""

CONFIG_ENV: Final = "K8SJOB_CONFIG"
"""The one JSON variable with the job's runtime settings: see RuntimeConfig."""
JOB_UID_ENV: Final = "K8SJOB_JOB_UID"
"""The uid of the Job of an Indexed Job's Pods; Kubernetes tells Pods of no other kind of job."""
NODE_NAME_ENV: Final = "K8SJOB_NODE_NAME"
"""The name of the Pod's node, where there is a preflight to name it."""
SECRET_ENV: Final = "K8SJOB_SECRET"  # noqa: S105 - the name of a variable
"""A secret of the job, by which its agents know each other's messages: from run.env_from, or from
the local back end."""
CHECKPOINT_DIR_ENV: Final = "K8SJOB_CHECKPOINT_DIR"
"""Overrides checkpoint.dir; the local back end sets it to the folder mapped on this machine."""
PATHS_ENV: Final = "K8SJOB_PATHS"
"""JSON {mount path: path on this machine}; set only by the local back end, absent in a pod."""
SOURCE_ENV: Final = "K8SJOB_SOURCE"
"""The user's folder of which WORKDIR is a copy; set only by the local back end."""
TERMINATION_LOG_ENV: Final = "K8SJOB_TERMINATION_LOG"
"""Overrides TERMINATION_LOG; set by the local back end, which has no kubelet to read it."""
TERMINATION_LOG: Final = "/dev/termination-log"
"""The pod's termination message; the kubelet keeps at most MAX_TERMINATION_BYTES of it."""
MAX_TERMINATION_BYTES: Final = 4096
ERROR_FILE_ENV: Final = "K8SJOB_ERROR_FILE"
"""The file to which a rank's process writes its Reason for the agent of its node."""
LIFELINE_ENV: Final = "K8SJOB_LIFELINE_FD"
"""A file descriptor; at its end of file the parent is gone, and the agent stops its group."""


TRACKER_PACKAGES: Final = {
    "mlflow": "mlflow-skinny",
    "wandb": "wandb",
    "trackio": "trackio",
    "tensorboard": "tensorboard",
}
"""The package that each tracker needs in the image."""


def after_agent(argv: Sequence[str]) -> list[str] | None:
    """The arguments after the agent's command, with -P or without; None for another command."""
    for agent in (AGENT, ("python", "-m", "k8sjob.runtime")):
        if tuple(argv[: len(agent)]) == agent:
            return list(argv[len(agent) :])
    return None


class Role(StrEnum):
    """The replica types of a PyTorchJob (keys of spec.pytorchReplicaSpecs)."""

    MASTER = "Master"
    WORKER = "Worker"


class ExitCode(IntEnum):
    """The exit codes of a container. The operator's ExitCode policy retries codes >= 128."""

    DONE = 0
    USER_ERROR = 1
    """The training script failed."""
    CONFIG = 2
    """The environment or the settings cannot work; restarting will not help."""
    RESTARTS_SPENT = 3
    """No restart is left, or another start would end in the same way; the Reason has the code of
    the last failure. Under restart_policy ExitCode any code >= 128 would start again."""
    PREFLIGHT = 4
    """The preflight refused a node, before the program started; the Reason names it."""
    PEER_LOST = 138
    """Another rank went away; this one is fine and may be started again (128 + SIGUSR1)."""
    HUNG = 140
    """The watchdog ended a group that made no progress (128 + SIGUSR2)."""
    STOPPED = 143
    """Stopped by SIGTERM, after a checkpoint where there was something to save (128 + SIGTERM)."""

    @staticmethod
    def of_status(returncode: int) -> int:
        """A return code of subprocess, -N for a signal, as a container shows it: 128 + N."""
        return 128 - returncode if returncode < 0 else returncode


class EventKind(StrEnum):
    """The kinds of events. The runtime emits the first group, only the watcher the second."""

    STARTING = "starting"
    """The phase of the start. From each replica's agent: "python" (processes were started:
    processes), "importing" (one of them imports torch), "running" (all run the script). From rank 0
    of a session: "waiting", world_size, missing (how many ranks have not come), ranks (the first of
    these)."""
    STARTED = "started"
    """A group was formed: world_size, backend, device (the name of rank 0's GPU), strategy,
    restart, import_s, rendezvous_s, and the versions python, torch and, on GPUs, cuda."""
    PROGRESS = "progress"
    """epoch (from 0), epochs, step (in the epoch), steps, loss, samples_per_s, step_s (seconds of a
    step), memory_bytes (the peak of the rank that has most); except after the first step, which
    also loads kernels or compiles, eta_s; where there is one grad_norm (of this step, before
    clipping); with several ranks wait_s (seconds of a step lost to the slowest rank, the mean over
    the ranks) and slowest (that rank); after a restart of the processes its number, restart. Once a
    second and at each epoch's last step, then with epoch_loss, the mean over the whole epoch."""
    METRICS = "metrics"
    """The arguments of the user's `job.log(...)`."""
    CHECKPOINT = "checkpoint"
    """path, epoch, step, seconds (until it was on the disk), stall_s (how long training waited)."""
    RESUMED = "resumed"
    """path, epoch, step."""
    WARNING = "warning"
    """message. Of a group that waits, which may become a hang: reason NO_PROGRESS, seconds, over
    (whether it waits no longer) and, where only one rank does not wait, rank. Of a launcher that
    the script has started in a rank: reason OWN_LAUNCHER, command."""
    STOPPING = "stopping"
    """A stop was requested: signal, epoch, step."""
    FINISHED = "finished"
    """seconds, and the last numbers given to `job.log(...)`."""
    RESTARTING = "restarting"
    """A replica's processes start again in place: restart, and why, as a Reason's fields. Written
    by its agent; not for a group that starts again because a node came or left."""
    UNMET = "unmet"
    """Several replicas ran to their end and no process group spanned them, so each trained
    separately: world_size (ranks of the job), replicas (their number). Written by the Master's
    agent, at the end, together with a termination message (Reason.type "Unmet", exit_code 0)."""

    JOB = "job"
    """The job's state changed: state, reason, message, exit_code."""
    REPLICA = "replica"
    """A replica changed: phase, reason, restarts, node, exit_code, message, waiting."""
    LOG = "log"
    """One line of a replica's output: text, attempt, timestamp."""
    FINDING = "finding"
    """A finding of `why`: cause, message, next_step."""


NO_PROGRESS: Final = "no-progress"
OWN_LAUNCHER: Final = "own-launcher"
LAUNCHES: Final = (
    r"(^|[;&|]\s*|/)(\w+=\S*\s+)*(torchrun|deepspeed|horovodrun|mpirun|mpiexec)\b(?! --?[hVv])"
    r"|\btorch\.distributed\.(run|launch)\b|\baccelerate(\.commands\.launch|\s+launch)\b"
)
"""An expression: a launcher at the beginning of a command, or as a module."""
EVENT_MARK: Final = "k8sjob/1 "
_EVENT_BEGIN: Final = EVENT_MARK + "{"
_OF_THE_WATCHER: Final = frozenset(
    {EventKind.JOB, EventKind.REPLICA, EventKind.LOG, EventKind.FINDING}
)
_MAX_EVENT: Final = 64 * 1024
_SURROGATE: Final = "[\ud800-\udfff]"
_MAX_DEPTH: Final = 16
_MAX_DIGITS: Final = 100
_MAX_TIME: Final = 253_402_300_799.0
"""The end of the year 9999, the last moment that a datetime can hold."""
_MAX_RANK: Final = 10**6
_MAX_STEP: Final = 2**53
_MIN_MESSAGE: Final = 400
"""A longer message gives way before the causes do."""


def decode_object(text: str, max_length: int = 2**20) -> dict[str, Any] | None:
    """The JSON object in an untrusted text, as a termination message; None if there is none.

    Decoding and using the result does not fail for any text: one that is too long or too deeply
    nested is not decoded, and a number too large for a float is infinite.
    """
    if len(text) > max_length:
        return None
    try:
        body = json.loads(text, parse_int=_integer)
        if "\\u" in text or not text.isascii():  # halves of characters, which no file takes
            whole = re.sub(_SURROGATE, "\ufffd", json.dumps(body, ensure_ascii=False))
            body = json.loads(whole, parse_int=_integer)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) and is_shallow(body, _MAX_DEPTH) else None


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MAX_DIGITS else float(digits)


def is_shallow(value: Any, depth: int) -> bool:
    """Whether JSON has no more than so many objects and lists inside of each other."""
    # Of a million values each is looked at, and JSON has no subclasses.
    nested = {dict, list}
    level = [value] if type(value) in nested else []
    while level and depth:
        parts = (node.values() if type(node) is dict else node for node in level)
        level = [item for part in parts for item in part if type(item) in nested]
        depth -= 1
    return not level


def _is_time(value: Any) -> bool:
    # From 1901 on: a machine that has lost its clock may be before 1970.
    return type(value) in (int, float) and -(2**31) <= value <= _MAX_TIME


def _is_integer(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


LOG: Final = EventKind.LOG
"""The kind of nearly all events: in Python 3.11 it takes longer to read from the enumeration than
to compare."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened, on its way from a rank or a back end to a terminal or a program.

    Attributes:
        kind: an EventKind; a plain str where a newer runtime sent one that is unknown.
        data: JSON object; the keys of each kind are given at EventKind.
        time: seconds since the epoch, by the sender's clock.
        replica: "master-0", "worker-2"; empty if the event concerns the whole job.
        printed: whether the script has printed the same, so that a screen need not.
    """

    kind: str
    data: dict[str, Any] = field(default_factory=dict)
    time: float = 0.0
    replica: str = ""
    printed: bool = False

    def encode(self) -> str:
        """The event as one line of a log, without the newline; pure ASCII."""
        body = {"kind": self.kind, "time": round(self.time, 3), "data": self.data}
        body |= {"printed": True} if self.printed else {}
        return EVENT_MARK + json.dumps(body, separators=(",", ":"), default=str)

    @classmethod
    def decode(cls, line: str, replica: str = "") -> Event | None:
        """The runtime's event in a line of a log; None if the line is ordinary text.

        Text in front of the event (an unfinished progress bar) is ignored. A line that only looks
        like an event is ordinary text, and so is an event of a kind that only the watcher makes:
        a job cannot report its own state.
        """
        at = line.find(_EVENT_BEGIN)
        if at < 0:
            return None
        body = decode_object(line[at + len(EVENT_MARK) :], _MAX_EVENT) or {}
        kind, data, time = body.get("kind"), body.get("data"), body.get("time")
        if not isinstance(kind, str) or kind in _OF_THE_WATCHER:
            return None
        if time is None or not (isinstance(data, dict) and _is_time(time)):
            return None
        return cls(kind, data, float(time), replica, printed=body.get("printed") is True)


class Reason(NamedTuple):
    """Why a container ended: its termination message, one JSON object of at most 4096 bytes.

    Attributes:
        exit_code: the container's exit code; see ExitCode.
        rank: the process rank that failed first on this node; -1 when it concerns the whole node.
        type: the exception's class, "Signal", "Hang", "PeerLost", "Stopped", "EnvError"; "Late"
            where the others waited too long for a rank that works; "Left" where the rank waited
            for culprits that had ended with exit code 0; "Preflight"; "Unmet", with exit_code 0,
            see EventKind.UNMET.
        message: the last error, one paragraph.
        where: "file:line" of the last frame, or empty.
        time: seconds since the epoch at which it was seen.
        culprits: ranks named by the watchdog, missing at the rendezvous, or done too early.
        step: the rank's last optimizer step, counted from 0; -1 where it is not known.
        causes: the exceptions behind it, the last one first: "from OSError: ...", and of a group
            "first OSError: ..."; "while handling OSError: ..." is not known to be a cause.
    """

    exit_code: int
    rank: int = -1
    type: str = ""
    message: str = ""
    where: str = ""
    time: float = 0.0
    culprits: tuple[int, ...] = ()
    step: int = -1
    causes: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()

    def means(self, code: ExitCode) -> bool:
        """Whether it is that exit code of the runtime's, and not a script's own or a signal's."""
        return self.exit_code == code and self.type not in {"Exit", "Signal"}

    def encode(self, limit: int = MAX_TERMINATION_BYTES) -> str:
        """JSON of at most `limit` bytes; the message is shortened first, then the causes."""
        body = self._asdict()
        if not self.nodes:
            del body["nodes"]  # most reasons are about none
        text = json.dumps(body)
        while len(text) > limit:
            body["message"] = body["message"][: len(body["message"]) * 3 // 4]
            body["where"], body["type"] = body["where"][-200:], body["type"][:100]
            for name, most in (("culprits", 100), ("nodes", 8)):
                body[name] = body.get(name, ())[:most]
            if len(body["message"]) < _MIN_MESSAGE:
                body["causes"] = [cause[: len(cause) * 3 // 4] for cause in body["causes"][:4]]
            text = json.dumps(body)
        return text

    @classmethod
    def decode(cls, text: str) -> Reason | None:
        """The reason in a termination message; None if something else wrote the message."""
        body = decode_object(text, MAX_TERMINATION_BYTES) or {}
        code, rank, time = body.get("exit_code"), body.get("rank", -1), body.get("time", 0.0)
        culprits, step = body.get("culprits", []), body.get("step", -1)
        causes, nodes = body.get("causes", []), body.get("nodes", [])
        if not _is_integer(step, -1, _MAX_STEP):
            step = -1
        if code is None or not (_is_integer(code, 0, 255) and _is_integer(rank, -1, _MAX_RANK)):
            return None
        if not (_is_time(time) and isinstance(culprits, list)):
            return None
        if not all(_is_integer(culprit, 0, _MAX_RANK) for culprit in culprits):
            return None
        return cls(
            exit_code=code,
            rank=rank,
            type=str(body.get("type", "")),
            message=str(body.get("message", "")),
            where=str(body.get("where", "")),
            time=float(time),
            culprits=tuple(culprits),
            step=step,
            causes=tuple(map(str, causes)) if isinstance(causes, list) else (),
            nodes=tuple(map(str, nodes)) if isinstance(nodes, list) else (),
        )


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """The settings that a container gets beside the operator's variables, as JSON in CONFIG_ENV.

    Attributes:
        job: the job's name.
        strategy: kind of the strategy; its other settings are in `options`.
        options: the strategy's settings, as in the spec's `strategy` without `kind`.
        backend: process group backend; None chooses nccl on GPUs and gloo on CPUs.
        checkpoint_dir: folder of the checkpoints; None switches them off.
        checkpoint_every: "epoch", or a number of optimizer steps.
        checkpoint_keep: how many whole checkpoints stay.
        checkpoint_format: "auto", "full" (one file, by rank 0) or "sharded" (each rank its part).
        metrics: templates of the lines that a script without a session prints its metrics in; None:
            known formats; empty: they are not read. See printed_metrics.
        local_rank_arg: "--local_rank" or "--local-rank", appended with the rank to the script's
            arguments for scripts that parse it; None for all others.
        max_restarts: how often the whole group may start again, over all pods and containers.
        restart_policy: the replicas' restartPolicy; ExitCode also where each restart is a new pod.
        rendezvous_timeout: seconds until all ranks must have come.
        collective_timeout: seconds until a collective counts as failed.
        hang_timeout: seconds without progress, or of a wait in a collective where there is no
            session, after which the group is ended; 0: never; None: see session_hang_timeout, and
            without a session as long as torch's gloo waits.
        stop_grace: seconds between SIGTERM and SIGKILL inside the pod; under the pod's own grace.
        tracking: tracker -> its settings, as in the spec's `tracking`.
        preflight: empty for none; "timeout" in seconds, "max_slowdown", perhaps "min_bandwidth" in
            bytes per second; "asks": what the first node and the others ask for, each with "gpus",
            and "memory" and "shm" in bytes.
    """

    job: str = ""
    strategy: str = "ddp"
    options: dict[str, Any] = field(default_factory=dict)
    backend: str | None = None
    checkpoint_dir: str | None = None
    checkpoint_every: Literal["epoch"] | int = "epoch"
    checkpoint_keep: int = 3
    checkpoint_format: str = "auto"
    metrics: list[str] | None = None
    local_rank_arg: str | None = None
    max_restarts: int = 3
    restart_policy: str = "OnFailure"
    rendezvous_timeout: float = 600.0
    collective_timeout: float = 600.0
    hang_timeout: float | None = None
    stop_grace: float = 45.0
    tracking: dict[str, Any] = field(default_factory=dict)
    preflight: dict[str, Any] = field(default_factory=dict)

    @property
    def session_hang_timeout(self) -> float:
        """hang_timeout in a session; by default as long as torch's NCCL waits."""
        return 600.0 if self.hang_timeout is None else self.hang_timeout

    def encode(self) -> str:
        """Compact JSON; equal settings give equal text."""
        body = {"version": 1, **asdict(self)}
        for name in ("tracking", "preflight"):  # most jobs have none
            if not body[name]:
                del body[name]
        if self.metrics is None:
            del body["metrics"]
        return json.dumps(body, separators=(",", ":"), sort_keys=True)


def counted(number: int, noun: str, plural: str = "s") -> str:
    """A number and its noun: `1 file`, `2 files`; `plural` is what the noun then ends with."""
    return f"{number} {noun}{'' if number == 1 else plural}"


def closest(word: str, names: Iterable[str]) -> str:
    """The known name that a word is probably a misspelling of, case aside; empty without one."""
    by_lower = {name.lower(): name for name in names}
    from difflib import get_close_matches  # noqa: PLC0415 - only after a mistake

    close = get_close_matches(word.lower(), list(by_lower), n=1)
    return by_lower[close[0]] if close else ""


def did_you_mean(word: str, names: Iterable[str], otherwise: str) -> str:
    """The next step after a name that is not known: the name that was meant, or `otherwise`."""
    meant = closest(word, names)
    return f"did you mean {meant!r}?" if meant else otherwise
