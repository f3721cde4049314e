"""Strategies, and which settings, backends, nodes, processes and GPUs each of them works with.

The client checks this table before it renders anything, and the runtime before it makes a group, so
that a job fails in a second on a laptop and not after an hour on a cluster. Hence stdlib only.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from k8sjob.contract import counted, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

_MAX_PATTERN: Final = 1000
BACKENDS: Final[Mapping[str, str]] = MappingProxyType({"nccl": "GPUs", "gloo": "CPUs"})
"""Backends of a process group that torch's packages are built with, and what each is for."""

AXES: Final = ("data", "model")
"""Axes of a mesh: along the first the batch is divided, along the second the model."""

SCHEDULES: Final = ("1f1b", "gpipe")
"""Orders in which a pipeline works off its micro-batches."""

GONE: Final[Mapping[str, str]] = MappingProxyType(
    {"mpi": "is not built into torch's packages", "tcp": "was removed from torch"}
)
"""Backends that tutorials still name, and why they are not here."""


class Shape(NamedTuple):
    """The processes of a job.

    Attributes:
        nnodes: pods, each of which is a node.
        nproc_per_node: processes in each.
        gpus: GPUs of each node that the processes may use.
        master_gpus: GPUs of the Master, where they differ; None: as `gpus`.
    """

    nnodes: int
    nproc_per_node: int
    gpus: int = 0
    master_gpus: int | None = None

    @property
    def world_size(self) -> int:
        """Processes of the whole job."""
        return self.nnodes * self.nproc_per_node

    def __str__(self) -> str:
        nodes = counted(self.nnodes, "node")
        each = counted(self.nproc_per_node, "process", "es")
        return f"{nodes} x {each} = {counted(self.world_size, 'rank')}"


class Conflict(NamedTuple):
    """Settings that do not work together, as k8sjob.findings.invalid takes them.

    It is no Finding, since the runtime's image has this module and the contract alone.

    Attributes:
        path: the spec's field to change, as ("strategy", "backend").
        message: what is wrong, with all its factors.
        next_step: what to do now.
    """

    path: tuple[str, ...]
    message: str
    next_step: str

    def __str__(self) -> str:
        return f"{'.'.join(self.path)}: {self.message}; {self.next_step}"


class Option(NamedTuple):
    """One setting of a strategy.

    Attributes:
        default: what it is where it is left out; null is always taken where this is None.
        expected: what it takes, in words.
        takes: whether a value, as JSON has it, is one of these.
        min: the smallest number.
    """

    default: Any
    expected: str
    takes: Callable[[Any], bool]
    min: int = 0


@dataclass(frozen=True, slots=True)
class StrategyRow:
    """One row of the table.

    Attributes:
        summary: what the strategy does, in one line.
        options: its settings.
        rule: what its settings and the job's processes must hold together.
        uniform: whether every node must have the same number of GPUs.
        whole_node: whether one process drives all GPUs of its node, instead of one per GPU.
        places: whether the strategy puts the model on its devices, part by part; else the model
            comes to it on the process's device.
        resizes: whether the number of ranks may be another one after a restart.
        saved_whole: why its ranks cannot each write a part of a checkpoint; empty: they can.
        warning: shown to users of it; empty: none.
        lacks: why it has not a setting that others have, where that is not obvious.
        keras: what Keras computes with under these settings; None: the strategy is for models of
            torch.
    """

    summary: str
    options: Mapping[str, Option]
    rule: Callable[[Mapping[str, Any], Shape], Iterator[Conflict]] = lambda _settings, _shape: iter(
        ()
    )
    uniform: bool = True
    whole_node: bool = False
    places: bool = False
    resizes: bool = False
    saved_whole: str = ""
    warning: str = ""
    lacks: Mapping[str, str] = field(default_factory=dict)
    keras: str | None = None

    def settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """All settings: these, and the defaults of the others."""
        return {name: settings.get(name, option.default) for name, option in self.options.items()}


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _positive(value: Any) -> bool:
    return (_whole(value) or isinstance(value, float)) and 0 < value < float("inf")


