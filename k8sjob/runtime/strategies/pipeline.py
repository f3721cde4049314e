"""Strategies that cut a model into stages: pipeline (one per rank), model_split (one per GPU).

The model is an nn.Sequential, nested ones included. A stage is the same model with the layers of
other stages gone: what is left keeps its name, and so do checkpoints.

In a pipeline each batch is cut into micro-batches: while one stage works on one, the others work on
those before and behind it. Activations go forward and gradients back between adjacent stages.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from k8sjob.runtime.checkpoint.model_state import StageState
from k8sjob.runtime.comm.mesh import Mesh, broadcast_state
from k8sjob.runtime.data import move
from k8sjob.runtime.strategies.api import Strategy, assemble
from k8sjob.runtime.strategies.blocks import prepare_layers, tied
from k8sjob.runtime.strategies.step import (
    autocast,
    call,
    check_groups,
    clip_gradients,
    forward,
    mean_loss,
    replicate,
    synchronize,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from k8sjob.runtime.comm.process_group import Group
    from k8sjob.runtime.strategies.step import Loss, Options

_EVALUATION: Final = -1
"""Instead of a micro-batch's number."""


def prepare(model: nn.Module, loss: Loss, group: Group, options: Options) -> Strategy:
    """The row of the table: stages along model, averaged gradients along data."""
    stages = cut(model, options["splits"])
    mesh, bf16 = Mesh(group, len(stages)), options["bf16"]
    stage, last = mesh.model_rank, mesh.model_rank == len(stages) - 1
    broadcast_state(model, group)
    whole = StageState(model)
    prepare_layers(model, options)
    keep_stage(model, stages[stage])
    links = StageLinks(mesh)
    gpipe = options["schedule"] == "gpipe"

    def computed(inputs: Any, targets: tuple[Any, ...]) -> Any:
        """The loss on the last stage, else what the next one takes."""
        with autocast(group.device, bf16=bf16):
            output = call(model, inputs)
            return mean_loss(loss, output, targets) if last else output

    def backward(inputs: Any, targets: tuple[Any, ...], *, scale: float, sync: bool) -> Tensor:
        with group.waiting():
            batch = micro_batches(inputs, targets, options["micro_batches"])
            # 1F1B: a stage computes as many micro-batches ahead as there are stages behind it, and
            # the activations of each take memory.
            ahead = len(batch) if gpipe else len(stages) - stage - 1
            order = list(schedule(ahead, len(batch)))
            value = _run(order, computed, links, batch, scale=scale)
            if sync:
                synchronize(model, mesh)
        return value

    def evaluated(inputs: Any) -> Any:
        if not links.first:
            inputs = links.take_input(_EVALUATION)
        output = forward(model, inputs, bf16=bf16)
        if not last:
            links.give_output(output, _EVALUATION)
            links.settle()
        return output if last else None

    return assemble(
        model,
        mesh,
        backward,
        forward=evaluated,
        settle=partial(_equalise_buffers, model, mesh),
        clip=partial(clip_gradients, ranks=mesh.process_group("model"), sharded=True),
        capture=partial(whole.capture, mesh),
        parts=whole.parts,
        sharded=True,  # a pipeline has two stages at least
        restore=whole.restore,
        ready=check_groups,
        counts=last,
        # Stages draw for different layers, so each rank has random numbers of its own.
        rng_stream=group.rank,
    )


def _equalise_buffers(model: nn.Module, mesh: Mesh) -> None:
    """The buffers of the first copy of this stage, for all of them."""
    ranks = mesh.process_group("data")
    if ranks is not None:
        for buffer in model.buffers():
            # The ranks of the first copy are 0 to stages - 1, so the stage's number is a rank.
            dist.broadcast(buffer, src=mesh.model_rank, group=ranks)


# --- the stages of a chain of layers --------------------------------------------------------------


