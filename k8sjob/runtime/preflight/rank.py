"""The preflight of one rank, in a child of its process, before the user's program.

The main thread waits for rank 0's verdict, and rank 0's gives it, while another thread examines:
that one may never return from a device or from a collective. A process of its own, so that no
memory of the device, no thread and no port remains when the program starts.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from k8sjob import strategies
from k8sjob.contract import ExitCode
from k8sjob.runtime.base import config
from k8sjob.runtime.base.config import TIMEOUTS
from k8sjob.runtime.base.env import dist_env
from k8sjob.runtime.base.errors import first_line, peer_loss
from k8sjob.runtime.base.event_lines import log_line
from k8sjob.runtime.base.signals import in_thread
from k8sjob.runtime.comm.process_group import open_group
from k8sjob.runtime.preflight.links import measure
from k8sjob.runtime.preflight.node import Report, examine
from k8sjob.runtime.preflight.verdict import Verdict, judge, leaders

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store

    from k8sjob.contract import RuntimeConfig
    from k8sjob.runtime.base.env import DistEnv

_VERDICT: Final = "verdict"


class Preflight(Exception):  # noqa: N818 - the name of the reason
    """The preflight refused nodes, or the network between them.

    Attributes:
        culprits: the ranks of the refused nodes; empty where none stands out.
        nodes: their names.
    """

    exit_code: Final = ExitCode.PREFLIGHT

    def __init__(self, message: str, culprits: tuple[int, ...], nodes: tuple[str, ...]) -> None:
        self.culprits, self.nodes = culprits, nodes
        super().__init__(message)


def take_part(pipe: int) -> None:
    """Take part in the preflight, and return if all nodes prove themselves.

    Args:
        pipe: gets a byte when all ranks are here, from when on the preflight's time counts.

    Raises:
        Preflight: a node is refused.
        EnvError: the environment cannot work.
        PeerLost: ranks did not come in time.
    """
    env, settings = dist_env(), config.runtime_config()
    stores: SimpleQueue[Store] = SimpleQueue()

    def begin(store: Store) -> None:
        os.write(pipe, b".")  # not by the main thread, which a device's driver may stop next
        stores.put(store)

    examination = in_thread(partial(_examine, env, settings, begin), "k8sjob-preflight")
    while stores.empty():
        if examination.done() and stores.empty():
            examination.result()  # raises: the ranks did not come together
        time.sleep(TIMEOUTS.poll)
    store, began, limits = stores.get(), time.monotonic(), settings.preflight
    if env.rank == 0:
        verdict = _judged(store, env.world_size, limits, began)
    else:
        verdict = _heard(store, env.rank, began + limits["timeout"] + TIMEOUTS.lead)
    if verdict.refused:
        raise Preflight(verdict.summary, tuple(verdict.culprits), tuple(verdict.nodes))
    if env.rank == 0:
        log_line(f"preflight: {verdict.summary}")


def _examine(env: DistEnv, settings: RuntimeConfig, on_store: Callable[[Store], object]) -> None:
    """Examine this rank and its network, and report both; the thread that may never return.

    `on_store` gets a client of the store for the main thread.
    """
    # Several threads wait for the one that another process delays: a busy CPU would look broken.
    torch.set_num_threads(1)
    report = Report(env.rank, env.local_rank, config.node_name())
    asked = settings.preflight["asks"][env.rank > env.local_rank]
    store: Any = None

    def examine_device(mine: Store, main_threads: Store) -> None:
        nonlocal store, report
        store = PrefixStore("preflight", mine)
        # First of all, so that the node of a rank that never answers is known.
        _post(store, report)
        on_store(PrefixStore("preflight", main_threads))
        report = examine(env, report, asked)
        _post(store, report)

    if strategies.serving(settings.strategy, settings.options):
        settings = replace(settings, backend=None)  # it is that of the nodes that train
    try:
        if env.world_size == 1:
            alone = dist.HashStore()  # type: ignore[attr-defined]  # re-exported at run time
            examine_device(alone, alone)
            return
        group = open_group(
            env,
            settings,
            serving=0,
            on_cpu=False,
            # Two clients, since a request of one thread would block those of the other. The main
            # thread has the one that hosts the store, and ends last.
            on_joined=lambda joined: examine_device(joined.again(), joined.store),
            on_wait=lambda _missing: None,
        )
        first = leaders(_reports(store, env.world_size))
        device = group.device if group.backend == "nccl" else torch.device("cpu")
        for measured in measure(report, first, device):
            _post(store, measured)
    except Exception as error:
        if store is None:
            raise  # the ranks have not come together
        # Others that lose a rank are fine; that one's own process says why it ended.
        if not peer_loss(error):
            problems = [*report.problems, first_line(error)]
            _post(store, replace(report, device=report.device or "none", problems=problems))


def _post(store: Store, report: Report) -> None:
    with suppress(dist.DistError):  # after the verdict the store is closed
        store.set(f"report/{report.rank}", json.dumps(asdict(report)))


def _reports(store: Store, world: int) -> dict[int, Report]:
    return {
        rank: Report(**json.loads(store.get(key)))
        for rank in range(world)
        if store.check([key := f"report/{rank}"])
    }


def _judged(store: Store, world: int, limits: dict[str, Any], began: float) -> Verdict:
    """Rank 0's verdict, once the others have heard it."""
    verdict = None
    while verdict is None:
        time.sleep(TIMEOUTS.poll)
        verdict = judge(world, _reports(store, world), limits, time.monotonic() - began)
    store.set(_VERDICT, json.dumps(asdict(verdict)))
    heard = [f"heard/{rank}" for rank in range(1, world)]
    until = time.monotonic() + TIMEOUTS.lead / 3
    while time.monotonic() < until and not all(store.check([key]) for key in heard):
        time.sleep(TIMEOUTS.poll)
    return verdict


def _heard(store: Store, rank: int, deadline: float) -> Verdict:
    """Rank 0's verdict, once its store is closed: the program may open another at that port."""
    # torch warns of a closed store, with C++ frames, and its end is awaited here.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    body: dict[str, Any] = {}
    with suppress(dist.DistError, RuntimeError):
        while time.monotonic() < deadline:
            if not body and store.check([_VERDICT]):
                body = json.loads(store.get(_VERDICT))
                store.set(f"heard/{rank}", "")
            time.sleep(TIMEOUTS.poll)
            store.check([_VERDICT])  # raises when the store is closed
    if body:
        return Verdict(**body)
    return Verdict("rank 0 did not answer: no verdict came from it", [0], refused=True)
