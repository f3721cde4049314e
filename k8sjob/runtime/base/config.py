"""The job's settings inside the container, and the files that the agent and its ranks share."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from k8sjob import contract
from k8sjob.contract import RuntimeConfig
from k8sjob.runtime.base.errors import EnvError

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

TIMEOUTS_ENV: Final = "K8SJOB_TIMEOUTS"
"""JSON with some of Timeouts, for tests."""
_SHARED: Final = Path("/dev/shm")  # noqa: S108 - the pod's

_DEFAULTS: Final = asdict(RuntimeConfig())
_OPTIONAL: Final[dict[str, set[type]]] = {"metrics": {list}, "hang_timeout": {int, float}}
"""Fields that may be None and are no text otherwise."""


def runtime_config(environ: Mapping[str, str] = os.environ) -> RuntimeConfig:
    """The settings of the job; the defaults where none were given.

    Keys that this version does not know are ignored: a newer client may have sent them.

    Raises:
        EnvError: CONFIG_ENV is not a JSON object, or a field has a value of the wrong type.
    """
    text = environ.get(contract.CONFIG_ENV)
    config = RuntimeConfig() if text is None else _decode(text)
    # On a machine without mounts the folder has another path; an empty one turns checkpoints off.
    override = environ.get(contract.CHECKPOINT_DIR_ENV)
    return config if override is None else replace(config, checkpoint_dir=override or None)


def agents_key(environ: Mapping[str, str] = os.environ) -> bytes:
    """The key of the agents' messages, from variables that all containers of the job have."""
    names = (contract.CONFIG_ENV, contract.JOB_UID_ENV, contract.SECRET_ENV)
    return hashlib.sha256(json.dumps([environ.get(name, "") for name in names]).encode()).digest()


def error_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The file for a rank's Reason; None if there is no agent to read it."""
    return _path(environ, contract.ERROR_FILE_ENV)


def node_name() -> str:
    """The name of this pod's node; outside a cluster, the machine's."""
    return os.environ.get(contract.NODE_NAME_ENV) or socket.gethostname()


def launcher_hosts_store() -> bool:
    """Whether the launcher hosts the rendezvous' store, as torchrun does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def started_by_k8sjob() -> bool:
    """Whether k8sjob started this job, so that its event lines are read."""
    return contract.CONFIG_ENV in os.environ


class StatusServer(NamedTuple):
    """Where Kubeflow Trainer takes the status of this TrainJob: an https URL, and two files."""

    url: str
    ca_file: str
    token_file: str


def status_server(environ: Mapping[str, str] = os.environ) -> StatusServer | None:
    """The server that Kubeflow Trainer names to the containers of a TrainJob, if it has one."""
    names = ("URL", "CA_CERT", "TOKEN")
    server = StatusServer(*(environ.get(f"KUBEFLOW_TRAINER_SERVER_{name}", "") for name in names))
    return server if all(server) and server.url.startswith("https://") else None


def safe_path() -> bool:
    """Whether the user asked Python not to put the script's folder on sys.path."""
    return bool(os.environ.get("PYTHONSAFEPATH"))


