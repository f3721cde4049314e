"""The messages of torch that mean a lost peer, and others.

They were recorded with torch 2.15; test_agent_dist.py provokes them again.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch.distributed as dist

from k8sjob.runtime.base.errors import (
    PeerLost,
    causes,
    first_leaf,
    lateness,
    linked,
    peer_loss,
)

PAIR = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:545] "
LOST = [
    RuntimeError(f"{PAIR}Read error [127.0.0.1]:11446: Connection reset by peer. This is typical"),
    RuntimeError(f"{PAIR}Connection closed by peer [127.0.0.1]:48773. This is typically caused by"),
    RuntimeError(f"{PAIR}writev [10.0.0.1]:1: Broken pipe"),
    RuntimeError(
        "[x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation "
        "to complete"
    ),
    RuntimeError("Gloo connectFullMesh failed with [x] Connection reset"),
    RuntimeError(
        "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms\n Original exception"
    ),
    dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed. Did the"),
    dist.DistNetworkError("The client socket has timed out after 3000ms while trying to connect"),
    dist.DistStoreError("wait timeout after 4000ms, keys: /default_pg/0//nokey"),
    dist.DistStoreError("Timed out after 4 seconds waiting for clients. 1/2 clients joined."),
    dist.DistBackendError(
        "NCCL error in: x.cpp:1, remote process exited or there was a network error\n"
        "ncclRemoteError: A call failed possibly due to a network error"
    ),
    PeerLost("rank 2 never came", (2,)),
]
OWN = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    RuntimeError("Connection closed by peer"),  # of a data source of the user's own
    RuntimeError(f"{PAIR}op.preamble.length <= op.nbytes. 16 vs 8"),  # shapes that differ
    ConnectionResetError("Connection reset by peer"),
    TimeoutError("timed out"),
    ValueError(f"{PAIR}Connection closed by peer"),
    dist.DistNetworkError(
        "The server socket has failed to listen on any local network address. port: 29500, "
        "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
    ),
    dist.DistBackendError("NCCL error: ncclInvalidUsage: invalid device ordinal"),
    SystemExit(1),
]


@pytest.mark.parametrize("error", LOST, ids=str)
def test_a_lost_peer(error):
    assert peer_loss(error)


@pytest.mark.parametrize("error", OWN, ids=str)
def test_an_error_of_the_rank_itself(error):
    assert not peer_loss(error)


def after(error, *, cause=None, context=None):
    """An error as it is caught that came from one, or was raised while one was handled."""
    error.__cause__, error.__context__ = cause, context
    error.__suppress_context__ = cause is not None
    return error


def test_an_error_that_a_script_raises_from_it_is_still_a_lost_peer():
    assert peer_loss(after(ValueError("training failed"), cause=LOST[0]))
    assert peer_loss(after(KeyError("cleanup"), context=LOST[0]))
    hidden = after(ValueError("my own"), context=LOST[0])
    hidden.__suppress_context__ = True
    assert not peer_loss(hidden)


def test_a_subclass_of_the_users_is_not_a_lost_peer():
    class MineError(RuntimeError):
        pass

    assert not peer_loss(MineError(f"{PAIR}Connection closed by peer"))


def looped(*links):
    """The first of several errors, each raised from the next one, and the last from itself."""
    for error, cause in pairwise([*links, links[-1]]):
        after(error, cause=cause)
    return links[0]


def circle(*links):
    """The first of several errors, of which the last is raised from the first again."""
    for error, cause in pairwise([*links, links[0]]):
        after(error, cause=cause)
    return links[0]


CYCLES = {
    "from itself": looped(ValueError("0")),
    "from itself, behind another": looped(ValueError("0"), KeyError("1")),
    "from each other": circle(ValueError("0"), KeyError("1"), OSError("2")),
    "while it was handled": after(ValueError("0"), context=looped(KeyError("1"), OSError("2"))),
    "in a group": ExceptionGroup("g", [looped(ValueError("0"), KeyError("1"))]),
    "from its own group": ValueError("0"),
}
CYCLES["from its own group"].__cause__ = ExceptionGroup("g", [CYCLES["from its own group"]])


@pytest.mark.parametrize("error", CYCLES.values(), ids=CYCLES)
def test_a_cycle_of_causes_ends(error):
    """`raise e from e` once held all ranks for ever."""
    assert (peer_loss(error), lateness(error)) == (None, None)
    links = [link for _, link in linked(error)]
    assert len(links) == len(set(map(id, links)))
    assert len(causes(error)) == len(links) - 1
    assert first_leaf(error).args == ("0",)


def test_a_group_and_a_message_that_cannot_be_printed():
    class Opaque:
        def __repr__(self):
            raise ValueError

    assert peer_loss(ExceptionGroup("g", [LOST[0]]))
    assert peer_loss(RuntimeError("lost", Opaque())) is None


LATE = RuntimeError("[gloo/transport/tcp/buffer.cc:78] Timed out waiting 4000ms for recv operation")


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (LATE, "Timed out waiting 4000ms for recv operation"),
        (after(ValueError("no epoch"), cause=LATE), "Timed out waiting 4000ms for recv operation"),
        (after(ValueError("no license"), context=LATE), None),  # speaks for itself
        (RuntimeError(f"{PAIR}Connection closed by peer [127.0.0.1]:48773"), None),
        (dist.DistStoreError("wait timeout after 1000ms, keys: /answer"), None),  # a script's own
        (PeerLost("rank(s) 2 did not come to the end", (2,), late=True), "rank(s) 2 did not come"),
        (PeerLost("rank 0 is gone", (0,)), None),
        (TimeoutError("timed out"), None),
    ],
    ids=str,
)
def test_the_messages_that_mean_that_a_rank_did_not_come(error, detail):
    assert (lateness(error) or "").startswith(detail or "")
    assert (lateness(error) is None) == (detail is None)
