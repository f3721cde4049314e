"""The functions of torch that are wrapped, so that a Recorder sees what a script does."""

from __future__ import annotations

import functools
import inspect
import multiprocessing.context
import multiprocessing.process
import os
import sys
import weakref
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn import functional
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils import data
from torch.utils.data._utils import worker
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from k8sjob.forking.script import SEED, without_gpus, wrap
from k8sjob.proving.recording.recorder import Fetched
from k8sjob.proving.recording.sketch import digest
from k8sjob.runtime.base.env import copy_environ
from k8sjob.runtime.comm import rng

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8sjob.proving.recording.recorder import Recorder

_DRAWS: Final = [
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("bernoulli", "normal", "multinomial"),
]
_METHODS: Final = [
    *("bernoulli", "bernoulli_", "normal_", "uniform_", "exponential_", "random_", "multinomial"),
    *("log_normal_", "cauchy_"),
]
_COLLECTIVES: Final = [
    *("all_reduce", "reduce", "all_gather", "gather", "all_gather_into_tensor"),
    *("all_gather_object", "gather_object"),
]
_SHOWN: Final = 16
"""Elements of a tensor that is shown whole."""
_SIZES: Final = ("world", "nproc", "num_proc", "n_gpu", "size")
"""Parts of the names by which scripts call the number of processes."""


def install(recorder: Recorder) -> None:
    """Wrap them, in this process and those that it forks."""
    for part in (
        _wrap_modules,
        _wrap_optimizers,
        _wrap_loaders,
        _wrap_sequences,
        _wrap_workers,
        _wrap_random,
        _wrap_collectives,
        _wrap_group,
        _wrap_files,
        _wrap_processes,
    ):
        part(recorder)
    without_gpus()
    sys.stdout, sys.stderr = _Stream(sys.stdout, recorder), _Stream(sys.stderr, recorder)


def _wrap_modules(recorder: Recorder) -> None:
    def before(module: nn.Module, args: Any) -> None:
        # A recurrent layer's dropout is drawn within torch's kernel, where nothing can be recorded
        # or replaced: it is off in all runs.
        if isinstance(module, nn.RNNBase) and module.dropout:
            module.dropout = 0.0
        recorder.forward(module, args)

    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        recorder.depth -= 1
        if isinstance(output, Tensor) and output.dtype in {torch.bfloat16, torch.float16}:
            recorder.rounds = True

    def backward(original: Any, tensors: Any, *args: Any, **options: Any) -> Any:
        # Functions of autograd call backward inside, as activation checkpointing does.
        outer = recorder.differentiating
        if not outer:
            recorder.backward(tensors if isinstance(tensors, Tensor) else next(iter(tensors)))
        recorder.differentiating = True
        try:
            return original(tensors, *args, **options)
        finally:
            recorder.differentiating = outer

    def grad(original: Any, outputs: Any, *args: Any, **options: Any) -> Any:
        if not recorder.differentiating:
            recorder.differentiated(outputs)
        return original(outputs, *args, **options)

    modules.register_module_forward_pre_hook(before)
    # always_call: also after an exception, which the script may catch; else the depth would be
    # wrong.
    modules.register_module_forward_hook(after, always_call=True)

    def load(original: Any, *args: Any, **options: Any) -> Any:
        keys = original(*args, **options)
        recorder.unmatched(keys)
        return keys

    wrap(nn.Module, "load_state_dict", load)
    wrap(torch.autograd, "backward", backward)
    wrap(torch.autograd, "grad", grad)


def _wrap_optimizers(recorder: Recorder) -> None:
    def clip(original: Any, *args: Any, **options: Any) -> Any:
        # The limit, which is the second argument of both functions.
        most = args[1] if len(args) > 1 else options.get("max_norm", options.get("clip_value"))
        recorder.since["clips"].append(float(most or 0))
        return original(*args, **options)

    def hook(original: Any, *args: Any, **options: Any) -> Any:
        # A hook that compresses gradients makes them less exact: see Evidence.tolerance.
        recorder.event("hook")
        return original(*args, **options)

    def schedule(original: Any, scheduler: Any, *args: Any, **options: Any) -> None:
        recorder.schedules.append(scheduler)
        original(scheduler, *args, **options)

    optimizers.register_optimizer_step_pre_hook(recorder.before_step)
    optimizers.register_optimizer_step_post_hook(recorder.after_step)
    wrap(nn.utils, ("clip_grad_norm_", "clip_grad_value_"), clip)
    wrap(nn.parallel.DistributedDataParallel, "register_comm_hook", hook)
    wrap(torch.optim.lr_scheduler.LRScheduler, "__init__", schedule)


