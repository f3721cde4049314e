"""Parameter server: trainers have the model without its tables, whose columns are on servers.

What the trainers have is trained as data parallel: torch averages its gradients while it computes
them, or, where those of several batches are added up, all of them once before the step. Gradients
of the tables go to the servers, which apply them as they come: with several trainers the order
differs from run to run.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch.distributed.autograd as dist_autograd
from torch.nn.parallel import DistributedDataParallel

from k8sjob.runtime.checkpoint.format import gathered, on_host
from k8sjob.runtime.checkpoint.model_state import StageState
from k8sjob.runtime.comm.mesh import Mesh, broadcast_state
from k8sjob.runtime.strategies import embedding_tables
from k8sjob.runtime.strategies.api import Strategy, assemble
from k8sjob.runtime.strategies.embedding_tables import RemoteTables, choose
from k8sjob.runtime.strategies.step import (
    autocast,
    call,
    check_groups,
    mean_loss,
    synchronize,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from k8sjob.runtime.comm.process_group import Group
    from k8sjob.runtime.strategies.step import Loss, Options


def prepare(model: nn.Module, loss: Loss, group: Group, options: Options) -> Strategy:
    """The row of the table: DistributedDataParallel here, RemoteModules on the servers."""
    names = choose(model, options["tables"], options["servers"])
    # Before the tables leave the model: it keeps the names and numbers of all parameters.
    whole = StageState(model)
    remote = RemoteTables(model, names, options["servers"], group)
    # Now without the tables, which may be larger than the GPU.
    model.to(group.device)
    on_gpu = [group.device] if group.device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=on_gpu)
    steps = _Steps(model, remote, group)
    state, mesh = _State(remote, whole, group), Mesh(group)
    # torch averages the gradients in a batch's context, without those of earlier batches.
    added_up = options["accumulate"] > 1

    def backward(inputs: Any, targets: tuple[Any, ...], *, scale: float, sync: bool) -> Tensor:
        with group.waiting(), steps.context() as context:
            with (
                wrapped.no_sync() if added_up else nullcontext(),
                autocast(group.device, bf16=options["bf16"]),
            ):
                value = mean_loss(loss, call(wrapped, inputs), targets)
            # Gradients go into the context, not to the parameters, and to the servers that looked
            # up.
            dist_autograd.backward(context, [value * scale])  # type: ignore[attr-defined]  # from C++
            steps.take(context)
            if added_up and sync:
                synchronize(model, mesh)  # no table steps before all have looked theirs up
            steps.send(context, closes=sync)
        return value.detach()

    def settle() -> None:
        group.barrier()  # each trainer's last step is on the servers
        broadcast_state(model, group, only_buffers=True)

    return assemble(
        model,
        mesh,
        backward,
        bf16=options["bf16"],
        wrapped=wrapped,
        settle=settle,
        # The gradients of the tables are on the servers: there is no norm of all gradients in one
        # place.
        clip=lambda _optimizer, _largest: None,
        capture=state.capture,
        parts=None,
        restore=state.restore,
        ready=steps.prepare,
    )


class _Steps:
    """Gradients of a step: those of tables go to the servers, the others stay here.

    Servers step while the trainer's optimizer does; a batch's context is open until both are done.
    """

    def __init__(self, model: nn.Module, remote: RemoteTables, group: Group) -> None:
        self._model, self._remote, self._group = model, remote, group
        self._begun: list[Any] = []
        self._open = ExitStack()

    @contextmanager
    def context(self) -> Iterator[int]:
        """A context for a batch, as torch.distributed.autograd counts them."""
        with ExitStack() as stack:
            yield stack.enter_context(dist_autograd.context())
            if self._begun:
                # The servers still read this context's gradients; _finish() closes it after the
                # step.
                self._open = stack.pop_all()

    def _finish(self, *_hooked: Any) -> None:
        """Wait until the servers have stepped."""
        begun, self._begun = self._begun, []
        with self._group.waiting(), self._open:
            for answer in begun:
                answer.wait()

    def prepare(self, optimizer: Optimizer) -> None:
        """Make the servers' optimizers, which are like the trainers'."""
        check_groups(optimizer)
        self._optimizer, self._rates = optimizer, _rates(optimizer)
        # So the servers step while the trainer does, and nobody has to call anything at the end.
        optimizer.register_step_post_hook(self._finish)
        if self._group.rank == 0:
            pickled = {"defaults": optimizer.defaults, "param_groups": [self._rates]}
            self._remote.call(embedding_tables.make_optimizer, type(optimizer), pickled)
        self._group.barrier()

    def take(self, context: int) -> None:
        """Add what a batch's context has to the gradients of the parameters here."""
        gradients = dist_autograd.get_gradients(context)  # type: ignore[attr-defined]  # from C++
        for parameter in self._model.parameters():
            new = gradients.get(parameter)
            # The context's gradients are of this batch; earlier ones of the window are in .grad.
            if new is not None:
                parameter.grad = new if parameter.grad is None else parameter.grad + new

    def send(self, context: int, *, closes: bool) -> None:
        """Let the servers keep a batch's gradients, or begin their step at a window's end."""
        take = embedding_tables.take_gradients
        if not closes:
            self._remote.call(take, self._group.rank, context, False)  # noqa: FBT003 - of a call
            return
        rates = _rates(self._optimizer)
        # A schedule is the same on all trainers, so one of them tells the servers.
        if self._group.rank == 0 and rates != self._rates:
            self._remote.call(embedding_tables.set_rates, rates)
        self._rates = rates
        self._begun = self._remote.begin(take, self._group.rank, context, True)  # noqa: FBT003


def _rates(optimizer: Optimizer) -> dict[str, Any]:
    """The hyperparameters of an optimizer."""
    (group,) = optimizer.param_groups
    return {key: value for key, value in group.items() if key != "params"}


class _State:
    """The state of a model and its tables, as one process would have it."""

    def __init__(self, remote: RemoteTables, whole: StageState, group: Group) -> None:
        self._remote, self._whole, self._group = remote, whole, group

    def capture(self, optimizer: Optimizer) -> dict[str, Any]:
        """See Strategy.capture."""
        self._group.barrier()  # each trainer's last step is on the servers
        # Between the barriers no trainer steps, so the parts of all servers are of one step.
        state = self._joined(optimizer) if self._group.rank == 0 else {}
        self._group.barrier()
        return state

    def restore(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """See Strategy.restore; rank 0 gives the servers their parts."""
        state = {key: gathered(state[key]) for key in ("model", "optimizer")}
        self._whole.restore(optimizer, state)
        if self._group.rank == 0:
            stored = state["optimizer"]["state"]
            of_tables = {
                name: (state["model"][f"{name}.weight"], stored.get(self._number(name), {}))
                for name in self._remote.names
            }
            # The optimizer has the rates of the checkpoint here, and the servers had those of the
            # script.
            self._remote.call(embedding_tables.set_rates, _rates(optimizer))
            self._remote.take_state(of_tables)
        self._group.barrier()

    def _joined(self, optimizer: Optimizer) -> dict[str, Any]:
        dense = on_host(self._whole.parts(optimizer))
        weights, state = dense["model"], dense["optimizer"]["state"]
        for name, (weight, moments) in self._remote.state().items():
            weights[f"{name}.weight"] = weight
            if moments:
                state[self._number(name)] = moments
        return {
            "model": {name: weights[name] for name in self._whole.keys},
            "optimizer": {**dense["optimizer"], "state": dict(sorted(state.items()))},
        }

    def _number(self, table: str) -> int:
        """The number that a table's weight has in the whole model."""
        return self._whole.parameters.index(f"{table}.weight")