def _texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


def pattern_error(text: str) -> str:
    """Why a text cannot be matched against the names of layers; empty if it can."""
    if len(text) > _MAX_PATTERN:
        return f"it is longer than {_MAX_PATTERN} characters"
    try:
        re.compile(text)
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        return str(error)
    return ""


def _patterns(value: Any) -> bool:
    return _texts(value) and not any(map(pattern_error, value))


def _layouts(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and _patterns(list(value))
        and all(
            isinstance(axes, list | tuple)
            and all(axis is None or axis in AXES for axis in axes)
            and all(list(axes).count(axis) <= 1 for axis in AXES)
            for axes in value.values()
        )
    )


def _of_mesh(
    settings: Mapping[str, Any], shape: Shape, *, example: str = "{fc1.weight: [model, null]}"
) -> Iterator[Conflict]:
    data, model = settings["data"], settings["model"]
    if data is not None and data * model != shape.world_size:
        yield Conflict(
            ("strategy", "data"),
            f"mesh data {data} x model {model} = {data * model}, but {shape}",
            "remove data, or change one of them",
        )
    elif shape.world_size % model:
        fitting = [str(n) for n in range(1, shape.world_size + 1) if shape.world_size % n == 0]
        yield Conflict(
            ("strategy", "model"),
            f"{shape} do not divide by mesh axis model={model}",
            f"set it to {', '.join(fitting)}",
        )
    if model > 1 and not settings["layout"]:
        yield Conflict(
            ("strategy", "layout"),
            f"no layer is sharded along mesh axis model={model}: its ranks would all compute the"
            f" same",
            f"write what it divides, such as {example}, or remove model",
        )


_NO_SPLITS: Final = Conflict(
    ("strategy", "splits"),
    "without splits there is only one stage",
    "write the layers that begin the others, such as [block2]",
)


def _of_pipeline(settings: Mapping[str, Any], shape: Shape) -> Iterator[Conflict]:
    stages = len(settings["splits"]) + 1
    if stages == 1:
        yield _NO_SPLITS
    elif shape.world_size % stages:
        yield Conflict(
            ("strategy", "splits"),
            f"{shape} do not divide by {counted(stages - 1, 'split')} + 1 = {stages} stages",
            "change one of them",
        )
    if settings["schedule"] == "1f1b" and settings["micro_batches"] < stages:
        yield Conflict(
            ("strategy", "micro_batches"),
            f"{settings['micro_batches']} micro-batches leave some of {stages} stages without work"
            f" at any time",
            f"set it to at least {stages}, or use schedule: gpipe",
        )


def _of_model_split(settings: Mapping[str, Any], shape: Shape) -> Iterator[Conflict]:
    stages = len(settings["splits"]) + 1
    yield from _of_one_process("model_split", shape, "pipeline, whose stages lie on ranks")
    if stages == 1:
        yield _NO_SPLITS
    elif shape.gpus and shape.gpus != stages:
        yield Conflict(
            ("resources", "gpus"),
            f"{counted(shape.gpus, 'GPU')} for {counted(stages - 1, 'split')} + 1 = {stages}"
            f" stages, one on each",
            f"set it to {stages}, or change strategy.splits",
        )


def _of_one_process(kind: str, shape: Shape, instead: str) -> Iterator[Conflict]:
    if shape.world_size > 1:
        yield Conflict(
            ("replicas", "workers" if shape.nnodes > 1 else "nproc_per_node"),
            f"{kind} is one process with all GPUs of its node, not {shape}",
            f"leave both out, or use kind: {instead}",
        )


