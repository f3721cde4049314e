"""`with session() as job`: a process becomes a rank, and leaves in good order."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from k8sjob import compat
from k8sjob.contract import EventKind, ExitCode
from k8sjob.runtime import config as settings
from k8sjob.runtime import keras_model, rng
from k8sjob.runtime.env import EnvError, dist_env
from k8sjob.runtime.jax_processes import JaxProcesses
from k8sjob.runtime.job import Job
from k8sjob.runtime.last_words import in_a_line
from k8sjob.runtime.lookout import Lookout
from k8sjob.runtime.process_group import local_device, open_group
from k8sjob.runtime.report import Reporter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k8sjob.contract import RuntimeConfig
    from k8sjob.runtime.calls import Calls
    from k8sjob.runtime.env import DistEnv
    from k8sjob.runtime.process_group import Group

__all__ = ["session"]


_MOST_RANKS: Final = 16
"""Missing ranks that are named; of the others it is told how many they are."""
_HEARD_S: Final = 1.0
"""How long a coordinator that fails keeps the store, for the others to read why."""


@contextmanager
def session(*, seed: int = 0, tensorboard: str | os.PathLike[str] | None = None) -> Iterator[Job]:
    """Become a rank of the job: meet the others, and leave together with them.

    Works under `k8sjob run`, in a pod, under torchrun, and in a plain `python main.py` or a
    notebook, where there is one process alone.

    Args:
        seed: of the model's start, the order of samples, and each rank's random numbers.
        tensorboard: folder for files that TensorBoard draws, a path of the job.yaml (see job.path);
            rank 0 writes them. None: none.

    Yields:
        The job.

    Raises:
        EnvError: the environment or the settings cannot work.
        PeerLost: ranks did not come in time, or went away.
    """
    began = time.monotonic()
    import_s = _age()
    config, env = settings.runtime_config(), dist_env(os.environ)
    _check(config, env)
    serving = compat.serving(config.strategy, config.options)
    keras = compat.keras_backend(config.strategy, config.options)
    group, lookout = _meet(config, env, serving, on_cpu=keras == "jax")
    reporter = Reporter(active=env.rank == serving, events=settings.under_k8sjob())
    job = Job(env, config, group, lookout=lookout, reporter=reporter, seed=seed)
    if tensorboard is not None:
        reporter.record(job.path(tensorboard))
    rng.seed_all(seed)
    calls = jax = None
    with _handling_sigterm(job), ExitStack() as stack:
        try:
            jax = JaxProcesses(env, group) if keras == "jax" else None
            stack.enter_context(_keras(job))
            rendezvous_s = time.monotonic() - began
            _tell_start(job, jax, env.restart, import_s, rendezvous_s)
            if serving:
                calls = _open_calls(job, env, serving)
                calls.begin(job.lookout.alert)
                _leave_if_served(job, env, serving)
            yield job
        except BaseException as error:
            if _is_orderly(error, job):
                _part(job, calls, jax)
            else:
                hung = job.fail(error)
                if (serving or jax) and env.rank == 0:
                    time.sleep(_HEARD_S)
                if hung:
                    raise hung from error
            raise
        _part(job, calls, jax)
    seconds = round(time.monotonic() - began, 3)
    reporter.emit(EventKind.FINISHED, seconds=seconds, **job.reached)


def _meet(
    config: RuntimeConfig, env: DistEnv, serving: int, *, on_cpu: bool
) -> tuple[Group, Lookout]:
    """The ranks' group, and the lookout for them, which begins before they connect."""
    lookout = Lookout(env.rank, env.world_size)
    reporter = Reporter(active=env.rank == 0, events=settings.under_k8sjob())

    def tell_missing(ranks: Sequence[int]) -> None:
        reporter.emit(
            EventKind.STARTING,
            phase="waiting",
            world_size=env.world_size,
            missing=len(ranks),
            ranks=list(ranks[:_MOST_RANKS]),
        )

    try:
        group = open_group(
            env,
            backend=config.backend,
            rendezvous_timeout=config.rendezvous_timeout,
            collective_timeout=config.collective_timeout,
            launcher_hosts=settings.launcher_hosts_store(),
            serving=serving,
            on_cpu=on_cpu,
            on_meeting=lookout.start,
            on_wait=tell_missing,
        )
    except BaseException as error:
        lookout.warn_others(f"rank {env.rank} failed: {in_a_line(error)}")
        lookout.close()
        raise
    return group, lookout


@contextmanager
def _keras(job: Job) -> Iterator[None]:
    """What Keras must know of the job while the session lasts."""
    if job.config.strategy != "keras_mesh":
        with keras_model.on(job.device):
            yield
        return
    from k8sjob.runtime.strategies.keras_mesh import distributed

    options = compat.STRATEGIES["keras_mesh"].settings(job.config.options)
    with keras_model.on(job.device), distributed(job.group, options):
        yield


