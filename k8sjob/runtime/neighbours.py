"""What the stages of a pipeline send each other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor

    from k8sjob.runtime.mesh import Mesh

__all__ = ["Neighbours"]

_DIMS: Final = 8
_LOSS_BYTES: Final = 8
_NOTHING: Final = [0, 1, *[0] * _DIMS]
"""The head of an activation: its type by number, its dimensions, and their sizes."""
_KINDS: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Neighbours:
    """The stages before and behind this one.

    Each direction has a group of its own: nccl works off the messages between two ranks in one
    order, and where one of them sends first and so does the other, both would wait for ever.
    An activation goes in one message, since both sides expect the type and shape of the one before
    in its place. A byte behind it tells whether that holds; else what is right follows.

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
        self._taken: dict[int, list[int]] = {}
        self._given: dict[int, list[int]] = {}

    def take_input(self, place: int) -> Tensor:
        """What the stage before gave, as a leaf that gets a gradient where there are any.

        Args:
            place: a number that both stages give it; those of one place mostly have one shape.
        """
        body, mark = self._take_bytes(self._taken.get(place, _NOTHING), marked=True)
        if mark:
            head = torch.empty(len(_NOTHING), dtype=torch.int64, device=self._wire)
            dist.recv(head, self._before, group=self._forth)
            self._taken[place] = head.tolist()
            body, _ = self._take_bytes(self._taken[place], marked=False)
        return body.to(self.device).requires_grad_(torch.is_grad_enabled())

    def _take_bytes(self, head: list[int], *, marked: bool) -> tuple[Tensor, bool]:
        """A tensor of this type and shape from the stage before, and its mark."""
        kind, shape, size = _read(head)
        wire = torch.empty(size + marked, dtype=torch.uint8, device=self._wire)
        dist.recv(wire, self._before, group=self._forth)
        return wire[:size].view(kind).view(shape), bool(marked and wire[size])

    def give_output(self, output: Any, place: int) -> None:
        """Send an output to the stage behind.

        Args:
            output: one tensor of floating numbers.
            place: see take_input.

        Raises:
            ValueError: it is not one tensor, or not of floating numbers.
        """
        if not isinstance(output, torch.Tensor) or output.dtype not in _KINDS:
            found = getattr(output, "dtype", type(output).__name__)
            raise ValueError(
                f"strategy.splits: a stage gives {found}, and only one tensor of floating numbers"
                " can go to the next one; split elsewhere"
            )
        dims = [*output.shape, *[0] * (_DIMS - output.ndim)]
        head = [_KINDS.index(output.dtype), output.ndim, *dims]
        body, expected = _bytes(output.detach()), self._given.get(place, _NOTHING)
        if head == expected:
            mark = torch.zeros(1, dtype=torch.uint8, device=body.device)
            self._send(torch.cat([body, mark]), self._behind, self._forth)
            return
        self._given[place] = head
        *_, size = _read(expected)
        self._send(torch.ones(size + 1, dtype=torch.uint8), self._behind, self._forth)
        self._send(torch.tensor(head), self._behind, self._forth)
        self._send(body, self._behind, self._forth)

    def take_gradient(self, output: Tensor, *, last: bool) -> tuple[Tensor, Tensor | None]:
        """The gradient of an output that was given; of a step's last one the loss, too."""
        size = output.numel() * output.element_size()
        wire = torch.empty(size + last * _LOSS_BYTES, dtype=torch.uint8, device=self._wire)
        dist.recv(wire, self._behind, group=self._back)
        body = wire[:size].view(output.dtype).view(output.shape)
        loss = wire[size:].clone().view(torch.float64)[0].to(self.device) if last else None
        return body.to(output.device), loss

    def give_gradient(self, gradient: Tensor, loss: Tensor | None) -> None:
        """Send the gradient of an input to the stage before.

        Args:
            gradient: of the loss.
            loss: of the whole step, with its last gradient. It has no message of its own, for
                which the stages would wait at the end of each step.
        """
        wire = _bytes(gradient)
        if loss is not None:
            wire = torch.cat([wire, _bytes(loss.to(wire.device, torch.float64))])
        self._send(wire, self._before, self._back)

    def settle(self) -> None:
        """Wait until all that was sent has been taken."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _send(self, tensor: Tensor, to: int, group: Any) -> None:
        tensor = tensor.to(self._wire).contiguous()
        self._sent.append((dist.isend(tensor, to, group=group), tensor))


def _read(head: list[int]) -> tuple[torch.dtype, list[int], int]:
    """(type, shape, bytes) of an activation."""
    number, ndim, *dims = head
    kind, shape = _KINDS[number], dims[:ndim]
    return kind, shape, math.prod(shape) * kind.itemsize


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