def _of_parameter_server(_settings: Mapping[str, Any], shape: Shape) -> Iterator[Conflict]:
    if shape.nnodes < 2:
        yield Conflict(
            ("replicas", "workers"),
            "no process would train: the Master coordinates and serves, and there are no Workers",
            "set it to at least 1",
        )
    held = shape.gpus if shape.master_gpus is None else shape.master_gpus
    if held:
        yield Conflict(
            ("resources", "master", "gpus"),
            f"the Master coordinates and serves on its CPU, and would hold {counted(held, 'GPU')}",
            "set it to 0",
        )


def _count(default: int | None) -> Option:
    return Option(default, "a whole number", _whole, min=1)


def _choice(default: str, values: Sequence[str]) -> Option:
    return Option(default, " or ".join(values), lambda value: value in values)


_OFF: Final = Option(default=False, expected="true or false", takes=_flag)
_ON: Final = Option(default=True, expected="true or false", takes=_flag)
_NAMES: Final = Option(default=(), expected="a list of names", takes=_texts)
_STEP: Final[Mapping[str, Option]] = {
    "accumulate": _count(1),
    "clip_norm": Option(default=None, expected="a number above 0", takes=_positive),
    "bf16": _OFF,
}
"""The options that a strategy may support in its step."""
_NORMS: Final[Mapping[str, Option]] = {"sync_batchnorm": _OFF}
"""The options for ranks that have batches of their own."""
_PATTERNS: Final = Option(
    default=(), expected="a list of names or regular expressions", takes=_patterns
)
_BLOCKS: Final[Mapping[str, Option]] = {"blocks": _PATTERNS, "checkpoint_activations": _OFF}
"""The options for the repeated layers of a model."""
_LAYERS: Final[Mapping[str, Option]] = {**_BLOCKS, "compile": _OFF}
"""The same, and what is done to layers that compute with plain tensors."""
_MESH: Final[Mapping[str, Option]] = {
    "data": _count(None),
    "model": _count(1),
    "layout": Option(
        default=MappingProxyType({}),
        expected="a mapping of names or regular expressions to axes, each data, model or null",
        takes=_layouts,
    ),
}
"""The axes of a mesh, and what lies along them."""

