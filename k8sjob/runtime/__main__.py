"""The container's entrypoint: `python -m k8sjob.runtime [-m MODULE | SCRIPT] [ARGS...]`.

It prints who it is, refuses what cannot work, waits for the Master's name, and starts the agent.
`--exec PROGRAM [ARGS...]` keeps one program running, without a look at the environment.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from k8sjob import strategies
from k8sjob.contract import ExitCode, Reason, RuntimeConfig, __version__, counted
from k8sjob.runtime.agent.attempt import retryable, run_attempt, verdict
from k8sjob.runtime.agent.early_imports import early_imports, script_folder
from k8sjob.runtime.agent.fork_server import ForkServer, adopt_orphans
from k8sjob.runtime.agent.restarts import Coordinator, RestartCount, run_agent
from k8sjob.runtime.agent.roster import Roster
from k8sjob.runtime.agent.worker_group import (
    shared_environ,
    single_program,
    training_program,
)
from k8sjob.runtime.base import config
from k8sjob.runtime.base.env import (
    ElasticEnv,
    NodeEnv,
    copy_environ,
    elastic_env,
    export,
    is_elastic,
    node_env,
)
from k8sjob.runtime.base.errors import EnvError, PeerLost
from k8sjob.runtime.base.event_lines import log_line
from k8sjob.runtime.base.network import await_master, reserve
from k8sjob.runtime.base.signals import Inbox
from k8sjob.runtime.base.termination import describe, write_message

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from k8sjob.runtime.agent.worker_group import Program

_USAGE: Final = (
    "usage: python -m k8sjob.runtime SCRIPT [ARGS...] | -m MODULE [ARGS...] | --exec PROGRAM ..."
)
_MIN_TORCH: Final = (2, 6)
_Outcome: TypeAlias = "tuple[Reason | None, int]"
"""How the node ended, and the container's exit code."""


def main(argv: Sequence[str]) -> int:
    """Run a program on this node.

    Args:
        argv: the arguments after `python -m k8sjob.runtime`.

    Returns:
        The container's exit code; see docs/reference/exit-codes.md.
    """
    # Before any process is started: an orphan goes to the nearest adopter at that moment.
    adopt_orphans()
    try:
        with Inbox(config.take_lifeline()) as inbox:
            reason, code = _run(argv, copy_environ(), inbox)
    except (EnvError, PeerLost) as error:
        reason, code = _refused(error)
    except OSError as error:
        reason, code = _refused(EnvError(f"cannot start {argv[0]!r}: {error}"))
    if reason is None:
        return ExitCode.DONE
    if code:
        log_line(describe(reason))
    write_message(reason, config.termination_log())
    return code


def _run(argv: Sequence[str], environ: Mapping[str, str], inbox: Inbox) -> _Outcome:
    form = argv[0] if argv else ""
    if not argv or (form in {"-m", "--exec"} and len(argv) < 2) or form in {"-h", "--help"}:
        raise EnvError(f"nothing to run: {' '.join(argv) or 'no arguments'}; {_USAGE}")
    settings = config.runtime_config(environ)
    with ExitStack() as stack:
        # The write end of the pipe lives exactly as long as this process.
        lifeline, writer = os.pipe()
        for end in (lifeline, writer):
            stack.callback(os.close, end)
        os.set_inheritable(lifeline, True)  # noqa: FBT003 - os has no keyword for it
        if form == "--exec":
            return _run_single(single_program(argv[1:], environ, lifeline), settings, inbox)
        shape = elastic_env(environ, socket.gethostname())
        if shape is not None:
            # A node has its number from the rendezvous; until then 0 is the one that hosts the
            # store.
            node = NodeEnv(
                int(not shape.hosts), shape.max_nodes, shape.nproc_per_node, shape.host, shape.port
            )
        else:
            node = node_env(environ)
            if is_elastic(environ):  # with a Master it runs at its full size, and does not change
                environ = {**environ, "PET_NNODES": str(node.nnodes)}
            node = replace(node, serving=strategies.serving(settings.strategy, settings.options))
        torch = _torch_version()
        log_line(
            f"{__version__}, job {settings.job or '(no name)'}, {_banner(node, shape)},"
            f" Python {platform.python_version()}" + (f", torch {torch}" if torch else "")
        )
        # All that can be refused is refused before the wait for other nodes.
        _check_program(argv)
        _check_torch(torch)
        if time.time() < 0:
            raise EnvError("the clock is before 1970, where gloo waits for ever; set it")
        environ = shared_environ(_with_keras(_with_threads(environ, node), settings), lifeline)
        # It imports torch while the Master's name, or a rendezvous, is awaited. A single process
        # would only take 90 MB more.
        forks = None
        if node.world_size > 1:
            modules = early_imports(argv, node.processes)
            server = ForkServer(modules, environ, argv, folder=script_folder(argv))
            forks = stack.enter_context(server)
        await_master(node, settings.rendezvous_timeout, inbox)
        program = partial(
            training_program,
            argv,
            environ=environ,
            local_rank_arg=settings.local_rank_arg,
            forks=forks,
        )
        if shape is not None:
            run = partial(_run_elastic, shape, program, settings, inbox)
            return _run_counted(run, settings, inbox)
        # A single node needs a port for its own processes only, on loopback.
        if node.master_port == 0:
            port = stack.enter_context(reserve("127.0.0.1")).getsockname()[1]
            node = replace(node, master_port=port)
        run = partial(_run_fixed, program(node), node, settings, inbox)
        return _run_counted(run, settings, inbox)