# --- batches and random numbers -------------------------------------------------------------------


def _wrap_loaders(recorder: Recorder) -> None:
    def batches(original: Any, loader: Any) -> Any:
        return recorder.batches(loader, original) if recorder.active else original(loader)

    def asked(original: Any, iterator: Any) -> Any:
        indices = original(iterator)
        # On the iterator: several passes over a loader may be open at once.
        vars(iterator).setdefault("_k8sjob_asked", deque()).append(indices)
        recorder.sampled()
        return indices

    loaders: dict[int, list[weakref.ref[Any]]] = {}

    def create(original: Any, loader: Any, *args: Any, **options: Any) -> None:
        # The place in the code tells which loader of the ranks this one is, in the run of one
        # process too.
        place = _site()
        earlier = loaders.setdefault(place, [])
        site = place + (at := _free(earlier, args[0] if args else options.get("dataset")))
        size = recorder.replay.batch_size(site) if recorder.replay and recorder.active else None
        # A batch_sampler, which may also be the fifth argument, decides about sizes by itself.
        if size and options.get("batch_sampler") is None and len(args) < 5:
            # The batch of all ranks together: len() is then that of their loaders.
            if len(args) > 1:
                args = (args[0], size, *args[2:])
            else:
                options["batch_size"] = size
        original(loader, *args, **options)
        object.__setattr__(loader, "_k8sjob_site", site)
        earlier[at : at + 1] = [weakref.ref(loader)]

    wrap(data.DataLoader, "__iter__", batches)
    wrap(data.DataLoader, "__init__", create)
    wrap(_BaseDataLoaderIter, "_next_index", asked)
    if recorder.replay and recorder.replay.joined:
        from k8sjob.runtime.data import ShardSampler

        parts = recorder.replay.parts

        # The sampler of k8sjob's own runtime divides a batch of each rank's size by itself.
        def larger(original: Any, sampler: Any, /, *args: Any, **options: Any) -> None:
            if options.get("batch_size") is not None:
                options["batch_size"] *= parts
            original(sampler, *args, **options)

        wrap(ShardSampler, "__init__", larger)


def _wrap_sequences(recorder: Recorder) -> None:
    def pack(original: Any, *args: Any, **options: Any) -> Any:
        bound = inspect.signature(original).bind(*args, **options).arguments
        return original(**bound | {"enforce_sorted": False})

    if recorder.replay:  # the batches of several ranks, joined, are not in one order
        wrap(nn.utils.rnn, ("pack_padded_sequence", "pack_sequence"), pack)


def _wrap_workers(recorder: Recorder) -> None:
    """What the workers of a loader draw comes with their batches."""

    def work(original: Any, *args: Any) -> None:  # not that of a loader of another library
        recorder.sends_draws = True
        original(*args)

    def fetched(original: Any, *args: Any) -> Any:
        return recorder.fetched(lambda: original(*args))

    def received(original: Any, iterator: Any, message: Any, *args: Any) -> Any:
        if isinstance(message, Fetched):
            vars(iterator)["_k8sjob_drawn"] = message.drawn
            # Before torch's own method, which pins and returns what it gets.
            message = message.batch
        return original(iterator, message, *args)

    def made(original: Any, *args: Any, **options: Any) -> Any:
        recorder.generators.append(generator := original(*args, **options))
        return generator

    wrap(worker, "_worker_loop", work)
    wrap(_MapDatasetFetcher, "fetch", fetched)
    wrap(_MultiProcessingDataLoaderIter, "_process_data", received)
    numpy = sys.modules.get("numpy")
    # Only where the parent process has numpy: see ranks._warm.
    if numpy is not None:
        wrap(numpy.random, "default_rng", made)


def _free(loaders: list[weakref.ref[Any]], dataset: Any) -> int:
    """The number of the next loader of a place: its own if those in use have other data sets."""
    for at, each in enumerate(loaders):
        loader = each()
        if loader is None or loader.dataset is dataset:
            return at
    return len(loaders)


