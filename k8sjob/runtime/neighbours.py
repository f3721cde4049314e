"""What the stages of a pipeline send each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor

    from k8sjob.runtime.mesh import Mesh

__all__ = ["Neighbours"]

_DIMS: Final = 8
_KINDS: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Neighbours:
    """The stages before and behind this one.

    Each direction has a group of its own: nccl works off the messages between two ranks in one
    order, and where one of them sends first and so does the other, both would wait for ever.

    Attributes:
        first: whether no stage comes before.
        last: whether no stage comes behind.
        device: where this stage computes.
    """

    def __init__(self, mesh: Mesh) -> None:
        """All ranks of the job call it."""
        rank = mesh.group.rank
        self.first, self.last = mesh.model_rank == 0, mesh.model_rank == mesh.model_size - 1
        self.device = mesh.group.device
        self._before, self._behind = rank - 1, rank + 1
        self._forth, self._back = mesh.new_groups("model"), mesh.new_groups("model")
        self._wire = mesh.group.device if mesh.group.backend == "nccl" else torch.device("cpu")
        self._sent: list[tuple[Any, Tensor]] = []

    def take_input(self) -> Tensor:
        """What the stage before gave, as a leaf that gets a gradient where there are any."""
        head = torch.zeros(_DIMS + 2, dtype=torch.int64, device=self._wire)
        dist.recv(head, self._before, group=self._forth)
        kind, ndim, *shape = head.tolist()
        body = torch.empty(shape[:ndim], dtype=_KINDS[kind], device=self._wire)
        dist.recv(body, self._before, group=self._forth)
        return body.to(self.device).requires_grad_(torch.is_grad_enabled())

    def give_output(self, output: Any) -> None:
        """Send an output to the stage behind."""
        if not isinstance(output, torch.Tensor) or output.dtype not in _KINDS:
            found = getattr(output, "dtype", type(output).__name__)
            raise ValueError(
                f"strategy.splits: a stage gives {found}, and only one tensor of floating numbers"
                " can go to the next one; split elsewhere"
            )
        shape = [*output.shape, *[0] * (_DIMS - output.ndim)]
        head = [_KINDS.index(output.dtype), output.ndim, *shape]
        self._send(torch.tensor(head), self._behind, self._forth)
        self._send(output.detach(), self._behind, self._forth)

    def take_gradient(self, output: Tensor) -> Tensor:
        """The gradient of an output that was given."""
        body = torch.empty(output.shape, dtype=output.dtype, device=self._wire)
        dist.recv(body, self._behind, group=self._back)
        return body.to(output.device)

    def give_gradient(self, gradient: Tensor) -> None:
        """Send the gradient of an input to the stage before."""
        self._send(gradient, self._before, self._back)

    def settle(self) -> None:
        """Wait until all that was sent has been taken."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _send(self, tensor: Tensor, to: int, group: Any) -> None:
        tensor = tensor.to(self._wire).contiguous()
        self._sent.append((dist.isend(tensor, to, group=group), tensor))