def cut(model: nn.Module, splits: Sequence[str]) -> list[list[str]]:
    """The names of the layers of each stage.

    `splits` are the names of the layers that begin a new stage, in the chain's order.

    Raises:
        ValueError: the model is no chain, a split is no layer of it or out of order, or a
            parameter would be in two stages.
    """
    if not isinstance(model, nn.Sequential):
        raise ValueError(  # noqa: TRY004 - a model that a setting does not fit
            f"strategy.splits: {type(model).__name__} is not a chain of layers, so it cannot be"
            " split; make it an nn.Sequential of its parts"
        )
    links = list(_links(model))
    for split in splits:
        if split not in links:
            raise ValueError(
                f"strategy.splits: {split!r} is not a layer of the chain; valid layers:"
                f" {', '.join(links)}"
            )
    begins = [0, *(links.index(split) for split in splits), len(links)]
    for before, after in pairwise(begins):
        if after <= before:
            raise ValueError(
                f"strategy.splits: {', '.join(splits)} leave a stage without layers; name them in"
                f" the chain's order, which is {', '.join(links)}, without the first and without"
                " duplicates"
            )
    stages = [links[before:after] for before, after in pairwise(begins)]
    _check_stages(model, stages)
    return stages


def keep_stage(model: nn.Module, layers: Sequence[str]) -> None:
    """Replace all layers of a chain but these by nn.Identity."""
    for name in list(_links(model)):
        if name not in layers:
            owner, _, last = name.rpartition(".")
            # An nn.Identity instead of nothing: the layers behind it keep their numbers, which are
            # names.
            setattr(model.get_submodule(owner), last, nn.Identity())


def _links(model: nn.Module) -> Iterator[str]:
    """All layers by name; one that is used in several places has several names."""
    chains = {""}
    for name, module in model.named_modules(remove_duplicate=False):
        if name and name.rpartition(".")[0] in chains:
            if isinstance(module, nn.Sequential):
                chains.add(name)
            else:
                yield name


def _check_stages(model: nn.Module, cut: list[list[str]]) -> None:
    for number, layers in enumerate(cut):
        modules = [model.get_submodule(layer) for layer in layers]
        if not any(item.requires_grad for module in modules for item in module.parameters()):
            raise ValueError(
                f"strategy.splits: stage {number} ({', '.join(layers)}) has nothing to train;"
                " choose other splits"
            )
    for names in tied(model):
        _check_together(names, "parameter", cut)
    # Also layers without parameters that have buffers, as a batch normalization without affine.
    for names in _shared_layers(model):
        _check_together(names, "layer", cut)


def _check_together(names: Sequence[str], noun: str, cut: list[list[str]]) -> None:
    """Refuse what has several names, in several stages."""
    owners = {
        number
        for number, layers in enumerate(cut)
        for layer in layers
        if any(f"{name}.".startswith(f"{layer}.") or layer.startswith(f"{name}.") for name in names)
    }
    if len(owners) > 1:
        raise ValueError(
            f"strategy.splits: {' and '.join(names)} are one {noun}, in stages"
            f" {', '.join(map(str, sorted(owners)))}; split so that they share a stage"
        )


