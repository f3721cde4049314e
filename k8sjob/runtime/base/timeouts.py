"""`Timeouts`: how long the runtime waits where a job has no setting for it (see RuntimeConfig)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from k8sjob.runtime.base import config

__all__ = ["TIMEOUTS", "Timeouts"]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Waits, graces and intervals, in seconds.

    Attributes:
        poll: between two looks of a loop that waits for another thread or process.
        retry: between two tries to host a store or to reach one.
        look: between two looks of the agent at its processes, or of a rank into the store.
        observe: between two looks of a process at itself.
        observe_max: the most that one of these adds: a process that was frozen did not wait.
        exchange: between two exchanges with the other nodes, and two reports of missing ranks.
        report: between two lines about the Master's name.
        connect: to reach a port that is open, or to end a thread that may wait for one.
        listen: for a process of an earlier group to free the port.
        store: for a key that another rank sets at once.
        lead: beyond the deadline, for rank 0 to publish who is missing, and for others to read it.
        peer_grace: after a first failure, for the other ranks to end by it and write their reasons.
        kill_grace: between SIGTERM and SIGKILL where nothing is to be saved.
        dump_grace: for processes that do not end to write their stacks.
        agree: for the agents of all nodes to see the same hang, since the first end breaks the
            others' connections.
        answer: for nodes within reach to report where their ranks are.
        leftover_grace: for the processes that a finished one left in its group.
        kernel: for the kernel to remove killed processes; one may be deep in a driver.
        restart_max: the longest pause before a restart; the first are shorter.
        flush: for a node to report its end to node 0.
        others: for nodes that still work after the Master: its end deletes their pods.
        unknown: the same for nodes that never reported.
        reported: for the kubelets to report the other pods' ends, so that the operator keeps them.
        last_call: for more nodes than an elastic group needs.
        keep_alive: between two signs of life of a node of an elastic group.
        elastic_store: for an answer of the store of an elastic group's nodes.
        placed: for the first node of a round to write its address.
        settled: length of a round after which earlier failures do not count.
        linger: for the others to learn from the host of an elastic group's store that it is done.
        exit: for a failed process's threads and atexit handlers, and for a watchdog's last output:
            its peers wait for it.
        destroy: for a process group; NCCL's can wait for ever for a lost peer.
        stop: for all ranks to agree where to stop.
        loss_grace: for the main thread to notice a lost peer by itself, with a traceback.
        join: for a thread that may wait for a store that does not answer.
        look_at_calls: until a rank that waits reads the others' last calls.
    """

    poll: float = 0.05
    retry: float = 0.2
    look: float = 0.5
    observe: float = 0.25
    observe_max: float = 1.0
    exchange: float = 1.0
    report: float = 10.0
    connect: float = 5.0
    listen: float = 15.0
    store: float = 300.0
    lead: float = 10.0
    peer_grace: float = 3.0
    kill_grace: float = 3.0
    dump_grace: float = 2.0
    agree: float = 2.5
    answer: float = 5.0
    leftover_grace: float = 2.0
    kernel: float = 2.0
    restart_max: float = 2.0
    flush: float = 3.0
    others: float = 30.0
    unknown: float = 10.0
    reported: float = 3.0
    last_call: float = 3.0
    keep_alive: float = 1.0
    elastic_store: float = 60.0
    placed: float = 10.0
    settled: float = 60.0
    linger: float = 3.0
    exit: float = 10.0
    destroy: float = 10.0
    stop: float = 60.0
    loss_grace: float = 5.0
    join: float = 1.0
    look_at_calls: float = 1.5


TIMEOUTS: Final = Timeouts(**config.timeouts())
"""Those of this process."""
