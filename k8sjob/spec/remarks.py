"""What is valid and will not do on a cluster what it seems to say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k8sjob.compat import STRATEGIES
from k8sjob.spec.base import Broken

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.spec.job import JobSpec

__all__ = ["job_remarks"]


def job_remarks(spec: JobSpec) -> Iterator[Broken]:
    """Every remark on a job: the field, and what to do about it."""
    if spec.replicas.elastic and spec.uses_agent and not spec.checkpoint:
        yield Broken(
            ("replicas", "elastic"),
            "without checkpoint the training begins anew whenever a node comes or goes; set"
            " checkpoint.dir, on a volume that all nodes share",
        )
    if not spec.uses_agent:
        for name in ("rendezvous_timeout", "collective_timeout", "hang_timeout"):
            if name in spec.run.model_fields_set:
                yield Broken(
                    ("run", name),
                    "no agent starts a command, so only scripts that call session() heed this; set"
                    " the timeouts of the launcher and of init_process_group instead",
                )
    if warning := STRATEGIES[spec.strategy.kind].warning:
        yield Broken(("strategy", "kind"), f"{spec.strategy.kind}: {warning}")
    checkpoint, volume = spec.checkpoint, spec.checkpoint_volume
    if checkpoint and (volume is None or volume.empty_dir is not None):
        where = "no volume" if volume is None else f"{volume.name!r}, an empty_dir"
        yield Broken(
            ("checkpoint", "dir"),
            f"{checkpoint.dir} lies on {where}: on a cluster its checkpoints outlive a restart in"
            " the pod, not the pod; mount a pvc there",
        )