def _run_fixed(
    program: Program, node: NodeEnv, settings: RuntimeConfig, inbox: Inbox, count: RestartCount
) -> tuple[Reason | None, bool]:
    """Run the program in a group of a fixed size; see run_agent."""
    with Roster(node, settings.job, config.agents_key()) as roster:
        coordinator = Coordinator(node, roster, count)
        reason, final = run_agent(program, settings, inbox, coordinator)
        if reason is None:
            return coordinator.finish(inbox), True
        # Under OnFailure the container starts again, and its processes join the others.
        if final or settings.restart_policy != "OnFailure":
            coordinator.give_up(reason)
        return reason, final


def _run_single(program: Program, settings: RuntimeConfig, inbox: Inbox) -> _Outcome:
    """Run a command whose own launcher restarts and watches; the agent only keeps it."""
    settings = replace(settings, hang_timeout=0)
    return _outcome(verdict(run_attempt(program, 0, settings, inbox), inbox.stop))


def _run_elastic(
    shape: ElasticEnv,
    program: Callable[[NodeEnv], Program],
    settings: RuntimeConfig,
    inbox: Inbox,
    count: RestartCount,
) -> tuple[Reason | None, bool]:
    """Run the program in an elastic group; see k8sjob.runtime.agent.elastic."""
    # When its host is lost, a store writes a warning with C++ frames in each of torch's threads.
    export("TORCH_CPP_LOG_LEVEL", "ERROR", override=False)
    from k8sjob.runtime.agent.elastic import run_elastic  # imports torch

    return run_elastic(shape, program, settings, inbox, count)


def _run_counted(
    run: Callable[[RestartCount], tuple[Reason | None, bool]],
    settings: RuntimeConfig,
    inbox: Inbox,
) -> _Outcome:
    """Run a group as often as max_restarts allows, over all containers of the pod.

    `run` returns why the node's last start ended, and whether another one would end the same way.
    """
    count = RestartCount(config.restarts_file(), settings.max_restarts)
    if count.refused is not None:
        return count.refused, ExitCode.RESTARTS_SPENT
    reason, final = run(count)
    count.end(reason, final=final)
    if reason is None or inbox.stopping() or not retryable(reason.exit_code):
        return _outcome(reason)
    # Under ExitCode the operator would make a new pod for a code of 128 or more, again and again.
    spent = final or settings.restart_policy == "ExitCode"
    return reason, ExitCode.RESTARTS_SPENT if spent else reason.exit_code


def _banner(node: NodeEnv, shape: ElasticEnv | None) -> str:
    processes = counted(node.processes, "process", "es")
    if shape is not None:
        return (
            f"one of {shape.min_nodes} to {shape.max_nodes} nodes, {processes} each,"
            f" rendezvous at {shape.host}:{shape.port}"
        )
    where = f", master {node.master_addr}:{node.master_port}" if node.nnodes > 1 else ""
    return f"node {node.node_rank} of {node.nnodes}, {processes} of {node.world_size}{where}"


def _check_program(argv: Sequence[str]) -> None:
    """Refuse a missing script; a module is not looked up, which would import its parents here."""
    if argv[0] != "-m" and not Path(argv[0]).exists():
        raise EnvError(
            f"there is no script {argv[0]!r} in {Path.cwd()}; check run.script and the image's "
            "build context"
        )


def _torch_version() -> str | None:
    """By its metadata: importing it takes seconds and 0.5 GB."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def _check_torch(version: str | None) -> None:
    """Refuse a missing or old torch."""
    if version is None:
        if util.find_spec("torch") is not None:
            return  # built without metadata: its version is not known
        raise EnvError(
            f"torch is not installed for {sys.executable}; install torch >= 2.6 or choose an "
            "image that has it"
        )
    installed = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if installed < _MIN_TORCH:
        raise EnvError(f"torch {version} is too old; install torch >= 2.6")


def _with_threads(environ: Mapping[str, str], node: NodeEnv) -> Mapping[str, str]:
    """One thread a process where several share a node, as with torchrun; with a line in the log."""
    if node.processes == 1 or "OMP_NUM_THREADS" in environ:
        return environ
    log_line("OMP_NUM_THREADS is set to 1 for each process of this node; set it in run.env to tune")
    return {**environ, "OMP_NUM_THREADS": "1"}


def _with_keras(environ: Mapping[str, str], settings: RuntimeConfig) -> Mapping[str, str]:
    """Keras's backend, which has to be set before a script imports Keras."""
    backend = strategies.keras_backend(settings.strategy)
    if backend is None:
        return environ
    chosen = environ.get("KERAS_BACKEND", backend)
    if chosen != backend:
        raise EnvError(
            f"KERAS_BACKEND is {chosen}, and strategy.kind: {settings.strategy} trains with"
            f" {backend}; remove it from run.env and from the image"
        )
    # JAX warns of the setting by which it lets ranks come and go (see jax_processes).
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2"} if backend == "jax" else {}
    return {**quiet, **environ, "KERAS_BACKEND": backend}


def _outcome(reason: Reason | None) -> _Outcome:
    return reason, reason.exit_code if reason else ExitCode.DONE


def _refused(error: EnvError | PeerLost) -> _Outcome:
    culprits = error.culprits if isinstance(error, PeerLost) else ()
    code, kind = int(error.exit_code), type(error).__name__
    return Reason(code, type=kind, message=str(error), time=time.time(), culprits=culprits), code


if __name__ == "__main__":
    end = main(sys.argv[1:])
    if "torch" in sys.modules:  # its threads may abort an interpreter that is shutting down
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end)
    sys.exit(end)