def _shared_layers(model: nn.Module) -> list[list[str]]:
    """The names of each layer that has several, and a state or layers of its own."""
    names: defaultdict[nn.Module, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        names[module].append(name)
    return [
        paths
        for module, paths in names.items()
        if len(paths) > 1 and (isinstance(module, nn.Sequential) or module.state_dict())
    ]


# --- a step ---------------------------------------------------------------------------------------


def schedule(ahead: int, micro_batches: int) -> Iterator[tuple[str, int]]:
    """The passes of a stage: ("forward" or "backward", micro-batch).

    `ahead` forward passes come first. With all of them (GPipe) the backward passes follow; with as
    many as stages are behind (1F1B) each gradient is used as it comes, and few batches are kept.
    """
    ahead = min(ahead, micro_batches)
    yield from (("forward", number) for number in range(ahead))
    for number in range(ahead, micro_batches):
        yield "forward", number
        yield "backward", number - ahead
    yield from (("backward", number) for number in range(micro_batches - ahead, micro_batches))


def micro_batches(
    inputs: Any, targets: tuple[Any, ...], most: int
) -> list[tuple[Any, tuple[Any, ...]]]:
    """(inputs, targets) of each micro-batch; sizes differ by one at most."""
    inputs = dict(inputs) if isinstance(inputs, dict) else inputs  # a subclass would be a leaf
    leaves, nest = pytree.tree_flatten((inputs, targets))
    # A short last batch has fewer micro-batches; none may be empty.
    parts = min(most, leaves[0].shape[0])
    columns = zip(*(torch.tensor_split(leaf, parts) for leaf in leaves), strict=True)
    return [pytree.tree_unflatten(list(column), nest) for column in columns]


def _run(
    order: Sequence[tuple[str, int]],
    computed: Callable[[Any, tuple[Any, ...]], Any],
    links: StageLinks,
    batch: Sequence[tuple[Any, tuple[Any, ...]]],
    *,
    scale: float,
) -> Tensor:
    """This stage's part of a step; returns the mean loss."""
    losses: list[Tensor] = []
    loss = None
    sizes = [pytree.tree_leaves(inputs)[0].shape[0] for inputs, _ in batch]
    pending: dict[int, tuple[Any, Tensor]] = {}
    for action, number in order:
        if action == "forward":
            inputs, targets = batch[number]
            if not links.first:
                inputs = links.take_input(number)
            output = computed(inputs, targets)
            if links.last:
                # The loss is a mean: micro-batches of unequal sizes count by their samples.
                part = sizes[number] / sum(sizes)
                losses.append(output.detach().to(links.device, torch.float64) * part)
                output = output * (part * scale)
            else:
                links.give_output(output, number)
            # These hold the activations until the backward pass of this micro-batch.
            pending[number] = inputs, output
        else:
            inputs, output = pending.pop(number)
            closes, gradient = (action, number) == order[-1], None
            if not links.last:
                gradient, loss = links.take_gradient(output, last=closes)
            elif closes:
                loss = torch.stack(losses).sum()
            # A backward of its own, since no loss is in this process but on the last stage.
            torch.autograd.backward(output, gradient)
            if not links.first:
                links.give_gradient(inputs.grad, loss)
    links.settle()
    return cast("Tensor", loss)


_DIMS: Final = 8
_LOSS_BYTES: Final = 8
# Both sides begin by expecting a float32 of the shape (0,), so that the first message is the mark
# alone.
_NOTHING: Final = [0, 1, *[0] * _DIMS]
"""The head of an activation: its type by number, its dimensions, and their sizes."""
_KINDS: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class StageLinks:
    """Messages to and from the stages before and behind this one.

    Each direction has a separate group: nccl handles the messages between two ranks in one order,
    and if both of them send first, both wait forever. An activation is one message, since both
    sides expect the type and shape of the last one in its place. A byte behind it says whether
    they hold; otherwise the right ones follow.

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
        self._forth, self._back = mesh.new_group(), mesh.new_group()
        # nccl sends from GPUs only, gloo from host memory only.
        self._wire = mesh.group.device if mesh.group.backend == "nccl" else torch.device("cpu")
        # With their tensors: an isend reads the memory after it has returned.
        self._sent: list[tuple[Any, Tensor]] = []
        # place -> the head of the last activation there, on the side that takes and on that which
        # gives; both change at the same messages, so they agree.
        self._taken: dict[int, list[int]] = {}
        self._given: dict[int, list[int]] = {}

    def take_input(self, place: int) -> Tensor:
        """The output of the stage before, as a leaf; those of a `place` usually have one shape."""
        body, mark = self._take_bytes(self._taken.get(place, _NOTHING), marked=True)
        # It has another type or shape: its head and its body follow, and are expected from now on.
        if mark:
            head = torch.empty(len(_NOTHING), dtype=torch.int64, device=self._wire)
            dist.recv(head, self._before, group=self._forth)
            self._taken[place] = head.tolist()
            body, _ = self._take_bytes(self._taken[place], marked=False)
        # A leaf, so that its gradient can be read and sent back.
        return body.to(self.device).requires_grad_(torch.is_grad_enabled())

    def _take_bytes(self, head: list[int], *, marked: bool) -> tuple[Tensor, bool]:
        """A tensor of this type and shape from the stage before, and its mark."""
        kind, shape, size = _read(head)
        wire = torch.empty(size + marked, dtype=torch.uint8, device=self._wire)
        dist.recv(wire, self._before, group=self._forth)
        return wire[:size].view(kind).view(shape), bool(marked and wire[size])

    def give_output(self, output: Any, place: int) -> None:
        """Send an output to the next stage; `place` as in take_input."""
        if not isinstance(output, torch.Tensor) or output.dtype not in _KINDS:
            kind = getattr(output, "dtype", type(output).__name__)
            raise ValueError(
                f"strategy.splits: a stage returns {kind}, and only one floating-point tensor"
                " can go to the next one; choose other splits"
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
        # As long as the other side expects, with a mark of 1; the bytes before the mark mean
        # nothing.
        self._send(torch.ones(size + 1, dtype=torch.uint8), self._behind, self._forth)
        self._send(torch.tensor(head), self._behind, self._forth)
        self._send(body, self._behind, self._forth)

    def take_gradient(self, output: Tensor, *, last: bool) -> tuple[Tensor, Tensor | None]:
        """The gradient of an output that was given; with the last of a step, the loss too."""
        size = output.numel() * output.element_size()
        wire = torch.empty(size + last * _LOSS_BYTES, dtype=torch.uint8, device=self._wire)
        dist.recv(wire, self._behind, group=self._back)
        body = wire[:size].view(output.dtype).view(output.shape)
        # Cloned: a view as float64 must begin at a multiple of 8 bytes, which the end of a gradient
        # need not be.
        loss = wire[size:].clone().view(torch.float64)[0].to(self.device) if last else None
        return body.to(output.device), loss

    def give_gradient(self, gradient: Tensor, loss: Tensor | None) -> None:
        """Send the gradient of an input to the stage before.

        The step's last one carries the loss: a message of its own would make the stages wait.
        """
        wire = _bytes(gradient)
        if loss is not None:
            wire = torch.cat([wire, _bytes(loss.to(wire.device, torch.float64))])
        self._send(wire, self._before, self._back)

    def settle(self) -> None:
        """Wait until all that was sent has been received."""
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


def prepare_model_split(model: nn.Module, loss: Loss, group: Group, options: Options) -> Strategy:
    """Stages on the GPUs of this single process; only one of them computes at a time.

    The plain way to train a model that no single GPU can hold. On a CPU all layers stay there.
    """
    stages = cut(model, options["splits"])
    prepare_layers(model, options)
    places = devices(group.device, len(stages), torch.cuda.device_count())
    # Layers of a stage follow each other, so its first one alone moves what comes in.
    for layers, place in zip(stages, places, strict=True):
        for name in layers:
            model.get_submodule(name).to(place)
        model.get_submodule(layers[0]).register_forward_pre_hook(partial(_moved, place))
    # The output goes back to where targets are, and where it is measured.
    model.register_forward_hook(partial(_moved, group.device))
    wrapped, backward = replicate(model, loss, group, bf16=options["bf16"])
    return assemble(model, Mesh(group), backward, bf16=options["bf16"], wrapped=wrapped)


def devices(first: torch.device, stages: int, gpus: int) -> list[torch.device]:
    """The device of each stage; where there are fewer GPUs, adjacent stages share one."""
    if first.type != "cuda":
        return [first] * stages
    used = min(stages, gpus)
    return [torch.device("cuda", stage * used // stages) for stage in range(stages)]


def _moved(place: torch.device, *hooked: Any) -> Any:
    """What a hook gets last: inputs before a forward pass, the output after it."""
    return move(hooked[-1], place)
