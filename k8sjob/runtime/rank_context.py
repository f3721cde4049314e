"""Context of a rank: what the parts of a job's runtime share, from the group to the watchdog."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from k8sjob.contract import EventKind, ExitCode
from k8sjob.runtime.base import config as settings
from k8sjob.runtime.base.env import is_elastic, max_ranks
from k8sjob.runtime.base.errors import PeerLost, first_line, lateness, peer_loss
from k8sjob.runtime.checkpoint.store import Checkpoints
from k8sjob.runtime.checkpoint.writer import Checkpointer
from k8sjob.runtime.comm.call_order import LEAVING, CallOrder, CallOrderError
from k8sjob.runtime.comm.watchdog import Hung, Watchdog
from k8sjob.runtime.progress import Computing, Waiting

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from k8sjob.contract import RuntimeConfig
    from k8sjob.runtime.base.env import DistEnv
    from k8sjob.runtime.base.event_lines import Reporter
    from k8sjob.runtime.comm.process_group import Group
    from k8sjob.runtime.comm.stop import StopCoordinator

_LAST_SAVE_S: Final = 3.0
"""Seconds without progress after which a rank that fails abandons its last checkpoint."""


class Stopped(SystemExit):
    """All ranks stopped at a common point, with a checkpoint where there is a place for it."""

    def __init__(self, reason: str) -> None:
        super().__init__(int(ExitCode.STOPPED))
        self.reason = reason


class RankContext:
    """One rank's view of its job, for the runtime's own modules.

    Attributes:
        max_ranks: the most ranks that an elastic job may come to have; 0 for others.
        checkpoint_dir: on this machine; None where checkpoints are off, as is `checkpointer`.
        calls: checks that the ranks make the same collective calls in the same order.
        waiting: how long this rank waited for the others.
        training: whether training has begun.
        step: number of the last step that was reported.
        metrics: the last numbers given to log().
        fitted: the model that fit() trains, as a weak reference.
        unfinished: whether the loop of the last prepare() is still to come; None without any.
    """

    def __init__(
        self,
        env: DistEnv,
        config: RuntimeConfig,
        group: Group,
        *,
        stop_coordinator: StopCoordinator,
        reporter: Reporter,
        seed: int,
    ) -> None:
        self.env, self.config, self.group = env, config, group
        self.stop_coordinator, self.reporter, self.seed = stop_coordinator, reporter, seed
        self.rank, self.is_main, self.device = group.rank, group.rank == 0, group.device
        self.max_ranks = max_ranks(env.local_world_size)
        # The host of a GPU only queues work: whenever it waits, it waits for other ranks.
        self.waiting = Waiting() if self.device.type == "cuda" else Waiting(Computing())
        self.training, self.step = False, 0
        self.metrics: dict[str, Any] = {}
        self.fitted: Callable[[], Any] | None = None
        self.unfinished: bool | None = None
        folder = config.checkpoint_dir
        self.checkpoint_dir = None if folder is None else mapped_path(folder)
        self.checkpointer: Checkpointer | None = None
        if self.checkpoint_dir is not None:
            self.checkpointer = Checkpointer(
                Checkpoints(self.checkpoint_dir, config.checkpoint_keep),
                group,
                reporter,
                form=config.checkpoint_format,
                must_share=is_elastic(),
                beat=lambda: self.beat(self.step, "checkpoint"),
            )
        first = env.world_size - group.world_size
        self.calls = CallOrder(group, first, config.collective_timeout, stop_coordinator.alert)
        joined = group.rendezvous if group.world_size > 1 else None
        self._watchdog = Watchdog(
            joined.again() if joined else None,
            env,
            ranks=range(first, env.world_size),
            timeout=config.session_hang_timeout,
            patience=config.collective_timeout,
            error_file=settings.error_file(),
            publish=self.calls.publish,
            reporter=reporter,
        )
        group.on_phase = lambda phase: self.beat(self.step, phase)

    def log(self, **values: Any) -> None:
        """Report numbers of this moment."""
        self.metrics.update(values)
        self.reporter.emit(EventKind.METRICS, **values)

    def begin(self) -> None:
        """Training begins: from now on progress is watched, and a stop waits for all ranks."""
        self.training = True
        self._watchdog.begin()

    def end(self) -> None:
        """Training is over, and its last checkpoint written."""
        if self.checkpointer is not None:
            self.checkpointer.settle()
        self.pause()

    def pause(self) -> None:
        """Progress is not watched until begin() is called again."""
        self._watchdog.pause()

    def leave(self) -> None:
        """Leave together: no rank closes a connection that another still reads from."""
        self.end()
        try:
            self.calls.check(LEAVING)
            # A rank that waits here for the others is not the one that hangs.
            self._watchdog.beat(self.step, "sync")
            self.stop_coordinator.finish(self.config.collective_timeout, self._watchdog.close)
        except PeerLost as lost:
            hung = self._hung(lost)
            self._watchdog.close()
            self.stop_coordinator.close()
            if hung:
                raise hung from lost
            raise
        except CallOrderError as error:
            self.fail(error)
            raise
        self.group.destroy()

    def fail(self, error: BaseException) -> Hung | None:
        """Leave without the others: warn them, and wait for nothing from them.

        Returns:
            Where the error says only that this rank waited in vain: for whom.
        """
        hung = self._hung(error)
        reason = first_line(hung or error)
        # Before the last save, which takes seconds: the others learn at once why they fail.
        self.stop_coordinator.warn_others(f"rank {self.env.rank} failed: {reason}")
        if self.checkpointer is not None:
            self.checkpointer.settle(_LAST_SAVE_S)
        self.end()
        self._watchdog.close()
        self.stop_coordinator.close()
        if self.group.world_size == 1:  # a notebook continues; nccl could wait for lost ranks
            self.group.destroy()
        return hung

    def _hung(self, error: BaseException) -> Hung | None:
        """The hang behind a collective that failed because ranks did not come to it."""
        if isinstance(error, SystemExit | KeyboardInterrupt):
            return None
        # A timeout may mean a living rank that did not come, a broken connection a dead one.
        late = lateness(error)
        message = peer_loss(error) if late is None else late
        if message is None:
            return None
        return self._watchdog.find_hang(message, error, late=late is not None)

    def beat(self, step: int, phase: str = "compute") -> None:
        """See Job.beat."""
        self.step = step
        self.waiting.phase(phase)
        self._watchdog.beat(step, phase)
        if self.checkpointer is not None:
            self.checkpointer.poll()


def mapped_path(mount: str | os.PathLike[str]) -> Path:
    """The real path of a path in the job.yaml: the same in a pod, a folder under `k8sjob run`."""
    path = Path(mount)
    # The longest mount first: one may lie within another.
    mounts = sorted(settings.mapped_paths().items(), key=lambda pair: -len(pair[0]))
    for mount_path, folder in mounts:
        if path.is_relative_to(mount_path):
            return Path(folder) / path.relative_to(mount_path)
    return path
