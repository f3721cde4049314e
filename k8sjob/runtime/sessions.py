"""The session of a rank, `with session() as job`: from the rendezvous to the common end."""

from __future__ import annotations

import os
import platform
import signal
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from k8sjob import strategies
from k8sjob.contract import EventKind, ExitCode
from k8sjob.runtime.base import config as settings
from k8sjob.runtime.base.config import TIMEOUTS
from k8sjob.runtime.base.env import dist_env
from k8sjob.runtime.base.errors import EnvError, first_line
from k8sjob.runtime.base.event_lines import Reporter
from k8sjob.runtime.base.heartbeat import Observer
from k8sjob.runtime.comm import rng
from k8sjob.runtime.comm.process_group import local_device, open_group
from k8sjob.runtime.comm.stop import StopCoordinator
from k8sjob.runtime.job import Job
from k8sjob.runtime.keras import model as keras_model
from k8sjob.runtime.keras.jax_processes import JaxProcesses
from k8sjob.runtime.rank_context import RankContext, mapped_path
from k8sjob.runtime.tracking import Trackers
from k8sjob.runtime.trainer_status import TrainerStatus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k8sjob.contract import RuntimeConfig
    from k8sjob.runtime.base.env import DistEnv
    from k8sjob.runtime.comm.process_group import Group
    from k8sjob.runtime.strategies.rpc import Calls

_MAX_NAMED: Final = 16
"""Missing ranks that are named; the others are counted."""


@contextmanager
def session(*, seed: int = 0, tensorboard: str | os.PathLike[str] | None = None) -> Iterator[Job]:
    """Become a rank of the job: join the others, and leave together with them.

    Works under `k8sjob run`, in a pod, under torchrun, and in a plain `python main.py` or a
    notebook, where there is a single process.

    Args:
        seed: of the model's first weights, the order of samples, and each rank's random numbers.
        tensorboard: folder for files that TensorBoard draws, a path of the job.yaml (see job.path);
            rank 0 writes them. None: the spec's `tracking.tensorboard`, if any.

    Yields:
        The job.

    Raises:
        EnvError: the environment or the settings cannot work.
        PeerLost: ranks did not come in time, or went away.
    """
    began = time.monotonic()
    # Read first: what follows is the rendezvous, which is reported separately.
    import_s = _process_age()
    config, env = settings.runtime_config(), dist_env()
    if not env.restart:
        import_s += Observer.shared_import_s
    _check(config, env)
    serving = strategies.serving(config.strategy, config.options)
    keras = strategies.keras_backend(config.strategy)
    group, stop = _join(config, env, serving, on_cpu=keras == "jax")
    events = settings.started_by_k8sjob()
    reporter = Reporter(active=env.rank == serving, events=events, restart=env.restart)
    context = RankContext(env, config, group, stop_coordinator=stop, reporter=reporter, seed=seed)
    # The first trainer reports: where servers come first it is not rank 0.
    tracking = _open_tracking(context, tensorboard) if env.rank == serving else Trackers()
    # The model is made with equal numbers on all ranks; Run gives each its own later.
    rng.seed_all(seed)
    calls = jax = None
    with _sigterm_handler(context), ExitStack() as stack:
        try:
            jax = JaxProcesses(env, group) if keras == "jax" else None
            stack.enter_context(_keras_settings(context))
            rendezvous_s = time.monotonic() - began
            _report_start(context, jax, env.restart, import_s, rendezvous_s)
            if serving:
                calls = _open_calls(context, env, serving)
                # A server stays in here until its trainers are done.
                calls.begin(context.stop_coordinator.alert)
                if env.rank < serving:  # it has served; the session's block is for the trainers
                    sys.exit(int(ExitCode.STOPPED) if context.stop_coordinator.reason else 0)
            yield Job(context)
        except BaseException as error:
            # All ranks leave by a common stop, and by sys.exit() without a failure.
            stopped = context.stop_coordinator.reason
            if isinstance(error, SystemExit) and (not error.code or stopped):
                _leave(context, calls, jax)
                tracking.close("stopped" if stopped else "finished")
            else:
                # The others may be gone or blocked: no collective from here on.
                hung = context.fail(error)
                tracking.close("failed")
                if (serving or jax) and env.rank == 0:
                    time.sleep(TIMEOUTS.exchange)  # the store is here: the others read why
                if hung:
                    raise hung from error
            raise
        _leave(context, calls, jax)
    seconds = round(time.monotonic() - began, 3)
    tracking.close("finished")
    reporter.emit(EventKind.FINISHED, seconds=seconds, **context.metrics)


def _open_tracking(context: RankContext, tensorboard: str | os.PathLike[str] | None) -> Trackers:
    """The trackers that the spec and the script name, which get what the reporter reports."""
    config, reporter = context.config, context.reporter
    server = settings.status_server()
    tracking = Trackers(reporter.warn, TrainerStatus(server) if server else None)
    folder = tensorboard or config.tracking.get("tensorboard", {}).get("dir")
    files = {"tensorboard": {"dir": str(mapped_path(folder))}} if folder else {}
    parameters = {
        "strategy": config.strategy,
        **config.options,
        "world_size": context.group.world_size,
        "arguments": " ".join(sys.argv[1:]),
        "seed": context.seed,
        "torch": torch.__version__,
    }
    tracking.open(config.tracking | files, config.job, parameters, context.checkpoint_dir)
    reporter.sink = tracking
    return tracking


