"""A file of Keras's own from a model that all ranks have trained."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

    from k8sjob.runtime.job import Job

__all__ = ["save_model"]

_SUFFIX: Final = ".keras"


def save_model(job: Job, model: Any, path: Path) -> None:
    """See Job.save_model."""
    if path.suffix != _SUFFIX:
        raise ValueError(f"{path}: Keras saves a whole model under a name that ends with {_SUFFIX}")
    if job.config.strategy == "keras_mesh":
        from k8sjob.runtime.keras_pieces import undivided  # needs a Keras that can distribute

        with undivided(job, model) as copy:
            if copy is not None:
                _write(copy, path)
    elif job.is_main:
        _write(model, path)


def _write(model: Any, path: Path) -> None:
    """Write it whole or not at all."""
    draft = path.with_name(f".{path.stem}.{os.getpid()}.tmp{_SUFFIX}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        model.save(draft)
        draft.replace(path)
    finally:
        with suppress(OSError):
            draft.unlink()
