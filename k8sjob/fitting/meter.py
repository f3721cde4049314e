"""Memory of a training step, for `k8sjob fit`: what one process allocates, by kind.

`python -P -m k8sjob.fitting.meter` is a rank, and measures itself.
"""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as modules
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers
from torch.utils import _pytree as pytree
from torch.utils import data
from torch.utils._python_dispatch import TorchDispatchMode

from k8sjob.forking.script import StopScript, run_rank, run_to_end, without_gpus, wrap
from k8sjob.runtime.base.env import dist_env
from k8sjob.runtime.data import ShardSampler
from k8sjob.runtime.strategies.blocks import find_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_STEPS: Final = 3
"""Optimizer steps; the first makes the optimizer's state."""


def measure(request: dict[str, Any], script: Callable[[], Any]) -> int:
    """Run a script for three optimizer steps, write what a rank has as JSON; the exit code.

    Args:
        request: see run_rank; its options: scale (factor for batch sizes), foreach (optimizers
            compute with lists of tensors, as on GPUs), blocks (patterns, see find_blocks).
        script: runs it.
    """
    meter = Meter(request["options"])
    with meter:
        # Whatever happens a file is written: without one, the run is reported as too slow.
        code, end = run_to_end(script)
    error = {"error": "{where}: {type}: {message}".format(**end)} if code else {}
    file = Path(request["folder"], f"memory-{dist_env().rank}.json")
    file.write_text(json.dumps({**error, **meter.found}))
    return code


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it so
    """Bytes of the storages that training steps make, while they live.

    A step is from the first forward pass with gradients to the optimizer's step. What exists
    before, as a data set in memory, does not count, but parameters, buffers and the batch do.

    Attributes:
        found: bytes by kind, after the last step; empty before one.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it so
        self.found: dict[str, Any] = {}
        self._options = options
        self._roots: list[nn.Module] = []
        self._hooked = weakref.WeakSet[Tensor]()
        self._optimizers: list[optimizers.Optimizer] = []
        self._live: dict[int, int] = {}
        self._gradients: dict[int, int] = {}
        self._log: list[_Change] = []
        self._backward: list[_Change] = []
        self._depth, self._steps, self._batch = 0, 0, 0
        self._active = False
        self._inputs = self._read = 0
        self._peak = {"all": 0, "rest": 0, "step": 0}
        self._install()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute, and count the storages of the result that are new."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it computes with its parts, and these come here, too
        # A view, or an operation in place, returns a storage that came in.
        existing = {id(s) for s in _storages((args, kwargs))} if self._active else set()
        result = func(*args, **(kwargs or {}))
        if self._active:
            for storage in _storages(result):
                if id(storage) not in existing and id(storage) not in self._live:
                    self._live[id(storage)] = storage.nbytes()
                    self._log.append(_Change(id(storage), storage.nbytes()))
                    # The storage object lives as long as the memory that torch has for it.
                    weakref.finalize(storage, self._free, id(storage)).atexit = False
            self._look()
        return result

    def _free(self, key: int) -> None:
        self._log.append(_Change(key, -self._live.pop(key, 0)))
        # zero_grad() frees gradients before the next step.
        self._gradients.pop(key, None)

    def _look(self) -> None:
        total, gradients = sum(self._live.values()), sum(self._gradients.values())
        kind = "step" if self._stepping else "rest"
        self._peak[kind] = max(self._peak[kind], total - gradients)
        if not self._stepping:
            self._peak["all"] = max(self._peak["all"], total)

    _stepping = False

    # --- hooks

    def _install(self) -> None:
        modules.register_module_forward_pre_hook(self._before_forward)
        modules.register_module_forward_hook(self._after_forward, always_call=True)
        optimizers.register_optimizer_step_pre_hook(self._before_step)
        optimizers.register_optimizer_step_post_hook(self._after_step)
        scale = self._options["scale"]

        # A DataLoader takes batch_size second or by name, a ShardSampler only by name.
        def larger(original: Any, loader: Any, *args: Any, **options: Any) -> None:
            if scale != 1 and type(options.get("batch_size")) is int:
                options["batch_size"] *= scale
            elif scale != 1 and len(args) > 1 and type(args[1]) is int:
                args = (args[0], args[1] * scale, *args[2:])
            original(loader, *args, **options)

        def batches(original: Any, loader: Any) -> Any:
            for batch in original(loader):
                # The batch itself: the model may get only a part of it.
                self._read = sum(_bytes(pytree.tree_leaves(batch)))
                yield batch

        def bypass(_original: Any, model: Any, *args: Any, **options: Any) -> Any:
            return model.module(*args, **options)

        wrap(data.DataLoader, "__init__", larger)
        wrap(data.DataLoader, "__iter__", batches)
        wrap(ShardSampler, "__init__", larger)
        wrap(DistributedDataParallel, "forward", bypass)  # its buckets are computed
        without_gpus()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self._depth += 1
        # Only the outermost call of a model in training begins a step.
        if self._depth > 1 or not torch.is_grad_enabled() or not module.training:
            return
        if not any(True for _ in module.parameters()):
            return
        if module not in self._roots:
            self._roots.append(module)
            for parameter in module.parameters():
                # Two models may share a parameter, which is to be counted once.
                if parameter.requires_grad and parameter not in self._hooked:
                    self._hooked.add(parameter)
                    parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]  # as above
        tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
        if not self._active:
            self._inputs = max(sum(_bytes(tensors)), self._read)
            self._batch = max(self._batch, next((len(t) for t in tensors if t.dim()), 1))
            # What happened since the last step, such as an evaluation, is none of this one.
            self._log.clear()
        self._active = True

    def _after_forward(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._depth -= 1

    def _accumulated(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._log.append(_Change(id(parameter.grad.untyped_storage()), 0, parameter))
            for storage in _storages(parameter.grad):
                if id(storage) in self._live:
                    self._gradients[id(storage)] = storage.nbytes()

    def _before_step(self, optimizer: optimizers.Optimizer, *_: Any) -> None:
        if not self._stepping:
            self._backward, self._log = self._log, []
        self._stepping = True
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        for group in optimizer.param_groups if self._options["foreach"] else ():
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                # On GPUs optimizers do so by themselves, and make temporary lists as large as the
                # model.
                group["foreach"] = True

    def _after_step(self, optimizer: optimizers.Optimizer, *_: Any) -> None:
        self._stepping, self._steps = False, self._steps + 1
        if not self._roots:
            return
        state = {id(s): s.nbytes() for o in self._optimizers for s in _storages(o.state)}
        if self._steps == 1:  # the state is made in this step, and counts as such
            self._peak["step"] = max(self._peak["step"] - sum(state.values()), 0)
        self._write(optimizer, sum(state.values()))
        # From here on the optimizer's state has a count of its own, outside of the activations.
        for key in state:
            self._live.pop(key, None)
        self._active = False
        # GANs have two optimizers, each of which steps.
        if self._steps >= _STEPS * len(self._optimizers):
            raise StopScript
        self._peak = dict.fromkeys(self._peak, 0)

    def _write(self, optimizer: optimizers.Optimizer, state: int) -> None:
        owned = [p for o in self._optimizers for g in o.param_groups for p in g["params"]]
        parameters = {id(p): p for p in [*(p for m in self._roots for p in m.parameters()), *owned]}
        buffers = {id(b): b for m in self._roots for b in m.buffers()}
        trained = [p for p in parameters.values() if p.requires_grad]
        model = max(self._roots, key=lambda m: sum(_bytes(m.parameters())))
        model = model.module if isinstance(model, DistributedDataParallel) else model
        try:
            blocks = list(find_blocks(model, self._options["blocks"]).values())
        except ValueError:
            # Blocks that do not fit are an error of fsdp; for ddp the estimate holds.
            blocks = []
        self.found = {
            "batch": self._batch,
            "optimizer_class": type(optimizer).__name__,
            "parameters": sum(_bytes(parameters.values())),
            "buffers": sum(_bytes(buffers.values())),
            "gradients": sum(_bytes(trained)),
            "optimizer": state,
            "inputs": self._inputs,
            # The most of all steps: batches may have several lengths.
            "activations": max(self._peak["rest"], self.found.get("activations", 0)),
            "retained": max(self._peak["all"], self.found.get("retained", 0)),
            "step": self._peak["step"],
            "blocks": _phases(self._backward, model, blocks),
            "copies": any(
                isinstance(m, DistributedDataParallel) and not m.gradient_as_bucket_view
                for m in self._roots
            ),
        }


class _Change(NamedTuple):
    """A storage that is made (bytes > 0) or freed, or is the gradient of a parameter."""

    key: int
    bytes: int
    parameter: Tensor | None = None


def _phases(log: list[_Change], model: nn.Module, blocks: list[nn.Module]) -> list[list[int]]:
    """Bytes of each block in the order of the backward pass, and last of what is in no block.

    Parameters, gradients, the most activations since the block before, and the gradients of
    parameters in no block that are there by then.
    """
    owner = {id(p): index for index, block in enumerate(blocks) for p in block.parameters()}
    missing = [{id(p) for p in block.parameters() if p.requires_grad} for block in blocks]
    outside = {id(p): p for p in model.parameters() if id(p) not in owner}
    gradients, live, outside_ready = _gradients(log), dict[int, int](), set[int]()
    now = most = 0
    phases = []

    def add(parameters: Iterable[Tensor]) -> None:
        each = list(parameters)
        trained = sum(_bytes(p for p in each if p.requires_grad))
        ready = sum(_bytes(outside[key] for key in outside_ready))
        phases.append([sum(_bytes(each)), trained, most, ready])

    for index, change in enumerate(log):
        # Storages that become gradients are counted by their parameters, not as activations.
        if change.parameter is None and index not in gradients:
            now += change.bytes if change.bytes > 0 else -live.pop(change.key, 0)
            if change.bytes > 0:
                live[change.key] = change.bytes
            most = max(most, now)
        elif (key := id(change.parameter)) in outside:
            outside_ready.add(key)
        elif key in owner and key in missing[block := owner[key]]:
            missing[block].discard(key)
            if not missing[block]:
                add(blocks[block].parameters())
                most = now
    add(outside.values())
    return phases


def _gradients(log: list[_Change]) -> set[int]:
    """Where storages are made that become gradients: they count as such from their beginning."""
    becomes, positions = set[int](), set[int]()
    # Backward in time: first the gradient is known, and before it the storage that it becomes. An
    # id may come again after its storage is freed, so a match is used once.
    for index, change in reversed(list(enumerate(log))):
        if change.parameter is not None:
            becomes.add(change.key)
        elif change.bytes > 0 and change.key in becomes:
            becomes.discard(change.key)
            positions.add(index)
    return positions


def _storages(values: Any) -> list[torch.UntypedStorage]:
    if isinstance(values, Tensor):
        return [values.untyped_storage()]
    leaves = pytree.tree_map(
        _local, pytree.tree_leaves(dict(values) if isinstance(values, dict) else values)
    )
    return [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor)]


def _bytes(tensors: Iterable[Any]) -> list[int]:
    return [t.numel() * t.element_size() for t in map(_local, tensors) if isinstance(t, Tensor)]


def _local(value: Any) -> Any:
    """This rank's part of a DTensor; anything else as it is."""
    return value.to_local() if hasattr(value, "to_local") else value


if __name__ == "__main__":
    run_rank(measure)
