"""The ranks as a rectangle: which of them divide the data, and which divide the model.

Ranks that follow each other share a copy of the model, so that its traffic stays in a node. With
2 x 3 ranks the rows are copies of the model and the columns are its parts:

    model:    0  1  2
    data 0    0  1  2
    data 1    3  4  5
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from k8sjob.runtime.comm.process_group import Group


class Mesh:
    """All ranks of a group, by the axes data and model.

    Attributes:
        data_rank: which share of each batch this rank has; 0 to data_size - 1.
        data_size: number of shares, and of copies of the model.
        model_rank: which part of the model this rank has; 0 to model_size - 1.
        model_size: number of parts of the model.
    """

    def __init__(self, group: Group, model_size: int = 1) -> None:
        self.group, self.model_size = group, model_size
        self.data_size = group.world_size // model_size
        self.data_rank, self.model_rank = divmod(group.rank, model_size)

    @cached_property
    def devices(self) -> DeviceMesh:
        """Torch's own mesh, of the axes along which there are several ranks."""
        sizes = {"data": self.data_size, "model": self.model_size}
        sizes = {name: size for name, size in sizes.items() if size > 1}
        return init_device_mesh(
            self.group.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
        )

    def axis(self, name: Literal["data", "model"]) -> DeviceMesh | None:
        """The ranks along one axis through this one; None if this rank is the only one on it.

        The first call on a mesh is a collective of all ranks.
        """
        size = self.data_size if name == "data" else self.model_size
        return None if size == 1 else self.devices[name]

    def process_group(self, name: Literal["data", "model"]) -> Any:
        """The process group of axis(), as torch.distributed's collectives take it."""
        axis = self.axis(name)
        return None if axis is None else axis.get_group()

    def new_group(self) -> Any:
        """One more process group of the ranks along model; all ranks of the job call it."""
        world = torch.arange(self.group.world_size).view(self.data_size, self.model_size)
        # Torch requires that all ranks make all groups, those of others included.
        return [dist.new_group(line.tolist()) for line in world][self.data_rank]

    def average(self, tensors: list[Tensor]) -> None:
        """Replace tensors by their means along the data axis; one message for each type."""
        ranks = self.process_group("data")
        if ranks is None:
            return
        for kind in dict.fromkeys(tensor.dtype for tensor in tensors):  # equally on all ranks
            same = [tensor for tensor in tensors if tensor.dtype == kind]
            # Each message has a fixed cost, which is larger than that of most buffers.
            flat = torch.cat([tensor.flatten() for tensor in same])
            dist.all_reduce(flat, group=ranks)
            flat /= self.data_size
            parts = torch.split(flat, [tensor.numel() for tensor in same])
            for tensor, part in zip(same, parts, strict=True):
                tensor.copy_(part.view_as(tensor))


def broadcast_state(model: nn.Module, group: Group, *, only_buffers: bool = False) -> None:
    """Rank 0's parameters and buffers for all: strategies rely on equal starts.

    `only_buffers`: those alone, which each rank's own data changed.
    """
    if group.world_size > 1:
        with torch.no_grad():
            for tensor in [*([] if only_buffers else model.parameters()), *model.buffers()]:
                tensor.copy_(group.broadcast(tensor))
