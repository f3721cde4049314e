"""The record of one process: its batches, losses, gradients, weights, evaluations and files.

Everything is seen through torch's hooks and functions of torch that are wrapped before the script
starts; the script is not changed. In a reference run of one process the recorded batches and random
numbers of all ranks are given to the script, joined.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils import data

from k8sjob.forking.script import StopScript, run_to_end
from k8sjob.proving.recording import loaders
from k8sjob.proving.recording.replay import Replay
from k8sjob.proving.recording.sketch import digest, digests, join_draws, size_of, sketch
from k8sjob.runtime.comm import rng

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MAX_SAVED: Final = 1 << 30
"""Bytes of batches that are kept for the reference run."""
_MAX_FILES: Final = 1 << 29
"""Bytes of the working folder that are kept for a restart."""
_INPUTS: Final = 100
"""Steps whose input is looked at where it comes from no DataLoader."""
_AHEAD: Final = 32
"""Batches that a loop reads before it trains on the first of them."""
_MAX_TEXT: Final = 200_000
_OPTIONS: Final = ("weight_decay", "momentum", "dampening", "betas", "alpha", "eps")
_PLAIN: Final = (int, float, tuple, list)
LEAVE: Final = signal.SIGRTMAX
"""Tells a process of a node that what it has started is started by another one."""


class Fetched(NamedTuple):
    """A batch that a worker of a loader sends, with the random numbers it has drawn for it."""

    batch: Any
    drawn: list[tuple[int, ...]]


class _LoadedBatch(NamedTuple):
    """A batch that the script was given: its loader, pass and index, and its samples."""

    key: tuple[int, int, int]
    batch: Any
    size: int
    digests: list[int] | None

    @property
    def name(self) -> str:
        """The part of file names that stands for it."""
        return "-".join(map(str, self.key))


def _nothing() -> dict[str, Any]:
    """What led to a step of an optimizer: nothing yet.

    The sizes and samples (digests) of batches; the samples of the first forward pass that come
    from no DataLoader (inputs); random numbers in forward (draws), and those of Python and numpy
    (host: source, states before and after); limits of gradients (clips); modules in training mode,
    for each backward pass; half precision (autocast); the script has called all_reduce after the
    last backward pass (reduced); one process drew what each rank had for itself (alone).
    """
    lists = ("losses", "sizes", "samples", "inputs", "draws", "host", "clips", "training")
    flags = ("autocast", "reduced", "alone")
    return {**{name: [] for name in lists}, **dict.fromkeys(flags, False)}


class Recorder:
    """The recorder of this process's actions, as lines of JSON.

    Attributes:
        rank: among all ranks.
        since: what led to the next step.
        sends_draws: this process is a worker of torch's loader, which expects a Fetched of it.
        generators: of numpy that the script has made, the last ones.
        schedules: of learning rates that the script has made.
        replay: the run whose batches this process is given; None if it loads its own.
        fetching: the data set computes; its random numbers are not the model's.
        depth: modules whose forward runs.
        rounds: a module computes in half precision.
        differentiating: a backward pass runs.
        child: the number of this process among those that the script has started; 0: it runs it.
    """

    def __init__(self, folder: Path, rank: int, options: dict[str, Any]) -> None:
        """A record that begins.

        Args:
            folder: of this run.
            rank: of this process.
            options: steps (the most), seconds (of training), replay (folder of another run),
                parts (its ranks), joined (give their batches joined, not one after another), save
                (keep batches for such a run), snapshot (folders of which to keep the new files),
                root (the folder that has all files of the run), local_rank.
        """
        self.folder, self.rank, self.options = folder, rank, options
        self._open()
        self.replay = None
        if "replay" in options:
            folder, joined = Path(options["replay"]), options.get("joined", True)
            self.replay = Replay(folder, options["parts"], joined=joined)
        self.fetching, self.depth, self.child = False, 0, 0
        self.steps, self._begun = 0, 0.0
        self._limit: int = options["steps"]
        self._passes: dict[int, int] = {}
        self.since, self._since_last = _nothing(), _nothing()
        self._current: _LoadedBatch | None = None
        self._trained = False
        self._pending: dict[tuple[int, int], deque[_LoadedBatch]] = {}
        self._saved, self._text = 0, 0
        self._roots: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._buffers: dict[str, tuple[nn.Module, str]] = {}
        self._local: dict[int, list[float]] = {}
        self._optimizers: dict[int, int] = {}
        self._stepping: list[int] = []
        self._stepped: list[Tensor] = []
        self._draws: list[Tensor] = []
        self._drawn, self._rank_draws = 0, list[list[Tensor]]()
        self._mode: tuple[bool, bool] | None = None
        self.rounds, self._training = False, 0
        self._differentiated: Tensor | None = None
        self.sends_draws, self.schedules = False, list[Any]()
        self.generators = deque[Any](maxlen=8)  # they cannot be referenced weakly
        self.differentiating, self._sampled, self._host = False, self._states(), self._states()
        self._backwards = self._stepped_at = 0
        self._unsaved, self._ended, self._started = False, False, time.time()

    def _open(self) -> None:
        # A line at a time: a rank may be killed, and the parent watches how the file grows.
        self._file = (self.folder / f"trace-{self.rank}.jsonl").open("a", buffering=1)
        self._pid = os.getpid()

    @property
    def active(self) -> bool:
        """Whether this process is a rank, not a worker that it has forked."""
        return os.getpid() == self._pid

    def join(self, rank: int, world_size: int) -> None:
        """This process, which the script has started, is a rank from here on.

        It ends instead where another one stands for it: in a reference run rank 0 for all, on a
        node the processes that the first one has started, unless each starts one.
        """
        if self.replay:
            if rank:
                os._exit(0)
        elif self.options["local_rank"] and (self.child, rank) != (1, self.rank):
            os.kill(os.getppid(), LEAVE)
            os._exit(0)
        self.rank, self._passes = rank, {}
        # The parent process of the script has recorded under its own rank until now.
        (self.folder / f"trace-{rank}.jsonl").unlink(missing_ok=True)
        (self.folder / "spawned").write_text(str(world_size))
        self._open()

    def event(self, kind: str, **fields: Any) -> None:
        """Write one line."""
        if self.active:
            self._file.write(json.dumps({"kind": kind, **fields}) + "\n")

    def run(self, function: Callable[[], Any]) -> int:
        """Run a part of a script to its end; the exit code."""
        code, end = run_to_end(function)
        self._end(**end)
        return code

    def _end(self, how: str, **fields: Any) -> None:
        if self._ended or not self.active:  # as of what mp.spawn makes of an exception
            return
        self._ended = True
        self._keep_draws()
        for schedule in self.schedules:
            with contextlib.suppress(AttributeError, ValueError):  # one that was not made whole
                name, numbers = type(schedule).__name__, _numbers(schedule)
                self.event("schedule", name=name, done=schedule.last_epoch, numbers=numbers)
        self.event("end", how=how, **fields)

    def text(self, text: str) -> None:
        """Record what the script prints."""
        if self.active and self._text < _MAX_TEXT and text.strip():
            self._text += len(text)
            self.event("text", text=text)

    # --- batches

    def batches(self, loader: Any, original: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
        """The batches of one pass over a DataLoader, recorded, or those recorded before."""
        site = getattr(loader, "_k8sjob_site", 0)
        number = self.replay.loader(site) if self.replay else site
        at = self._passes.get(number, 0)
        self._passes[number] = at + 1
        where = {"loader": number, "number": at}
        with self._aside():
            self.event("pass", **where, **loaders.describe(loader))
        again = None
        if self.replay is not None:
            # Cached, since the search for the padding reads samples; it is seldom needed.
            again = self.replay.batches(number, at, functools.cache(lambda: self._pads(loader)))
        self._pending[number, at] = deque(maxlen=_AHEAD)
        try:
            for index, (batch, *facts) in enumerate(again or self._fetched(loader, original)):
                self._keep_draws()
                about = dict(zip(("size", "ids", "raw", "drawn"), facts, strict=True))
                about["digests"] = _rows(batch, about["size"])
                self.event("batch", **where, index=index, **about)
                current = _LoadedBatch((number, at, index), batch, about["size"], about["digests"])
                self._current, self._trained = current, False
                self._pending.setdefault((number, at), deque(maxlen=_AHEAD)).append(current)
                # Random numbers are counted from the batch on, so that those of the ranks can be
                # found by number.
                self._drawn, self._rank_draws = 0, []
                if self.replay is not None:
                    self._rank_draws = self.replay.draws(number, at, index)
                self._host = self._states()
                yield batch
        finally:  # also where a loop is left early
            self._pending.pop((number, at), None)
        self._keep_draws()
        self._current = None
        self.event("over", **where)

    def _fetched(
        self, loader: Any, original: Callable[[Any], Iterator[Any]]
    ) -> Iterator[tuple[Any, int, Any, Any, Any]]:
        self.fetching = True  # it draws a seed for its workers
        source, base = original(loader), loaders.BaseData(loader)
        self.fetching = False
        streams = isinstance(loader.dataset, data.IterableDataset)
        # Indices that the sampler gave: workers read ahead, so they come long before their batch.
        asked: deque[Any] = vars(source).setdefault("_k8sjob_asked", deque())
        while True:
            self.fetching = True
            try:
                batch = next(source)
            except StopIteration:
                return
            finally:
                self.fetching = False
            drawn = [] if streams else _drawn(self._sampled, self._states())
            drawn = vars(source).pop("_k8sjob_drawn", drawn)
            indices = asked.popleft() if asked else None
            indices = indices if isinstance(indices, list) else [indices]
            # A sampler may give anything that the data set takes, such as keys; for a stream it
            # is None.
            are_numbers = all(hasattr(index, "__int__") for index in indices)
            raw = [int(index) for index in indices] if are_numbers else None
            size = size_of(batch, len(raw) if raw and loader.batch_sampler is not None else None)
            ids = None if raw is None else [base.index_of(index) for index in raw]
            yield batch, size, ids, raw, drawn

    def fetched(self, fetch: Callable[[], Any]) -> Any:
        """A batch that a data set gives; from a worker with its random numbers."""
        if not self.sends_draws:
            return fetch()
        before = self._states()
        batch = fetch()
        return Fetched(batch, _drawn(before, self._states()))

    def sampled(self) -> None:
        """A sampler has drawn; what is drawn until the batch is there is the data set's."""
        self._sampled = self._states()

    def _pads(self, loader: Any) -> list[float | None]:
        with self._aside():
            return loaders.pads(loader)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """The data set is looked at: its random numbers count for nothing."""
        states, self.fetching = rng.capture(torch.device("cpu")), True
        try:
            yield
        finally:
            self.fetching = False
            rng.restore(states, torch.device("cpu"))

    # --- random numbers

    def _keep_draws(self) -> None:
        if self._draws and self._current and self._trained and self.options.get("save"):
            torch.save(self._draws, self.folder / f"draws-{self.rank}-{self._current.name}.pt")
        self._draws = []

    def draw(self, result: Tensor, name: str, *, used: bool = True) -> Tensor:
        """Random numbers that a step has drawn: recorded, or replaced by those of all ranks."""
        if self.fetching or not self.active or not torch.is_tensor(result):
            return result
        # Short orders come again by chance.
        if name == "randperm" and result.numel() > 3:
            self.event("order", digest=digest(result), size=result.numel())
        # Before the first batch random numbers make weights and splits, and belong to no step.
        if self._current is None:
            return result
        at, self._drawn = self._drawn, self._drawn + 1
        # Larger ones would fill the disk.
        if self.options.get("save") and result.numel() <= 1 << 22:
            self._draws.append(result.detach().clone())
        # The first ones show whether the ranks draw alike; few numbers are equal by chance.
        recorded = at < 64 and result.numel() > 3 and torch.is_grad_enabled()
        if recorded and (self.depth or name == "dropout"):
            self.since["draws"].append((name, digest(result)))
        if self._rank_draws and all(at < len(each) for each in self._rank_draws):
            parts = [each[at] for each in self._rank_draws]
            joined = join_draws(parts, result.shape, permutes=name == "randperm")
            if joined is not None and joined.dtype == result.dtype:
                with torch.no_grad():
                    result.copy_(joined)
            alike = all(torch.equal(part, parts[0]) for part in parts)
            # The ranks had different numbers, and one process gets those of one rank only.
            if used and not alike and (joined is None or joined is parts[0]):
                self.since["alone"] = True
        return result

    def _states(self) -> list[int]:
        """The states of the random numbers of torch, Python and numpy."""
        numpy = sys.modules.get("numpy")
        numpy_state = numpy.random.get_state() if numpy else ("", b"")
        generators = [str(generator.bit_generator.state) for generator in self.generators]
        # A tuple of 625 numbers: their hash is the same in all processes, as it is of numbers.
        python = hash(random.getstate()[1])
        drawn = digest([str(numpy_state[2:]), bytes(numpy_state[1]), *generators])
        return [digest(torch.get_rng_state()), python, drawn]

    # --- modules

    def forward(self, module: nn.Module, args: Any) -> None:
        """A module is called."""
        self.depth += 1
        # Half precision, with which gradients are compared more loosely.
        self.rounds = self.rounds or torch.is_autocast_enabled("cpu")
        # Only the outermost call of a model is looked at.
        if self.depth > 1 or not self.active:
            return
        if self._current is None and torch.is_grad_enabled() and args and self.steps < _INPUTS:
            self.since["inputs"] = self.since["inputs"] or _rows(args[0]) or []
        if torch.is_grad_enabled():
            self._training = sum(part.training for part in module.modules())
            self._see_slice(args)
        elif not module.training and self._current is not None:  # an evaluation
            # Its batches wait for no backward pass.
            self._pending.pop(self._current.key[:2], None)
        # Only changes: a line for each call would be most of the record.
        mode = (module.training, torch.is_grad_enabled())
        if mode != self._mode:
            self._mode = mode
            self.event("mode", grad=mode[1])
        parameters = [*module.parameters()]
        trains = any(mode) and any(p.requires_grad for p in parameters)
        trains = trains and not any(map(is_lazy, parameters))  # this pass makes them
        if trains and id(module) not in self._roots:
            self._meet(module)

    def _see_slice(self, args: Any) -> None:
        """Record the samples of a forward pass that has a part of the batch."""
        if self._current is None or not args or self.steps >= _INPUTS:
            return
        rows, every = _rows(args[0]), size_of(self._current.batch)
        if rows and len(rows) < every:
            loader, number, index = self._current.key
            self.event("slice", loader=loader, number=number, index=index, digests=rows)

    def _meet(self, module: nn.Module) -> None:
        """A model's first call in training."""
        number = self._roots[id(module)] = len(self._roots)
        prefix, file = f"{number}:" if number else "", f"model-{number}.pt"
        named = {_plain(name): p for name, p in module.named_parameters()}
        sharded = any(hasattr(p, "to_local") for p in named.values())
        # A part of each parameter is on each rank, and one process cannot be given a part.
        if not sharded:
            values = {**named, **{_plain(name): b for name, b in module.named_buffers()}}
            if self.replay is not None:
                self.replay.restore(file, values)
            if self.options.get("save") and self.rank == 0:
                torch.save({k: v.detach().clone() for k, v in values.items()}, self.folder / file)
        for name, parameter in named.items():
            self._names.setdefault(id(parameter), prefix + name)
            if parameter.requires_grad and parameter.is_leaf and not hasattr(parameter, "to_local"):
                # A hook of the tensor sees the rank's own gradient, before DistributedDataParallel
                # averages it.
                hook = functools.partial(self._see_gradient, parameter)
                parameter.register_hook(hook)  # type: ignore[no-untyped-call]
        parts = list(module.named_modules())
        for path, part in parts:
            # By its owner: it may be replaced later.
            for name, buffer in part._buffers.items():  # noqa: SLF001 - only its own
                if buffer is not None and not isinstance(part, _BatchNorm):
                    full_name = _plain(f"{path}.{name}" if path else name)
                    self._buffers[prefix + full_name] = (part, name)
        norms = {type(part).__name__ for _, part in parts if isinstance(part, _BatchNorm)}
        self.event(
            "model",
            wrapper=type(module).__name__,
            norms=sorted(norms),
            sharded=sharded,
            dtype=sorted({str(p.dtype) for p in named.values()}),
            weights={prefix + name: sketch(p) for name, p in named.items()},
            buffers={}
            if sharded or getattr(module, "broadcast_buffers", False)
            else {prefix + _plain(name): sketch(b) for name, b in module.named_buffers()},
        )

    def _see_gradient(self, parameter: Tensor, grad: Tensor) -> None:
        if not self.active:
            return
        mine = sketch(grad)
        before = self._local.get(id(parameter))
        # A further backward pass for the same step: hooks see each addend alone.
        if before is not None and parameter.grad is not None and bool(parameter.grad.any()):
            total = [a + b for a, b in zip(before, mine, strict=True)]
            total[0] = max(before[0], mine[0])  # the squares do not add; only a scale
            mine = total
        self._local[id(parameter)] = mine

    def backward(self, loss: Any) -> None:
        """A loss is about to be differentiated."""
        if not self.active or not isinstance(loss, Tensor):
            return
        trained = {batch.key: batch for held in self._pending.values() for batch in held}
        # All batches that were read since the last backward pass: a loop may read several loaders.
        for held in self._pending.values():
            held.clear()
        if self._current is not None and not self._trained:
            trained[self._current.key] = self._current
        self._trained = True
        for batch in trained.values() if self.options.get("save") else ():
            if self._saved < _MAX_SAVED:
                file = self.folder / f"batch-{self.rank}-{batch.name}.pt"
                torch.save(batch.batch, file)
                self._saved += file.stat().st_size
        host, since = self._states(), self.since
        value = float(loss.detach().to(torch.float64).sum()) if loss.numel() < 1 << 20 else None
        # Gradients of the step before are still there: zero_grad() was left out on this rank.
        accumulates = any(p.grad is not None and sketch(p.grad)[0] > 0 for p in self._stepped)
        self._stepped = []
        self._backwards += 1
        since |= {"autocast": since["autocast"] or self.rounds, "reduced": False}
        since["losses"].append(value)
        since["training"].append(self._training)
        since["host"] += [draw for draw in _drawn(self._host, host) if draw[0]]
        since["sizes"] += [batch.size for batch in trained.values()]
        since["samples"] += [sample for batch in trained.values() for sample in batch.digests or ()]
        self.event("backward", step=self.steps, kept=accumulates, batches=[*trained])
        self._host, self._differentiated = host, None

    def differentiated(self, loss: Any) -> None:
        """torch.autograd.grad is called: for a step, if nothing else is before that."""
        first = loss if isinstance(loss, Tensor) else next(iter(loss), None)
        if isinstance(first, Tensor):
            self._differentiated = first.detach()

    # --- optimizers

    def before_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """optimizer.step() begins."""
        if not self.active:
            return
        self._stepping.append(id(optimizer))
        if len(self._stepping) > 1:  # one that an optimizer has inside, as ZeroRedundancyOptimizer
            return
        if self._differentiated is not None and self._stepped_at == self._backwards:
            self.backward(self._differentiated)
        parameters = _parameters(optimizer)
        for parameter in parameters:
            # Of no model that was called: a parameter that the script has made alone.
            self._names.setdefault(id(parameter), f"parameter {len(self._names)}")
        # Training continues after a checkpoint, so the files of the save are complete by now.
        self._snapshot()
        number = self._optimizers.setdefault(id(optimizer), len(self._optimizers))
        self._rates = [group.get("lr") for group in optimizer.param_groups]
        rates = [{} if rate is None else {"lr": float(rate)} for rate in self._rates]
        self._step = {
            "optimizer": number,
            "step": self.steps,
            "options": [
                rate
                | {name: group[name] for name in _OPTIONS if isinstance(group.get(name), _PLAIN)}
                for rate, group in zip(rates, optimizer.param_groups, strict=True)
            ]
            + [{"clip": self.since.pop("clips")}],
            "names": [self._names[id(p)] for p in parameters],
            "before": [sketch(p) for p in parameters],
            "grads": [None if p.grad is None else sketch(p.grad) for p in parameters],
        }
        # One process has the rate of the ranks in its step, as a schedule may count batches:
        # options, as the script has set them, are compared before.
        recorded = self.replay.rates.get((number, self.steps)) if self.replay else None
        if recorded and len(recorded) == len(optimizer.param_groups):
            for group, rate in zip(optimizer.param_groups, recorded, strict=True):
                if isinstance(group.get("lr"), float) and group["lr"] != rate:
                    group["lr"] = rate

    def after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """optimizer.step() has ended.

        Raises:
            StopScript: it was the last step to be seen.
        """
        if not self.active:
            return
        del self._stepping[self._stepping.index(id(optimizer)) :]
        if self._stepping:
            return
        parameters = _parameters(optimizer)
        if self.since["losses"]:  # if not, it is the step of a second optimizer
            self._since_last = self.since
        self.since = _nothing()
        self.event(
            "step",
            **self._step,
            **self._since_last,
            local=[self._local.pop(id(p), None) for p in parameters],
            after=[sketch(p) for p in parameters],
            buffers={
                name: sketch(buffer)
                for name, (part, key) in self._buffers.items()
                if isinstance(buffer := part._buffers.get(key), Tensor)  # noqa: SLF001 - see _meet
            },
        )
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            if self.replay and isinstance(rate, float):
                group["lr"] = rate
        self._stepped = parameters
        self._stepped_at = self._backwards
        self.steps += 1
        self._begun = self._begun or time.process_time()
        # A BaseException ends the script from here: see StopScript.
        if self.steps >= self._last_step():
            raise StopScript

    def _last_step(self) -> int:
        """The step after which this run ends, which the ranks agree on through a file."""
        file = self.folder / "last-step"
        if file.exists():
            return min(self._limit, int(file.read_text() or self._limit))
        if self.rank == 0 and time.process_time() - self._begun > self.options["seconds"]:
            draft = self.folder / "last-step.new"
            # Some steps ahead: other ranks may be further by one or two, and all must end at the
            # same one.
            draft.write_text(str(self.steps + 3))
            draft.replace(file)
        return self._limit

    # --- files

    def saved(self, path: str) -> None:
        """A checkpoint is written."""
        self.event("save", step=self.steps, path=path)
        # A file of the beginning, as of pretrained weights, is no checkpoint of the training.
        self._unsaved = self._unsaved or self.steps > 0

    def loaded(self, path: str) -> None:
        """A checkpoint is read, or other tensors."""
        self.event("load", step=self.steps, path=path)

    def unmatched(self, keys: Any) -> None:
        """A state is loaded: its names may differ from a model's only by a prefix."""
        missing = {_plain(name): name for name in getattr(keys, "missing_keys", ())}
        for name in getattr(keys, "unexpected_keys", ()):
            if _plain(name) in missing:
                self.event("ignored", step=self.steps, name=missing[_plain(name)], saved=name)

    def _snapshot(self) -> None:
        """Keep the files of the first checkpoint, once training continues after it."""
        if not self._unsaved or not (folders := self.options.pop("snapshot", [])):
            return
        root, copies = Path(self.options["root"]), self.folder / f"files-{self.rank}"
        size = 0
        for file in (file for folder in folders for file in Path(folder).rglob("*")):
            stat = file.lstat()
            # New files of this run only; the others are there in the next run as well.
            if not file.is_file() or file.is_symlink() or stat.st_mtime < self._started - 1:
                continue
            size += stat.st_size
            if size > _MAX_FILES:
                return
            target = copies / file.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target)
        if copies.exists():  # not where it lies outside, as checkpoint.dir of a job.yaml does
            self.event("snapshot", step=self.steps, folder=str(copies))


