"""The runtime inside a job's containers: the agent of a node, and what a training script imports.

    from k8sjob import runtime

    with runtime.session() as job:
        ...

Nothing is imported before it is asked for: the agent must not need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k8sjob.runtime.base.errors import EnvError as EnvError
    from k8sjob.runtime.base.errors import PeerLost as PeerLost
    from k8sjob.runtime.data import ShardSampler as ShardSampler
    from k8sjob.runtime.job import Job as Job
    from k8sjob.runtime.rank_context import Stopped as Stopped
    from k8sjob.runtime.sessions import session as session
    from k8sjob.runtime.strategies.sync_batchnorm import SyncBatchNorm as SyncBatchNorm
    from k8sjob.runtime.training_run import Run as Run

_HOME = {
    "EnvError": "base.errors",
    "Job": "job",
    "PeerLost": "base.errors",
    "Run": "training_run",
    "ShardSampler": "data",
    "Stopped": "rank_context",
    "SyncBatchNorm": "strategies.sync_batchnorm",
    "session": "sessions",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'k8sjob.runtime' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"k8sjob.runtime.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(_HOME)
