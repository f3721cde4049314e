"""What the stages of a pipeline send each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from k8sjob.runtime.mesh import Mesh

__all__ = ["Form", "Neighbours", "form"]

Form: TypeAlias = "tuple[Any, ...]"
"""The shapes of what the whole model takes; all stages know it, as each has the whole batch."""

_DIMS: Final = 8
_LOSS_BYTES: Final = 8
_KINDS: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Neighbours:
    """The stages before and behind this one.

    Each direction has a group of its own: nccl works off the messages between two ranks in one
    order, and where one of them sends first and so does the other, both would wait for ever.
    The shape of an activation goes ahead of it when inputs of a form come for the first time.

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
        self._taken: dict[Form, tuple[torch.dtype, list[int]]] = {}
        self._given: dict[Form, list[int]] = {}

    def take_input(self, of: Form) -> Tensor:
        """What the stage before gave, as a leaf that gets a gradient where there are any.

        Args:
            of: the form of what went into the first stage.
        """
        if of not in self._taken:
            head = torch.zeros(_DIMS + 2, dtype=torch.int64, device=self._wire)
            dist.recv(head, self._before, group=self._forth)
            kind, ndim, *shape = head.tolist()
            self._taken[of] = _KINDS[kind], shape[:ndim]
        kind, shape = self._taken[of]
        body = torch.empty(shape, dtype=kind, device=self._wire)
        dist.recv(body, self._before, group=self._forth)
        return body.to(self.device).requires_grad_(torch.is_grad_enabled())

    def give_output(self, output: Any, of: Form) -> None:
        """Send an output to the stage behind.

        Args:
            output: one tensor.
            of: see take_input.

        Raises:
            ValueError: it is not one tensor, or has another shape than the one before had whose
                inputs were of this form.
        """
        if not isinstance(output, torch.Tensor) or output.dtype not in _KINDS:
            found = getattr(output, "dtype", type(output).__name__)
            raise ValueError(
                f"strategy.splits: a stage gives {found}, and only one tensor of floating numbers"
                " can go to the next one; split elsewhere"
            )
        shape = [*output.shape, *[0] * (_DIMS - output.ndim)]
        head = [_KINDS.index(output.dtype), output.ndim, *shape]
        if of not in self._given:
            self._given[of] = head
            self._send(torch.tensor(head), self._behind, self._forth)
        elif self._given[of] != head:
            raise ValueError(
                f"strategy.splits: a stage gives {_told(head)}, and gave"
                f" {_told(self._given[of])} for inputs of the same shapes: what goes from one"
                " stage to the next may not depend on the values; split elsewhere"
            )
        self._send(output.detach(), self._behind, self._forth)

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
        wire = gradient.contiguous().view(-1).view(torch.uint8)
        if loss is not None:
            wire = torch.cat([wire, loss.double().view(1).view(torch.uint8)])
        self._send(wire, self._before, self._back)

    def settle(self) -> None:
        """Wait until all that was sent has been taken."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _send(self, tensor: Tensor, to: int, group: Any) -> None:
        tensor = tensor.to(self._wire).contiguous()
        self._sent.append((dist.isend(tensor, to, group=group), tensor))


def form(inputs: Mapping[Any, Tensor]) -> Form:
    """The form of inputs, by name or number; an evaluation's is another than the training's."""
    shapes = ((name, value.dtype, *value.shape) for name, value in inputs.items())
    return (torch.is_grad_enabled(), *shapes)


def _told(head: list[int]) -> str:
    kind, ndim, *shape = head
    return f"{tuple(shape[:ndim])} of {str(_KINDS[kind]).removeprefix('torch.')}"
