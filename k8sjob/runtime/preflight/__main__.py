"""The preflight of one rank: `python -P -m k8sjob.runtime.preflight`, before the user's program.

The main thread waits for rank 0's verdict, and rank 0's gives it, while another thread examines:
that one may never return from a device or from a collective. A process of its own, so that no
memory of the device, no thread and no port remains when the program starts.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from k8sjob.contract import ExitCode, Reason
from k8sjob.runtime.base import config
from k8sjob.runtime.base.config import TIMEOUTS
from k8sjob.runtime.base.env import dist_env, stay_on_loopback
from k8sjob.runtime.base.errors import EnvError, PeerLost, first_line, peer_loss
from k8sjob.runtime.base.event_lines import log_line
from k8sjob.runtime.base.network import is_loopback
from k8sjob.runtime.base.termination import write_reason
from k8sjob.runtime.comm.process_group import backend_for, common_backend, local_device
from k8sjob.runtime.comm.rendezvous import RankInfo, Rendezvous, rendezvous
from k8sjob.runtime.preflight.links import Network, measure
from k8sjob.runtime.preflight.node import Report, examine
from k8sjob.runtime.preflight.verdict import Verdict, judge, leaders

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from k8sjob.runtime.base.env import DistEnv

_VERDICT: Final = "verdict"


def main(pipe: int) -> ExitCode:
    """Take part in the preflight.

    Args:
        pipe: written when all ranks are here, from when on the preflight's time counts.

    Returns:
        The exit code of this rank's process.
    """
    env, settings = dist_env(), config.runtime_config()
    try:
        joined = _join(env, settings.backend, settings.rendezvous_timeout)
    except (EnvError, PeerLost) as error:
        culprits = list(error.culprits) if isinstance(error, PeerLost) else []
        verdict = Verdict(str(error), culprits)
        return _fail(env, error.exit_code, type(error).__name__, verdict)
    os.close(pipe)
    began, limits = time.monotonic(), settings.preflight
    alone = dist.HashStore()  # type: ignore[attr-defined]  # re-exported at run time
    # Each thread has a client of its own: a request of one blocks the others.
    store, theirs = (
        PrefixStore("preflight", base)
        for base in ((joined.store, joined.again()) if joined else (alone, alone))
    )
    # Before anything that may not return, so that the node of a rank that never answers is known.
    blank = Report(env.rank, env.local_rank, config.node_name())
    store.set(f"report/{env.rank}", json.dumps(asdict(blank)))
    arguments = (env, joined, theirs, blank, limits["asks"][env.rank > env.local_rank])
    threading.Thread(target=_examine, args=arguments, daemon=True).start()
    if env.rank == 0:
        verdict = _judged(store, env.world_size, limits, began)
    else:
        verdict = _heard(store, env.rank, began + limits["timeout"] + TIMEOUTS.lead)
    if not verdict.refused:
        if env.rank == 0:
            log_line(f"preflight: {verdict.summary}")
        return ExitCode.DONE
    return _fail(env, ExitCode.PREFLIGHT, "Preflight", verdict)


def _join(env: DistEnv, backend: str | None, timeout: float) -> Rendezvous | None:
    if is_loopback(env.master_addr):
        stay_on_loopback("GLOO_SOCKET_IFNAME")
    if env.world_size == 1:
        return None
    device = local_device(env)
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    info = RankInfo(
        env.rank, env.world_size, socket.gethostname(), backend_for(backend, device), gpu
    )
    return rendezvous(env, info, choose=common_backend, timeout=timeout)


def _examine(
    env: DistEnv, joined: Rendezvous | None, store: Store, report: Report, asked: Any
) -> None:
    """Examine this rank and its network, and report both; the thread that may never return."""
    # Several threads wait for the one that another process delays: a busy CPU would look broken.
    torch.set_num_threads(1)
    # After the verdict the store is closed.
    with suppress(dist.DistError):
        try:
            report = examine(env, report, asked)
            store.set(f"report/{env.rank}", json.dumps(asdict(report)))
            if joined:
                _measure(env, joined, store)
        except RuntimeError as error:
            # Others that lose a rank are fine; that one's own process says why it ended.
            if not peer_loss(error):
                problems = (*report.problems, first_line(error))
                report = replace(report, device=local_device(env).type, problems=problems)
                store.set(f"report/{env.rank}", json.dumps(asdict(report)))


def _measure(env: DistEnv, joined: Rendezvous, store: Store) -> None:
    reports: dict[int, Report] = {}
    while sum(bool(report.device) for report in reports.values()) < env.world_size:
        time.sleep(TIMEOUTS.poll)
        reports = _reports(store, env.world_size)
    first = leaders(reports)
    device = local_device(env) if joined.backend == "nccl" else torch.device("cpu")
    dist.init_process_group(
        joined.backend,
        store=PrefixStore("preflight/group", joined.again()),
        rank=env.rank,
        world_size=env.world_size,
        device_id=device if device.type == "cuda" else None,
    )
    for network in measure(first, device):
        store.set(f"network/{env.rank}", json.dumps(asdict(network)))


def _reports(store: Store, world: int) -> dict[int, Report]:
    return {
        rank: Report(**json.loads(store.get(key)))
        for rank in range(world)
        if store.check([key := f"report/{rank}"])
    }


def _networks(store: Store, world: int) -> dict[int, Network]:
    networks = {}
    for rank in range(world):
        if store.check([key := f"network/{rank}"]):
            body = json.loads(store.get(key))
            body["links"] = {int(peer): rate for peer, rate in body["links"].items()}
            networks[rank] = Network(**body)
    return networks


def _judged(store: Store, world: int, limits: dict[str, Any], began: float) -> Verdict:
    """Rank 0's verdict, once the others have heard it."""
    verdict = None
    while verdict is None:
        time.sleep(TIMEOUTS.poll)
        reports, networks = _reports(store, world), _networks(store, world)
        verdict = judge(world, reports, networks, limits, time.monotonic() - began)
    store.set(_VERDICT, json.dumps(asdict(verdict)))
    heard = [f"heard/{rank}" for rank in range(1, world)]
    until = time.monotonic() + TIMEOUTS.lead / 3
    while time.monotonic() < until and not all(store.check([key]) for key in heard):
        time.sleep(TIMEOUTS.poll)
    return verdict


def _heard(store: Store, rank: int, deadline: float) -> Verdict:
    """Rank 0's verdict, once its store is closed: the program may open another at that port."""
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


def _fail(env: DistEnv, code: ExitCode, kind: str, verdict: Verdict) -> ExitCode:
    reason = Reason(
        code,
        env.rank,
        kind,
        verdict.summary,
        time=time.time(),
        culprits=tuple(verdict.culprits),
        nodes=tuple(verdict.nodes),
    )
    write_reason(reason, config.error_file())
    return code


if __name__ == "__main__":
    end = main(int(sys.argv[1]))
    sys.stderr.flush()
    # The thread may be in a collective, and the group's destructor would wait for it.
    os._exit(end)