def _join(
    config: RuntimeConfig, env: DistEnv, serving: int, *, on_cpu: bool
) -> tuple[Group, StopCoordinator]:
    """The ranks' group, and its stop coordinator, which starts before they connect."""
    stop = StopCoordinator(env.rank, env.world_size)
    reporter = Reporter(active=env.rank == 0, events=settings.started_by_k8sjob())

    def report_missing(ranks: Sequence[int]) -> None:
        reporter.emit(
            EventKind.STARTING,
            phase="waiting",
            world_size=env.world_size,
            missing=len(ranks),
            ranks=list(ranks[:_MAX_NAMED]),
        )

    try:
        group = open_group(
            env,
            config,
            serving=serving,
            on_cpu=on_cpu,
            on_joined=stop.start,
            on_wait=report_missing,
        )
    except BaseException as error:
        # The others may be connecting to this rank, and would wait for it until their timeout.
        stop.warn_others(f"rank {env.rank} failed: {first_line(error)}")
        stop.close()
        raise
    return group, stop


@contextmanager
def _keras_settings(context: RankContext) -> Iterator[None]:
    """Keras's settings for the context, while the session lasts."""
    if context.config.strategy != "keras_mesh":
        with keras_model.on(context.device):
            yield
        return
    from k8sjob.runtime.keras.mesh import distributed

    options = strategies.STRATEGIES["keras_mesh"].settings(context.config.options)
    with keras_model.on(context.device), distributed(context.group, options):
        yield


def _report_start(
    context: RankContext,
    jax: JaxProcesses | None,
    restart: int,
    import_s: float,
    rendezvous_s: float,
) -> None:
    group = context.group
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    device = group.device.type
    if device == "cuda":
        device = torch.cuda.get_device_name(group.device)
        versions |= {"cuda": torch.version.cuda} if torch.version.cuda else {}
    context.reporter.emit(
        EventKind.STARTED,
        world_size=group.world_size,
        backend="jax" if jax else group.backend,
        device=jax.device if jax else device,
        strategy=context.config.strategy,
        restart=restart,
        import_s=round(import_s, 3),
        rendezvous_s=round(rendezvous_s, 3),
        **versions,
    )
    if group.rendezvous and group.rendezvous.remark:
        context.reporter.warn(group.rendezvous.remark)


def _open_calls(context: RankContext, env: DistEnv, serving: int) -> Calls:
    from torch.distributed import rpc

    if not hasattr(rpc, "TensorPipeRpcBackendOptions"):
        raise EnvError(
            f"this torch {torch.__version__} is built without RPC (TensorPipe), which a parameter"
            " server needs; use torch's own packages or image, or use another strategy.kind"
        )
    from k8sjob.runtime.strategies.rpc import Calls  # imports half of torch.distributed

    joined = context.group.rendezvous
    if joined is None:
        raise EnvError("a single process has no servers; start it with `k8sjob run` or in pods")
    context.training = env.rank < serving or context.training  # a server stops with the others
    return Calls(env, joined, serving=serving, timeout=context.config.collective_timeout)


def _leave(context: RankContext, calls: Calls | None, jax: JaxProcesses | None) -> None:
    context.end()
    if calls is not None:
        calls.close()
    if jax is not None:
        # Rank 0 hosts JAX's service: it leaves that last, after the common end in context.leave().
        jax.leave(first=False)
    context.leave()
    if jax is not None:
        jax.leave(first=True)


@contextmanager
def _sigterm_handler(context: RankContext) -> Iterator[None]:
    def stop(_number: int, _frame: Any) -> None:
        if not context.training:
            raise SystemExit(int(ExitCode.STOPPED))  # there is nothing to save yet
        context.stop_coordinator.request("SIGTERM")

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _check(config: RuntimeConfig, env: DistEnv) -> None:
    _check_torch(config, env)
    # Where nodes differ in their number of ranks, these are checked as ranks of one node.
    nproc = env.local_world_size if env.world_size % env.local_world_size == 0 else env.world_size
    shape = strategies.Shape(nnodes=env.world_size // nproc, nproc_per_node=nproc)
    serving = strategies.serving(config.strategy, config.options)
    if serving:  # the first node has other processes than the rest
        shape = strategies.Shape(nnodes=1 + max(0, env.world_size - serving), nproc_per_node=1)
    for conflict in strategies.conflicts(config.strategy, config.options, shape):
        raise EnvError(str(conflict))
    _check_keras(config)


def _check_torch(config: RuntimeConfig, env: DistEnv) -> None:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    on_cpus = env.world_size > 1 and local_device(env).type == "cpu"
    if config.strategy == "fsdp" and on_cpus and version < (2, 7):
        raise EnvError(
            f"torch {torch.__version__} is too old for strategy.kind: fsdp on CPUs; install"
            " torch >= 2.7"
        )


def _check_keras(config: RuntimeConfig) -> None:
    """Refuse a missing library before the others wait for this rank."""
    if config.strategy != "keras_mesh":
        return
    if find_spec("triton") is not None and "triton" not in sys.modules:
        # Both bring LLVM: the process aborts where triton comes after TensorFlow, which Keras
        # imports when it saves a model.
        if "tensorflow" in sys.modules:
            raise EnvError(
                "tensorflow was imported before triton, which torch needs later, and the process"
                " would abort then; write `import triton` above `import tensorflow`"
            )
        if find_spec("tensorflow") is not None:
            import_module("triton")
    if find_spec("keras") is None:
        raise EnvError(
            "Keras is not installed; install keras >= 3.11, or use another strategy.kind"
        )
    if find_spec("jax") is None:
        raise EnvError(
            "JAX is not installed, which strategy.kind: keras_mesh computes with; install jax,"
            " jax[cuda12] or jax[cuda13]"
        )


def _process_age() -> float:
    """Seconds since this process started, most of them for imports."""
    try:
        began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return time.process_time()  # outside Linux: the CPU time is close
    return max(0.0, uptime - began / os.sysconf("SC_CLK_TCK"))