def _tell_start(
    job: Job, jax: JaxProcesses | None, restart: int, import_s: float, rendezvous_s: float
) -> None:
    group = job.group
    job.reporter.emit(
        EventKind.STARTED,
        world_size=job.world_size,
        backend="jax" if jax else group.backend,
        device=jax.device if jax else _name(group.device),
        strategy=job.config.strategy,
        restart=restart,
        import_s=round(import_s, 3),
        rendezvous_s=round(rendezvous_s, 3),
    )
    if group.meeting and group.meeting.remark:
        job.reporter.warn(group.meeting.remark)


def _open_calls(job: Job, env: DistEnv, serving: int) -> Calls:
    from torch.distributed import rpc

    if not hasattr(rpc, "TensorPipeRpcBackendOptions"):
        raise EnvError(
            f"this torch {torch.__version__} is built without RPC (TensorPipe), which a parameter"
            " server needs; take torch's own packages or image, or another strategy.kind"
        )
    from k8sjob.runtime.calls import Calls  # imports half of torch.distributed

    met = job.group.meeting
    if met is None:
        raise EnvError("one process alone has no servers; start it by `k8sjob run` or in pods")
    job.training = env.rank < serving or job.training  # whoever serves stops with the others
    return Calls(env, met, serving=serving, timeout=job.config.collective_timeout)


def _leave_if_served(job: Job, env: DistEnv, serving: int) -> None:
    """End a process that has served: the program behind `with session()` is the trainers'."""
    if env.rank < serving:
        raise SystemExit(int(ExitCode.STOPPED) if job.lookout.reason else 0)


def _part(job: Job, calls: Calls | None, jax: JaxProcesses | None) -> None:
    job.end()
    if calls is not None:
        calls.close()
    if jax is not None:
        jax.leave()
    job.part()
    if jax is not None:
        jax.close()


def _is_orderly(error: BaseException, job: Job) -> bool:
    """Whether all ranks leave by this: a common stop, or sys.exit() without a failure."""
    return isinstance(error, SystemExit) and (not error.code or bool(job.lookout.reason))


@contextmanager
def _handling_sigterm(job: Job) -> Iterator[None]:
    def stop(_number: int, _frame: Any) -> None:
        if not job.training:
            raise SystemExit(int(ExitCode.STOPPED))  # nothing is begun, so nothing is to be saved
        job.lookout.ask_to_stop("SIGTERM")

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers; whoever started this one has its own
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _check(config: RuntimeConfig, env: DistEnv) -> None:
    _check_torch(config, env)
    nproc = env.local_world_size if env.world_size % env.local_world_size == 0 else env.world_size
    shape = compat.Shape(nnodes=env.world_size // nproc, nproc_per_node=nproc)
    serving = compat.serving(config.strategy, config.options)
    if serving:  # its first node has other processes than the rest
        shape = compat.Shape(nnodes=1 + max(0, env.world_size - serving), nproc_per_node=1)
    for conflict in compat.conflicts(config.strategy, config.options, shape):
        raise EnvError(f"{conflict.field}: {conflict.message}")
    _check_keras(config)


def _check_torch(config: RuntimeConfig, env: DistEnv) -> None:
    version, enough = tuple(int(part) for part in torch.__version__.split(".")[:2]), (2, 6)
    what = ""
    if config.strategy == "fsdp" and env.world_size > 1 and local_device(env).type == "cpu":
        what, enough = " for strategy.kind: fsdp on CPUs", (2, 7)
    if version < enough:
        needed = ".".join(map(str, enough))
        raise EnvError(f"torch {torch.__version__} is too old{what}; install torch >= {needed}")


def _check_keras(config: RuntimeConfig) -> None:
    """Refuse what is missing before the others wait for this rank."""
    if config.strategy != "keras_mesh":
        return
    if find_spec("keras") is None:
        raise EnvError("Keras is not installed; install keras >= 3.11, or take another kind")
    if compat.keras_backend(config.strategy, config.options) == "jax" and find_spec("jax") is None:
        raise EnvError(
            "JAX is not installed, which strategy.kind: keras_mesh computes with; install jax,"
            " jax[cuda12] or jax[cuda13], or set strategy.keras_backend to torch"
        )


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _age() -> float:
    """Seconds since this process began; its imports, mostly."""
    try:
        began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return time.process_time()  # no Linux: its CPU time comes close
    return max(0.0, uptime - began / os.sysconf("SC_CLK_TCK"))
