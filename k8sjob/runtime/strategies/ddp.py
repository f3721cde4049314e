"""Data parallel: every rank has the whole model and a share of each batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from k8sjob.runtime import sync_batchnorm
from k8sjob.runtime.blocks import prepare_layers
from k8sjob.runtime.mesh import Mesh
from k8sjob.runtime.replicas import replicate
from k8sjob.runtime.strategies import Strategy, assemble

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

    from k8sjob.runtime.process_group import Group

__all__ = ["prepare"]


def prepare(
    model: nn.Module, loss: Callable[..., Tensor], group: Group, options: Mapping[str, Any]
) -> Strategy:
    """The row of the table: DistributedDataParallel, or the bare model on one rank alone."""
    if options["sync_batchnorm"]:
        model = sync_batchnorm.convert_for(model, group)
    prepare_layers(model, options, as_one=True)
    wrapped, backward = replicate(model, loss, group, bf16=options["bf16"])
    return assemble(model, Mesh(group), backward, bf16=options["bf16"], wrapped=wrapped)