def _site() -> int:
    """The place of the code that makes a loader, by all its callers."""
    # Without this function, create() and wrapped().
    frame, places = sys._getframe(3), list[str]()  # noqa: SLF001 - documented
    while frame is not None:
        places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        # The frames above are those that start the script, which differ between the runs.
        if frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_name == "<module>":
            break
        frame = frame.f_back  # type: ignore[assignment]
    return digest("\n".join(places)) % 1_000_000


def _wrap_random(recorder: Recorder) -> None:
    # Before it is wrapped: these numbers are recorded once, by draw().
    rand = torch.rand

    def drawn(name: str) -> Callable[..., Any]:
        return lambda original, *args, **options: recorder.draw(original(*args, **options), name)

    def dropout(original: Any, *args: Any, **options: Any) -> Any:
        bound = inspect.signature(original).bind(*args, **options)
        bound.apply_defaults()
        tensor, p = bound.args[:2]
        # Nothing is drawn, or nothing that matters.
        if not bound.arguments["training"] or not 0 < p < 1 or not recorder.active:
            return original(*args, **options)
        shape = tensor.shape
        if original.__name__ != "dropout":  # of whole channels
            shape = torch.Size([*shape[:2], *[1] * (tensor.dim() - 2)])
        # Dropout is computed from torch.rand here, so that one process can be given the ranks'
        # numbers: torch's kernel draws inside.
        numbers = recorder.draw(rand(shape, device=tensor.device), "dropout")
        mask = (numbers >= p).to(tensor.dtype) / (1 - p)
        return tensor.mul_(mask) if bound.arguments["inplace"] else tensor * mask

    def attention(original: Any, *args: Any, dropout_p: float = 0.0, **options: Any) -> Any:
        if len(args) > 4:
            # Off, since its mask cannot be replaced.
            dropout_p, args = args[4], (*args[:4], 0.0, *args[5:])
        if dropout_p:
            # The kernel of attention draws its own mask; these numbers only show whether ranks draw
            # alike.
            recorder.draw(rand(16), "dropout", used=False)
        return original(*args, **options)

    wrap(functional, ("dropout", "dropout1d", "dropout2d", "dropout3d"), dropout)
    wrap(functional, "scaled_dot_product_attention", attention)
    for name in _DRAWS:
        wrap(torch, name, drawn(name))
    for name in _METHODS:
        wrap(Tensor, name, drawn(name))


# --- collectives, files, processes ----------------------------------------------------------------


def _wrap_collectives(recorder: Recorder) -> None:
    def called(name: str) -> Callable[..., Any]:
        def call(original: Any, *args: Any, **options: Any) -> Any:
            tensor = args[0] if args else options.get("tensor")
            result = original(*args, **options)
            # A Work is returned by an asynchronous call, whose tensor is not reduced yet.
            after = _values(tensor) if result is None else None
            recorder.since["reduced"] |= name == "all_reduce" and not recorder.differentiating
            recorder.event("collective", name=name, after=after)
            return result

        return call

    def start(original: Any, *args: Any, **options: Any) -> Any:
        bound = inspect.signature(original).bind(*args, **options).arguments
        env, numbers = copy_environ(), {}
        for name, variable in (("rank", "RANK"), ("world_size", "WORLD_SIZE")):
            argument = bound.get(name, -1)
            numbers[name] = int(env.get(variable, 0)) if argument in {-1, None} else argument
        # A process that the script has started becomes a rank with its process group.
        if not recorder.active:
            recorder.join(**numbers)
        if recorder.replay and numbers["world_size"] > 1:
            # One process stands for all ranks: it meets nobody.
            bound |= {"rank": 0, "world_size": 1}
        return original(**bound)

    for name in _COLLECTIVES:
        wrap((distributed_c10d, dist), name, called(name))
    wrap((distributed_c10d, dist), "init_process_group", start)


def _values(tensor: Any) -> list[float] | None:
    small = isinstance(tensor, Tensor) and tensor.numel() <= _SHOWN
    return [float(number) for number in tensor.detach().flatten().tolist()] if small else None