def _numbers(schedule: Any) -> list[int]:
    """The whole numbers that a schedule was given, also through functions."""
    attributes = vars(schedule)
    public = (name for name in attributes if not name.startswith("_"))
    values = [attributes[name] for name in public if name != "last_epoch"]
    for function in attributes.get("lr_lambdas", ()):
        # functools.partial, as transformers makes its schedules.
        values += getattr(function, "keywords", {}).values()
        if inspect.isfunction(function):
            closure = inspect.getclosurevars(function)
            values += [*closure.nonlocals.values(), *closure.globals.values()]
    return [value for value in values if type(value) is int]


def _drawn(before: list[int], after: list[int]) -> list[tuple[int, ...]]:
    """The random numbers that were drawn: their source, the states before and after."""
    each = enumerate(zip(before, after, strict=True))
    return [(source, *pair) for source, pair in each if len(set(pair)) > 1]


def _parameters(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _plain(name: str) -> str:
    """The name of a parameter without those of wrappers."""
    bare = re.sub(r"\b(?:_orig_mod|_fsdp_wrapped_module)\.", "", name)
    return re.sub(r"^(?:module\.)+", "", bare)


def _rows(value: Any, size: int | None = None) -> list[int] | None:
    with contextlib.suppress(Exception):  # a batch of anything
        return digests(value, size_of(value) if size is None else size)
    return None
