"""The container's entrypoint: `python -m k8sjob.runtime [-m MODULE | SCRIPT] [ARGS...]`.

It says who it is, refuses what cannot work, waits for the Master's name, and hands over to the
agent. `--exec PROGRAM [ARGS...]` keeps one program as it is, without a look at the environment.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from k8sjob import __version__, compat
from k8sjob.contract import LIFELINE_ENV, ExitCode, Reason, RuntimeConfig
from k8sjob.runtime import config, strays
from k8sjob.runtime.agent import End, describe, keep, retryable, say
from k8sjob.runtime.attempts import Attempts, attempts_file
from k8sjob.runtime.env import ElasticEnv, EnvError, NodeEnv, elastic_env, is_elastic, node_env
from k8sjob.runtime.master import await_master
from k8sjob.runtime.peer import PeerLost
from k8sjob.runtime.port import reserve
from k8sjob.runtime.program import Ranks, Single
from k8sjob.runtime.roster import Roster
from k8sjob.runtime.signals import Inbox
from k8sjob.runtime.together import Together

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["main"]

_USAGE: Final = (
    "usage: python -m k8sjob.runtime SCRIPT [ARGS...] | -m MODULE [ARGS...] | --exec PROGRAM ..."
)
_OLDEST_TORCH: Final = (2, 6)
_End: TypeAlias = "tuple[Reason | None, int]"
"""How it ended, and the container's exit code."""


def main(argv: Sequence[str]) -> int:
    """Run a program on this node.

    Args:
        argv: the arguments after `python -m k8sjob.runtime`.

    Returns:
        The container's exit code; see docs/reference/exit-codes.md.
    """
    environ = dict(os.environ)
    environ.pop(LIFELINE_ENV, None)
    strays.adopt()
    try:
        with Inbox(_parents_lifeline()) as inbox:
            reason, code = _run(argv, environ, inbox)
    except (EnvError, PeerLost) as error:
        reason, code = _refused(error)
    except OSError as error:
        reason, code = _refused(EnvError(f"cannot start {argv[0]!r}: {error}"))
    if reason is None:
        return ExitCode.DONE
    if code:
        say(describe(reason))
    _write_last_words(reason)
    return code


def _run(argv: Sequence[str], environ: Mapping[str, str], inbox: Inbox) -> _End:
    form = argv[0] if argv else ""
    if not argv or (form in {"-m", "--exec"} and len(argv) < 2) or form in {"-h", "--help"}:
        raise EnvError(f"nothing to run: {' '.join(argv) or 'no arguments'}; {_USAGE}")
    settings = config.runtime_config(environ)
    with ExitStack() as stack:
        lifeline = _make_lifeline(stack)
        if form == "--exec":
            # The command's own launcher restarts and watches; the agent only keeps it.
            settings = replace(settings, max_restarts=0, hang_timeout=0)
            return _end(_keep_alone(Single(argv[1:], environ, lifeline), settings, inbox))
        shape = elastic_env(environ, socket.gethostname())
        if shape is not None:
            _refuse_fixed(settings, environ)
            node = NodeEnv(
                int(not shape.hosts), shape.most, shape.nproc_per_node, shape.host, shape.port
            )
            who = _elastic_banner(shape)
        else:
            node = node_env(environ)
            if is_elastic(environ):  # with a Master it runs at its full size, and does not change
                environ = {**environ, "PET_NNODES": str(node.nnodes)}
            node = replace(node, serving=compat.serving(settings.strategy, settings.options))
            who = _banner(node)
        say(
            f"{__version__}, job {settings.job or '(no name)'}, {who},"
            f" Python {platform.python_version()}"
        )
        _check_program(argv)
        _check_torch()
        await_master(node, settings.rendezvous_timeout, inbox, say)
        environ = _with_keras(_with_threads(environ, node), settings)

        def program(node: NodeEnv) -> Ranks:
            return Ranks(argv, node, environ, settings.local_rank_arg, lifeline)

        if shape is not None:
            reason = _keep_elastic(shape, program, settings, inbox)
        else:
            if node.master_port == 0:
                port = stack.enter_context(reserve("127.0.0.1")).getsockname()[1]
                node = replace(node, master_port=port)
            return _keep_fixed(program(node), node, settings, inbox)
        return _given_up(End(reason), settings) if reason and not inbox.stopping() else _end(reason)


def _keep_fixed(program: Ranks, node: NodeEnv, settings: RuntimeConfig, inbox: Inbox) -> _End:
    """Run the program in a group of a fixed size."""
    attempts = Attempts(attempts_file(os.environ), settings.max_restarts)
    if attempts.refused is not None:
        return attempts.refused, ExitCode.RESTARTS_SPENT
    with Roster(node, settings.job) as roster:
        group = Together(node, roster, attempts, say)
        end = keep(program, settings, inbox, group)
        reason = end.reason
        if reason is None:
            reason = group.farewell(inbox)
            end = End(reason, final=True)
        elif end.final or settings.restart_policy != "OnFailure":
            group.give_up(reason)
    attempts.end(reason, final=end.final)
    if reason is None or inbox.stopping() or not reason.exit_code:
        return _end(reason)
    return _given_up(end, settings)


def _keep_alone(program: Single, settings: RuntimeConfig, inbox: Inbox) -> Reason | None:
    node = NodeEnv(0, 1, 1, "127.0.0.1", 0)
    group = Together(node, Roster(node, settings.job), Attempts(None, 0), say)
    return keep(program, settings, inbox, group).reason