STRATEGIES: Final[Mapping[str, StrategyRow]] = MappingProxyType(
    {
        "ddp": StrategyRow(
            summary="every rank has the whole model, gradients are averaged",
            options={**_STEP, **_NORMS, **_LAYERS},
            resizes=True,
        ),
        "keras": StrategyRow(
            summary="every rank has the whole Keras model, which computes with torch",
            options=_STEP,
            resizes=True,
            lacks={
                "sync_batchnorm": "Keras's layer does not support it on torch; use"
                " GroupNormalization or LayerNormalization, or kind: keras_mesh, whose statistics"
                " are those of the whole batch",
                "checkpoint_activations": "build the model under keras.RematScope(), without"
                " seeds in its Dropout layers, whose masks would differ when computed again",
            },
            keras="torch",
        ),
        "fsdp": StrategyRow(
            summary="every rank has a part of each parameter and gathers the rest as it is needed",
            options={**_STEP, **_NORMS, **_LAYERS, "reshard": _ON},
            places=True,
            resizes=True,
        ),
        "mesh": StrategyRow(
            summary="ranks along data divide each batch, ranks along model divide what layout says",
            options={**_STEP, **_NORMS, **_BLOCKS, **_MESH},
            rule=_of_mesh,
            lacks={
                "compile": "torch's compiler gives all parts of a divided output the same dropout"
                " mask; the script may compile layers that the layout leaves alone"
            },
        ),
        "keras_mesh": StrategyRow(
            summary="a Keras model over data and model by keras.distribution, one device per rank",
            options=_MESH,
            # A kernel of Keras is (inputs, outputs), a weight of torch (outputs, inputs).
            rule=partial(_of_mesh, example="{.*/dense/kernel: [null, model]}"),
            places=True,
            lacks={
                "accumulate": "give the optimizer gradient_accumulation_steps",
                "clip_norm": "give the optimizer global_clipnorm",
                "bf16": 'call keras.mixed_precision.set_global_policy("mixed_bfloat16")',
                "sync_batchnorm": "the statistics already cover the whole batch",
                "checkpoint_activations": "build the model under keras.RematScope()",
                "compile": "JAX always compiles the step",
            },
            keras="jax",
        ),
        "pipeline": StrategyRow(
            summary="every rank has some of the layers, batches pass through in parts",
            options={
                **_STEP,
                **_LAYERS,
                "splits": _NAMES,
                "schedule": _choice("1f1b", SCHEDULES),
                "micro_batches": _count(4),
            },
            rule=_of_pipeline,
            lacks={
                "sync_batchnorm": "a stage sees one micro-batch after another and never the batch;"
                " nn.GroupNorm and nn.LayerNorm do not need it"
            },
        ),
        "model_split": StrategyRow(
            summary="one process has some of the layers on each of its GPUs, which take turns",
            options={**_STEP, **_LAYERS, "splits": _NAMES},
            rule=_of_model_split,
            whole_node=True,
            places=True,
            lacks={"sync_batchnorm": "the statistics already cover the whole batch"},
        ),
        "data_parallel": StrategyRow(
            summary="one process has a copy of the model on each of its GPUs, recreated each step",
            options=_STEP,
            rule=lambda _settings, shape: _of_one_process("data_parallel", shape, "ddp"),
            whole_node=True,
            warning="nn.DataParallel copies the model to every GPU in each step, and its threads"
            " share one interpreter; kind: ddp does the same, faster, and on several nodes",
            lacks={
                "sync_batchnorm": "each copy has its own part of the batch, and is recreated in"
                " each step; use kind: ddp, which supports it",
                "checkpoint_activations": "copies compute with the bare layers; use kind: ddp",
                "compile": "copies compute with the bare layers; use kind: ddp",
            },
        ),
        "parameter_server": StrategyRow(
            summary="trainers have the model without its tables, servers the tables' columns",
            options={
                "accumulate": _STEP["accumulate"],
                "bf16": _STEP["bf16"],
                "servers": _count(1),
                "tables": _PATTERNS,
            },
            rule=_of_parameter_server,
            uniform=False,
            places=True,
            saved_whole="no rank of a parameter_server has a part of the tables to write",
            lacks={
                "clip_norm": "the gradients of a step are never in one place",
                "sync_batchnorm": "trainers do not wait for each other in the forward pass; use"
                " nn.LayerNorm or nn.GroupNorm",
                "checkpoint_activations": "tables would be asked again for what is computed again",
                "compile": "what asks the servers cannot be compiled",
            },
        ),
    }
)
"""All strategies, by the spec's `strategy.kind`."""


def serving(kind: str, options: Mapping[str, Any]) -> int:
    """Processes of the Master that serve the others and do not train; 0 under most strategies.

    The first of them coordinates; the processes that train are those of the Workers.
    """
    row = STRATEGIES.get(kind)
    servers = row.settings(options).get("servers") if row else None
    return 1 + servers if isinstance(servers, int) else 0


def keras_backend(kind: str) -> str | None:
    """The backend of Keras in a job; None if the strategy is not for Keras models."""
    row = STRATEGIES.get(kind)
    return row.keras if row else None


def processes_per_node(kind: str, gpus: int) -> int:
    """Processes of a node with this many GPUs, if their number is not given."""
    row = STRATEGIES.get(kind)
    return 1 if row and row.whole_node else max(1, gpus)