def termination_log(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The file for the container's Reason; None outside a container.

    The kubelet mounts its file before the container starts. Where it is absent nothing is created:
    this may be the /dev of a machine that is not a container.
    """
    named = _path(environ, contract.TERMINATION_LOG_ENV)
    kubelet = Path(contract.TERMINATION_LOG)
    return named or (kubelet if kubelet.exists() else None)


def restarts_file() -> Path | None:
    """The file that counts restarts: in the pod's shared memory, or beside a local replica's log.

    None outside a container: nothing starts the agent again there.
    """
    named = os.environ.get(contract.TERMINATION_LOG_ENV)
    if named:
        return Path(f"{named}.restarts")
    # Outside a pod the file would count the starts of jobs that have nothing to do with each other.
    if not Path(contract.TERMINATION_LOG).exists() or not os.access(_SHARED, os.W_OK):
        return None
    return _SHARED / f"k8sjob-restarts-{socket.gethostname()}.json"


def take_lifeline(environ: MutableMapping[str, str] = os.environ) -> int | None:
    """The file descriptor that reaches its end of file when the parent is gone; None: no parent.

    It is kept from child processes, in which its number would mean nothing.
    """
    text = environ.pop(contract.LIFELINE_ENV, None)
    if text is None:
        return None
    os.set_inheritable(int(text), False)  # noqa: FBT003 - os has no keyword for it
    return int(text)


def mapped_paths(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Mount path of the spec -> path on this machine; empty in a pod.

    Raises:
        EnvError: PATHS_ENV is not a JSON object.
    """
    return _object(contract.PATHS_ENV, environ.get(contract.PATHS_ENV, "{}"))


def source_folder() -> Path | None:
    """The user's folder, of which the working folder is a copy; None in a pod."""
    return _path(os.environ, contract.SOURCE_ENV)


def _path(environ: Mapping[str, str], name: str) -> Path | None:
    text = environ.get(name)
    return Path(text) if text else None


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EnvError(
            f"{name} is not JSON: {error}; seen {_short(text)}; let `k8sjob render` write it"
        ) from None
    if not isinstance(body, dict):
        raise EnvError(
            f"{name} is not a JSON object: seen {_short(text)}; let `k8sjob render` write it"
        )
    return body


def _decode(text: str) -> RuntimeConfig:
    body = _object(contract.CONFIG_ENV, text)
    body = {key: value for key, value in body.items() if key in _DEFAULTS}
    for key, value in body.items():
        if type(value) not in _kinds(key) or not _in_range(key, value):
            raise EnvError(
                f"{contract.CONFIG_ENV}: {key} is {_short(json.dumps(value))}, which is not"
                " valid; let `k8sjob render` write it"
            )
    return RuntimeConfig(**body)


def _kinds(key: str) -> set[type]:
    """The types that the value of a field may have; bool, which is an int to Python, is none."""
    default = _DEFAULTS[key]
    if default is None:
        return {type(None), *_OPTIONAL.get(key, {str})}
    # JSON may write 30.0 as 30, and a checkpoint is saved every epoch or so many steps.
    also_whole = isinstance(default, float) or key == "checkpoint_every"
    return {type(default), int} if also_whole else {type(default)}


def _in_range(key: str, value: Any) -> bool:
    # A manifest may be edited: another text would save no checkpoint, and without a word.
    if key == "checkpoint_every":
        return value == "epoch" or (type(value) is int and value > 0)
    return not isinstance(value, int | float) or 0 <= value < float("inf")


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The runtime's timeouts in seconds, for which a job has no setting."""

    poll: float = 0.05  # between two looks of a loop that waits for another thread or process
    retry: float = 0.2  # between two tries to host a store or to reach one
    # between two looks of the agent at its processes, or of a rank into the store
    look: float = 0.5
    observe: float = 0.25  # between two looks of a process at itself
    # the most that one of these adds: a process that was frozen did not wait
    observe_max: float = 1.0
    # between two exchanges with the other nodes, and two reports of missing ranks
    exchange: float = 1.0
    report: float = 10.0  # between two lines about the Master's name
    connect: float = 5.0  # to reach a port that is open, or to end a thread that may wait for one
    listen: float = 15.0  # for a process of an earlier group to free the port
    store: float = 300.0  # for a key that another rank sets at once
    # beyond the deadline, for rank 0 to publish who is missing, and for others to read it
    lead: float = 10.0
    # after a first failure, for the other ranks to end by it and write their reasons
    peer_grace: float = 3.0
    kill_grace: float = 3.0  # between SIGTERM and SIGKILL where nothing is to be saved
    dump_grace: float = 2.0  # for processes that do not end to write their stacks
    # for the agents of all nodes to see the same hang, since the first end breaks the others'
    # connections
    agree: float = 2.5
    # for a rank without which a script's others wait: shortly before torch's gloo ends that wait
    patience: float = 1780.0
    launcher: float = 60.0  # without a process group, until a launcher is looked for in the ranks
    busy: float = 30.0  # between two looks at the CPU time of the ranks with their children
    answer: float = 5.0  # for nodes within reach to report where their ranks are
    # for SIGKILL to end a process; it must fit into what stop_grace leaves of the pod's grace
    unkillable: float = 10.0
    leftover_grace: float = 2.0  # for the processes that a finished one left in its group
    kernel: float = 2.0  # for the kernel to remove killed processes; one may be deep in a driver
    restart_max: float = 2.0  # the longest pause before a restart; the first are shorter
    flush: float = 3.0  # for a node to report its end to node 0
    others: float = 30.0  # for nodes that still work after the Master: its end deletes their pods
    unknown: float = 10.0  # the same for nodes that never reported
    # for the kubelets to report the other pods' ends, so that the operator keeps them
    reported: float = 3.0
    last_call: float = 3.0  # for more nodes than an elastic group needs
    keep_alive: float = 1.0  # between two signs of life of a node of an elastic group
    elastic_store: float = 60.0  # for an answer of the store of an elastic group's nodes
    placed: float = 10.0  # for the first node of a round to write its address
    settled: float = 60.0  # length of a round after which earlier failures do not count
    # for the others to learn from the host of an elastic group's store that it is done
    linger: float = 3.0
    # for a failed process's threads and atexit handlers, and for a watchdog's last output: its
    # peers wait for it
    exit: float = 10.0
    destroy: float = 10.0  # for a process group; NCCL's can wait forever for a lost peer
    stop: float = 60.0  # for all ranks to agree where to stop
    loss_grace: float = 5.0  # for the main thread to notice a lost peer by itself, with a traceback
    # for trackers to take the last numbers; a rank that failed has no more than `exit`
    track: float = 20.0
    track_every: float = 10.0  # between two requests to a tracker: each costs milliseconds of CPU
    join: float = 1.0  # for a thread that may wait for a store that does not respond
    look_at_calls: float = 1.5  # until a rank that waits reads the others' last calls


TIMEOUTS: Final = Timeouts(**_object(TIMEOUTS_ENV, os.environ.get(TIMEOUTS_ENV, "{}")))
"""Those of this process."""