def _given_up(end: End, settings: RuntimeConfig) -> _End:
    """The end of a node that may not start its ranks any more.

    Under ExitCode the operator would make a new pod for a code of 128 or more, again and again.
    """
    reason = end.reason
    if reason is None:
        return _end(reason)
    again = retryable(reason.exit_code) and (end.final or settings.restart_policy == "ExitCode")
    return reason, ExitCode.RESTARTS_SPENT if again else reason.exit_code


def _refuse_fixed(settings: RuntimeConfig, environ: Mapping[str, str]) -> None:
    """A strategy that needs a fixed number of ranks, in a group that may change."""
    if not compat.STRATEGIES[settings.strategy].resizes:
        raise EnvError(
            f"strategy.kind: {settings.strategy} needs a fixed number of ranks, and "
            f"PET_NNODES={environ['PET_NNODES']} lets it change; leave replicas.elastic out"
        )


def _keep_elastic(
    shape: ElasticEnv,
    program: Callable[[NodeEnv], Ranks],
    settings: RuntimeConfig,
    inbox: Inbox,
) -> Reason | None:
    """Run the program in an elastic group; see k8sjob.runtime.elastic."""
    # A store whose host is lost is met with a warning and C++ frames in each of torch's threads.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from k8sjob.runtime.elastic import keep_elastic  # imports torch

    return keep_elastic(shape, program, settings, inbox)


def _banner(node: NodeEnv) -> str:
    where = f", master {node.master_addr}:{node.master_port}" if node.nnodes > 1 else ""
    return (
        f"node {node.node_rank} of {node.nnodes},"
        f" {_processes(node.processes)} of {node.world_size}{where}"
    )


def _elastic_banner(shape: ElasticEnv) -> str:
    return (
        f"one of {shape.least} to {shape.most} nodes, {_processes(shape.nproc_per_node)} each,"
        f" meeting at {shape.host}:{shape.port}"
    )


def _processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"


def _check_program(argv: Sequence[str]) -> None:
    """A module is not looked for: that would import its parents here."""
    if argv[0] != "-m" and not Path(argv[0]).exists():
        raise EnvError(
            f"there is no script {argv[0]!r} in {Path.cwd()}; check run.script and the image's "
            "build context"
        )


def _check_torch() -> None:
    """Refuse a missing or old torch by its metadata: importing it takes seconds and 0.5 GB."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        if util.find_spec("torch") is not None:
            return  # built without metadata: let it speak for itself
        raise EnvError(
            f"torch is not installed for {sys.executable}; install torch >= 2.6 or choose an "
            "image that has it"
        ) from None
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found < _OLDEST_TORCH:
        raise EnvError(f"torch {version} is too old; install torch >= 2.6")


def _with_threads(environ: Mapping[str, str], node: NodeEnv) -> Mapping[str, str]:
    """One thread a process where several share a node, as torchrun does; said aloud."""
    if node.processes == 1 or "OMP_NUM_THREADS" in environ:
        return environ
    say("OMP_NUM_THREADS is set to 1 for each process of this node; set it in run.env to tune")
    return {**environ, "OMP_NUM_THREADS": "1"}


def _with_keras(environ: Mapping[str, str], settings: RuntimeConfig) -> Mapping[str, str]:
    """What Keras computes with: it must know before a script imports it."""
    wanted = compat.keras_backend(settings.strategy, settings.options)
    if wanted is None:
        return environ
    chosen = environ.get("KERAS_BACKEND", wanted)
    if chosen != wanted:
        raise EnvError(
            f"KERAS_BACKEND is {chosen}, and strategy.kind: {settings.strategy} trains with"
            f" {wanted}; take it out of run.env and of the image"
        )
    # JAX warns of the setting by which it lets ranks come and go (see jax_processes).
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2"} if wanted == "jax" else {}
    return {**quiet, **environ, "KERAS_BACKEND": wanted}


def _parents_lifeline() -> int | None:
    """The pipe that the parent holds, kept from the ranks: it is not theirs."""
    end = config.lifeline()
    if end is None:
        return None
    try:
        os.set_inheritable(end, False)  # noqa: FBT003 - os has no keyword for it
    except OSError:
        raise EnvError(
            f"{LIFELINE_ENV}={end} is not an open file descriptor; remove it, k8sjob sets it"
        ) from None
    return end


def _make_lifeline(stack: ExitStack) -> int:
    """A pipe whose write end lives exactly as long as this process; returns the read end."""
    read, write = os.pipe()
    stack.callback(os.close, read)
    stack.callback(os.close, write)
    os.set_inheritable(read, True)  # noqa: FBT003 - os has no keyword for it
    return read


def _end(reason: Reason | None) -> _End:
    return reason, reason.exit_code if reason else ExitCode.DONE


def _refused(error: EnvError | PeerLost) -> _End:
    reason = Reason(
        exit_code=int(error.exit_code),
        type=type(error).__name__,
        message=str(error),
        time=time.time(),
        culprits=error.culprits if isinstance(error, PeerLost) else (),
    )
    return _end(reason)


def _write_last_words(reason: Reason) -> None:
    file = config.termination_log()
    if file is not None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        with suppress(OSError), open(os.open(file, flags, 0o644), "w") as out:  # noqa: PTH123 - the job may have put a FIFO there, which would block
            out.write(reason.encode())


if __name__ == "__main__":
    end = main(sys.argv[1:])
    if "torch" in sys.modules:  # its threads may abort an interpreter that comes to its end
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end)
    sys.exit(end)