def conflicts(
    kind: str, options: Mapping[str, Any], shape: Shape, *, backend: str | None = None
) -> list[Conflict]:
    """The conflicts between these settings; empty if there are none.

    Args:
        kind: the strategy, a key of STRATEGIES.
        options: its settings; those left out have their defaults.
        shape: the job's processes.
        backend: of the process group; None chooses one.
    """
    row = STRATEGIES.get(kind)
    if row is None:
        step = _meant(kind, STRATEGIES, "kinds")
        return [Conflict(("strategy", "kind"), f"{kind!r} is not a strategy", step)]
    broken = [*_of_options(kind, options), *_of_shape(row, shape)]
    if not broken:
        broken += row.rule(row.settings(options), shape)
    if backend is not None:
        broken += _of_backend(backend, shape)
        if backend == "nccl" and keras_backend(kind) == "jax":
            message = "JAX uses NCCL directly, and the process group uses gloo"
            broken.append(Conflict(("strategy", "backend"), message, "leave it out"))
    return broken


def _of_options(kind: str, options: Mapping[str, Any]) -> Iterator[Conflict]:
    row = STRATEGIES[kind]
    for name, value in options.items():
        at = ("strategy", name)
        option = row.options.get(name)
        if option is None:
            owners = [owner for owner, its in STRATEGIES.items() if name in its.options]
            message, step = "no such setting", _meant(name, row.options, "settings")
            if owners:
                why = f": {row.lacks[name]}" if name in row.lacks else ""
                have = f"{', '.join(owners)} {'has' if len(owners) == 1 else 'have'} it"
                message = f"strategy {kind} has no setting {name}; {have}"
                step = f"leave it out{why}"
            yield Conflict(at, message, step)
        elif value is None and option.default is None:
            continue
        elif not option.takes(value):
            default = json.dumps(option.default, default=dict)
            yield Conflict(at, f"{value!r} is not {option.expected}", f"leave it out for {default}")
        elif option.min and value < option.min:
            default = json.dumps(option.default, default=dict)
            yield Conflict(at, f"{value} is less than {option.min}", f"leave it out for {default}")


def _of_shape(row: StrategyRow, shape: Shape) -> Iterator[Conflict]:
    nproc, gpus, master = shape.nproc_per_node, shape.gpus, shape.master_gpus
    if shape.world_size < 1:
        yield Conflict(("replicas",), f"{shape}: no process would train", "set both to at least 1")
    if gpus and row.whole_node and nproc != 1:
        yield Conflict(
            ("replicas", "nproc_per_node"),
            f"{counted(nproc, 'process', 'es')} in a pod whose {counted(gpus, 'GPU')} one process"
            " drives",
            "leave it out",
        )
    elif gpus and not row.whole_node and nproc != gpus:
        yield Conflict(
            ("replicas", "nproc_per_node"),
            f"{counted(nproc, 'process', 'es')} in a pod of {counted(gpus, 'GPU')}: one process"
            f" drives one GPU",
            f"set it to {gpus}, or leave it out",
        )
    if row.uniform and master is not None and master != gpus:
        yield Conflict(
            ("resources", "master", "gpus"),
            f"{counted(master, 'GPU')} on the Master and {gpus} on each Worker, but nproc_per_node"
            f" is one number for all pods",
            f"set it to {gpus}, or leave it out",
        )


def _of_backend(backend: str, shape: Shape) -> Iterator[Conflict]:
    if backend in GONE:
        step = "use gloo on CPUs or nccl on GPUs"
        yield Conflict(("strategy", "backend"), f"{backend!r} {GONE[backend]}", step)
    elif backend not in BACKENDS:
        step = _meant(backend, BACKENDS, "backends")
        yield Conflict(("strategy", "backend"), f"{backend!r} is not a backend", step)
    elif backend == "nccl" and shape.gpus < shape.nproc_per_node:
        yield Conflict(
            ("strategy", "backend"),
            f"'nccl' needs a GPU for each process, and a node has {shape.gpus} for"
            f" {shape.nproc_per_node}",
            "set resources.gpus, or use gloo",
        )


def _meant(word: str, names: Iterable[str], plural: str) -> str:
    return did_you_mean(word, names, f"valid {plural}: {', '.join(names)}")
