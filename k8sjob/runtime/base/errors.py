"""Errors of the runtime, and the libraries' errors that mean that another rank went away.

torch has no exception for a lost peer: gloo raises a plain RuntimeError, NCCL a DistBackendError,
the store a DistNetworkError or DistStoreError. One table here lists their messages.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING, Final

from k8sjob.contract import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class EnvError(Exception):
    """An environment that cannot work: what is wrong, the value seen, and the next step."""

    exit_code: Final = ExitCode.CONFIG


class PeerLost(RuntimeError):  # noqa: N818 - a condition: this rank itself is fine
    """Other ranks went away or never came; this rank may be started again.

    Attributes:
        culprits: the ranks concerned; empty if they are not known.
        late: whether they may still be there, and did not come in time.
    """

    exit_code: Final = ExitCode.PEER_LOST

    def __init__(self, message: str, culprits: tuple[int, ...] = (), *, late: bool = False) -> None:
        self.culprits, self.late = culprits, late
        super().__init__(message)


_SIGNS: Final[tuple[tuple[str, str], ...]] = (
    # gloo/transport/tcp/pair.cc: the connection to a rank ended; %s is strerror of the read.
    ("RuntimeError", r"gloo/.*Connection closed by peer"),
    ("RuntimeError", r"gloo/.*(Read|Write|writev) .*(reset by peer|Broken pipe|timed out)"),
    ("RuntimeError", r"gloo/.*(Socket closed|Application timeout caused pair closure)"),
    # gloo/transport/tcp/{unbound_buffer,buffer}.cc, gloo/rendezvous/store.h: it never answered.
    ("RuntimeError", r"gloo/.*([Tt]imed out waiting|[Tt]imeout waiting|Wait timeout)"),
    # gloo/rendezvous/context.cc: a rank left while the connections were made.
    ("RuntimeError", r"connectFullMesh failed"),
    # torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, monitoredBarrier.
    ("RuntimeError", r"Rank \d+ (failed to pass|timed out in) monitoredBarrier"),
    # torch/csrc/distributed/rpc/{utils,tensorpipe_agent}.cpp, tensorpipe/transport/uv.
    ("RuntimeError", r"this error originated at tensorpipe/"),
    ("RuntimeError", r"RPCErr:\d+:RPC ran for more than set timeout"),
    # torch/csrc/distributed/c10d/NCCLUtils.hpp and ProcessGroupNCCL.cpp.
    ("DistBackendError", r"ncclRemoteError|remote process exit|communicator was aborted"),
    ("DistBackendError", r"[Tt]imed out|[Tt]imeout|Connection (closed|reset|refused)"),
    # xla/backends/cpu/collectives/gloo_communicator.cc, of an error of gloo; jax 0.7 to 0.10.
    ("JaxRuntimeError", r"Gloo .*(Connection closed by peer|reset by peer|Broken pipe)"),
    ("JaxRuntimeError", r"Gloo .*([Tt]imed out|[Tt]imeout|Socket closed)"),
    # xla/backends/gpu/collectives/nccl_errors.h.
    ("JaxRuntimeError", r"NCCL .*(remote process exited|network error)"),
    # torch/csrc/distributed/c10d/TCPStore.cpp and socket.cpp; not its own port being taken.
    ("DistNetworkError", r"\A(?!.*(failed to listen|failed to bind|EADDRINUSE))"),
    ("DistStoreError", r"[Tt]imed out|[Tt]imeout|timeout after"),
)
"""(class, what its message contains), each from the source named above it; torch 2.6 to 2.15."""

_MAX_CAUSES: Final = 4
_MAX_CAUSE: Final = 300
"""Characters of a cause that are kept."""
_LATE: Final = re.compile(r"[Tt]imed out|[Tt]imeout|failed to pass")


def message_of(error: BaseException) -> str:
    """An exception's message; its class may have a __str__ that fails."""
    try:
        return str(error).strip()
    except Exception as failed:  # noqa: BLE001 - the user's code
        return f"(its __str__ raised {type(failed).__name__})"


def first_line(error: BaseException) -> str:
    """An exception's class and the first line of its message."""
    text = message_of(error).splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def linked(error: BaseException) -> Iterator[tuple[str, BaseException]]:
    """An exception and those behind it, each with its relation to the one before it.

    The relation is "" for the exception itself, "first" within a group, "from" or "while handling".
    """
    passed: set[int] = set()
    relation, link = "", error
    # `raise e from e` makes an exception its own cause; Python prevents only cycles of contexts.
    while id(link) not in passed:
        passed.add(id(link))
        yield relation, link
        if isinstance(link, BaseExceptionGroup):
            relation, link = "first", link.exceptions[0]
        elif link.__cause__ is not None:
            relation, link = "from", link.__cause__
        elif link.__context__ is not None and not link.__suppress_context__:
            relation, link = "while handling", link.__context__


def causes(error: BaseException) -> tuple[str, ...]:
    """The exceptions behind one, the last one first; see Reason.causes."""
    behind = islice(linked(error), 1, 1 + _MAX_CAUSES)
    return tuple(f"{relation} {first_line(link)[:_MAX_CAUSE]}" for relation, link in behind)


def first_leaf(error: BaseException) -> BaseException:
    """The first exception in a group that is no group; the exception itself where it is none."""
    leaves = (link for _, link in linked(error) if not isinstance(link, BaseExceptionGroup))
    return next(leaves, error)


def ranks_in_words(ranks: Iterable[int]) -> str:
    """[0] as "rank 0", [1, 2, 3, 5] as "ranks 1-3, 5"; more than eight spans are cut."""
    spans: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    shown = [str(low) if low == high else f"{low}-{high}" for low, high in spans[:8]]
    single = len(spans) == 1 and spans[0][0] == spans[0][1]
    return f"rank{'' if single else 's'} {', '.join(shown)}{', ...' if len(spans) > 8 else ''}"


def peer_loss(error: BaseException) -> str | None:
    """One line about the rank that went away, from an exception or one that it came from.

    Returns:
        The message without torch's source lines and general advice; None: no rank went away.
    """
    for _, link in linked(error):
        # The runtime's own error has named the ranks already.
        if isinstance(link, PeerLost):
            return str(link)
        if _matches(link):
            return f"another rank is gone: {_core_message(link)}"
    return None


def lateness(error: BaseException) -> str | None:
    """One line about a collective that failed because a rank, living or dead, did not join it.

    An exception raised while another one was handled counts as an error by itself.

    Returns:
        As peer_loss(); None: it was something else.
    """
    for relation, link in linked(error):
        if relation == "while handling":
            break
        if isinstance(link, PeerLost) and link.late:
            return str(link)
        # A store's timeout may be that of a store that the script made.
        stores = type(link).__name__.startswith(("DistStore", "DistNetwork"))
        if _matches(link) and not stores and _LATE.search(message_of(link)):
            return _core_message(link)
    return None


def _core_message(error: BaseException) -> str:
    first = message_of(error).partition("\n")[0]
    # Gloo begins with the place in its source, and torch ends with advice about other causes.
    text = re.sub(r"^\[[^]]*\.(cc|cpp|h):\d+\] ", "", first)
    return text.partition(". This is typically")[0].partition(" (this error originated")[0]


def _matches(error: BaseException) -> bool:
    # Exactly these classes: a user's subclass of RuntimeError is the user's error.
    kind = type(error)
    if kind.__module__.partition(".")[0] not in {"builtins", "torch", "jax", "jaxlib"}:
        return False
    return any(
        kind.__name__ == name and re.search(pattern, message_of(error), re.DOTALL)
        for name, pattern in _SIGNS
    )