def _wrap_group(recorder: Recorder) -> None:
    """The reductions of k8sjob.runtime in one process, which calls no collective for them."""
    from k8sjob.runtime.comm.process_group import Group

    def alone(original: Any, group: Group, *args: Any, **options: Any) -> Any:
        result = original(group, *args, **options)
        # With several ranks, torch's all_reduce has been recorded inside.
        if group.world_size == 1:
            after = result if isinstance(result, list) else _values(result)
            recorder.event("collective", name="all_reduce", after=after)
        return result

    wrap(Group, ("all_reduce", "sums"), alone)


def _wrap_files(recorder: Recorder) -> None:
    def noted(record: Callable[[str], None], at: int) -> Callable[..., Any]:
        def call(original: Any, *args: Any, **options: Any) -> Any:
            named = [*args[at : at + 1], options.get("f"), options.get("checkpoint_id")]
            target = next((argument for argument in named if argument is not None), None)
            path = target if isinstance(target, str | os.PathLike) else getattr(target, "name", "")
            # torch.save of the recorder itself is no checkpoint.
            own_folder = f"{recorder.folder.parent}{os.sep}"
            try:
                return original(*args, **options)
            finally:  # also of one that cannot be loaded, but not of one that is not there
                with suppress(OSError, TypeError, ValueError):
                    foreign = recorder.active and path and not str(path).startswith(own_folder)
                    if foreign and Path(os.fsdecode(path)).exists():
                        record(os.path.relpath(os.fsdecode(path)))

        return call

    # save(state, path) and load(path): the path is at 1 and 0; of dcp it may be checkpoint_id.
    for owner in (torch, dcp):
        wrap(owner, "save", noted(recorder.saved, 1))
        wrap(owner, "load", noted(recorder.loaded, 0))


def _wrap_processes(recorder: Recorder) -> None:
    """Processes that the script starts are forked: torch and what is wrapped is in them at once."""
    context: Any = multiprocessing.context
    forked = staticmethod(context.ForkProcess._Popen)  # noqa: SLF001 - there is no public form
    context.SpawnProcess._Popen = forked  # noqa: SLF001 - likewise
    context.ForkServerProcess._Popen = forked  # noqa: SLF001 - likewise

    def recorded(fn: Any, *args: Any, **options: Any) -> None:
        if recorder.replay:
            args, options = _alone(fn, args, options, recorder.replay.parts)
        if code := recorder.run(lambda: fn(*args, **options)):
            sys.exit(code)

    def begin(original: Any, process: Any, *args: Any, **options: Any) -> Any:
        # Workers of a DataLoader are no ranks.
        if process._target is not worker._worker_loop:  # noqa: SLF001 - likewise
            recorder.child = process._identity[-1]  # noqa: SLF001 - likewise
            method = getattr(process, "_start_method", None) or multiprocessing.get_start_method()
            if method != "fork":  # a new interpreter has random numbers of its own
                rng.seed_all(SEED, recorder.rank + recorder.child - 1)
            # A subclass of Process overrides run().
            name = "_target" if process._target else "run"  # noqa: SLF001 - likewise
            setattr(process, name, functools.partial(recorded, getattr(process, name)))
        return original(process, *args, **options)

    def spawned(original: Any, fn: Any, *args: Any) -> Any:
        return original(functools.partial(recorded, fn), *args)

    # The target of mp.spawn makes SystemExit of an exception.
    wrap(sys.modules["torch.multiprocessing.spawn"], "_wrap", spawned)
    wrap(multiprocessing.process.BaseProcess, "_bootstrap", begin)


def _alone(
    fn: Any, args: tuple[Any, ...], options: dict[str, Any], parts: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a function that one process runs in place of several; also its globals."""

    def alone(name: str, value: Any) -> Any:
        named = any(part in name.lower() for part in _SIZES) and "batch" not in name.lower()
        is_size = named and type(value) is int and value > 1 and parts % value == 0
        return 1 if is_size else value

    # The number of processes is often a global of the script, such as WORLD_SIZE.
    names = vars(sys.modules[fn.__module__])
    names |= {name: alone(name, value) for name, value in names.items()}
    parameters = [*inspect.signature(fn).parameters, *[""] * len(args)]
    args = tuple(map(alone, parameters, args))
    return args, {name: alone(name, value) for name, value in options.items()}


class _Stream:
    """A stream whose text the recorder sees, too."""

    def __init__(self, stream: Any, recorder: Recorder) -> None:
        self._stream, self._recorder = stream, recorder

    def write(self, text: str) -> int:
        self._recorder.text(text)
        return int(self._stream.write(text))

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
