"""Facts about a training script: its calls, imports, sessions, wrapped models, and values."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from k8sjob.checks.lint.script_code import Code, constant, is_main_guard, parameters
from k8sjob.checks.lint.script_origins import Origins
from k8sjob.checks.lint.script_ranks import Ranks
from k8sjob.rules import Hit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from k8sjob.checks.lint.script_modules import Function, Module

_FRAMEWORKS: Final = (
    "accelerate colossalai composer deepspeed detectron2 determined fairseq fastai horovod "
    "ignite lightning megatron mmcv mmengine monai pytorch_lightning ray torchtune transformers "
    "trl"
)
MANAGED: Final = frozenset(_FRAMEWORKS.split())
"""Frameworks that make the process group and divide the data by themselves."""
_KNOWN: Final = (
    "cv2 datasets dotenv einops fire h5py huggingface_hub joblib k8sjob keras loguru matplotlib "
    "mlflow nltk numpy omegaconf pandas PIL polars psutil pyarrow requests rich safetensors "
    "scipy seaborn sentencepiece skimage sklearn tensorboard tensorboardX tiktoken timm "
    "tokenizers torch torchaudio torchdata torchinfo torchmetrics torchtext torchvision tqdm "
    "typer typing_extensions wandb yaml"
)
MAKES_GROUP: Final = frozenset({"init_process_group", "init_device_mesh", "init_rpc"})
_LIBRARIES: Final = frozenset(_KNOWN.split())
"""Known to make no process group behind the script's back."""
FORWARD: Final = "forward"
"""The call of a DistributedDataParallel model: it communicates if the model has buffers."""
_SESSION: Final = (
    "all_reduce barrier broadcast fit gather load main_first prepare reduce save save_model "
    "should_stop"
)
_ACCELERATOR: Final = (
    "backward gather gather_for_metrics local_main_process_first main_process_first "
    "pad_across_processes reduce wait_for_everyone"
)
METHODS: Final[Mapping[str, frozenset[str]]] = {
    "session": frozenset(_SESSION.split()),
    "run": frozenset({"batches", "epochs", "evaluate", "step"}),
    "accelerator": frozenset(_ACCELERATOR.split()),
    "trainer": frozenset({"evaluate", "fit", "predict", "save_checkpoint", "test", "train"}),
    "fsdp": frozenset({"state_dict", "clip_grad_norm_", FORWARD}),
    "ddp": frozenset({FORWARD}),
    "zero": frozenset({"consolidate_state_dict"}),
}
"""The methods of an object that all ranks call, by its kind."""
_CONSTRUCTORS: Final = (
    ("session", re.compile(r"k8sjob\.runtime\.(sessions\.)?(session|Job|job\.Job)")),
    ("run", re.compile(r"k8sjob\.runtime\.(training\.)?Run")),
    ("accelerator", re.compile(r"accelerate\.(\w+\.)*Accelerator")),
    ("trainer", re.compile(r"(lightning|pytorch_lightning|transformers|trl)\.(\w+\.)*\w*Trainer")),
    ("ddp", re.compile(r"torch\.(\w+\.)*DistributedDataParallel")),
    ("fsdp", re.compile(r"torch\.(\w+\.)*FullyShardedDataParallel")),
    ("zero", re.compile(r"torch\.(\w+\.)*ZeroRedundancyOptimizer")),
)
"""The constructors or types of each kind of object."""
_KERAS_MODEL: Final = re.compile(
    r"keras\.((models|saving)\.)?(Sequential|Model|Functional|\w+_model)|keras\.applications\..+"
)
_SAME: Final = frozenset({"to", "cuda", "cpu", "train", "eval", "float", "half", "bfloat16"})
"""Methods of a model that give the model."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The known facts about how a script is started; None is not known.

    Attributes:
        nodes: pods of the job.
        processes: processes in all pods together.
        gpus: GPUs of one pod.
        launcher: what starts the processes in a pod: "k8sjob" (its agent), "other" (torchrun and
            the like), "none" (a plain `python main.py`).
        local_rank_arg: the argument that k8sjob's agent appends, if any.
    """

    nodes: int | None = None
    processes: int | None = None
    gpus: int | None = None
    launcher: str | None = None
    local_rank_arg: str | None = None


class Script(Code):
    """The facts about a script that checks use.

    Attributes:
        setting: how it is started.
    """

    def __init__(self, files: Sequence[Module], setting: Setting) -> None:
        super().__init__(files)
        self.setting = setting

    def at(self, node: ast.expr | ast.stmt, message: str) -> Hit:
        """A hit at the beginning of a node."""
        return Hit(node.lineno, node.col_offset + 1, message, self.module(node).source)

    @cached_property
    def ranks(self) -> Ranks:
        """The ranks that its conditions let through."""
        return Ranks(self, self.origins)

    @cached_property
    def kinds(self) -> Kinds:
        """Its objects that are sessions, trainers or wrapped models."""
        return Kinds(self)

    @cached_property
    def origins(self) -> Origins:
        """The origins of its values."""
        return Origins(self)

    @cached_property
    def calls(self) -> Sequence[tuple[str, ast.Call]]:
        """Every call with the dotted name of what is called, in the order of the files."""
        calls = [(self.name(node.func), node) for node in self.nodes if isinstance(node, ast.Call)]
        files = {module: at for at, module in enumerate(self.files)}
        return sorted(calls, key=lambda c: (files[self.module(c[1])], c[1].lineno, c[1].col_offset))

    def torch_calls(self, *last: str) -> list[ast.Call]:
        """Calls of torch's functions or classes with one of these last names."""
        return [
            call
            for name, call in self.calls
            if name.startswith("torch.") and name.rpartition(".")[2] in last
        ]

    def method_calls(self, *last: str) -> list[ast.Call]:
        """Calls of anything with one of these last names."""
        return [call for name, call in self.calls if name.rpartition(".")[2] in last]

    @cached_property
    def modules(self) -> frozenset[str]:
        """Top-level names of the libraries that are imported: what is no local module."""
        local = {module.name.partition(".")[0] for module in self.files[1:]}
        tops = {name.partition(".")[0] for module in self.files for name in module.imports}
        return frozenset(tops - local - {""})

    @cached_property
    def targets(self) -> frozenset[str]:
        """The targets of all imported names."""
        return frozenset(name for module in self.files for name in module.aliases.values())

    @cached_property
    def makes_group(self) -> bool:
        """Whether the script makes a process group, by itself or through what it imports.

        What makes one need not be called by its name: `partial(dist.init_process_group, "gloo")`.
        """
        named = any(map(self.uses, MAKES_GROUP))
        named |= any(constant(node) in MAKES_GROUP for node in self.nodes)
        return named or self.has_runtime or bool(self.modules & MANAGED)

    @cached_property
    def has_runtime(self) -> bool:
        """Whether k8sjob's runtime is imported: its session makes the group."""
        return any(name.startswith("k8sjob.runtime") for name in self.targets)

    @cached_property
    def self_contained(self) -> bool:
        """Whether nothing is imported that could do a part of the work unseen."""
        return self.modules <= _LIBRARIES | sys.stdlib_module_names

    @cached_property
    def is_program(self) -> bool:
        """Whether running the file does something, as a module of functions does not."""
        return any(
            is_main_guard(stmt)
            or isinstance(stmt, ast.For | ast.While | ast.With)
            or (isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Call))
            for stmt in self.files[0].tree.body
        )

    @cached_property
    def trains(self) -> bool:
        """Whether it has a training loop of its own."""
        return bool(self.method_calls("backward"))

    @cached_property
    def keras_fits(self) -> Sequence[ast.Call]:
        """Calls of `fit` of Keras models, the session's left out."""
        alone = not self.modules & {"sklearn", "xgboost", "lightgbm", "tensorflow", "jax"}
        return [
            call
            for call in (self.method_calls("fit") if "keras" in self.modules else ())
            if isinstance(call.func, ast.Attribute) and self.kinds.of(call.func.value) != "session"
            if alone or self.is_keras_model(call.func.value)
        ]

    def is_keras_model(self, node: ast.expr) -> bool:
        """Whether a value is always a model of Keras, or of a subclass."""
        values = self.origins.of(node)

        def is_keras(value: ast.expr) -> bool:
            made = self.instance(value)
            bases = made.bases if made else [value.func] if isinstance(value, ast.Call) else []
            return any(_KERAS_MODEL.fullmatch(self.name(base)) for base in bases)

        return bool(values) and all(map(is_keras, values))


class Kinds:
    """The objects of a program that are sessions, trainers or wrapped models: keys of METHODS."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._known: dict[ast.expr, str] = {}

    def of(self, node: ast.expr) -> str:
        """The kind of an object; empty if it is not known."""
        if node not in self._known:
            self._known[node] = ""  # for one that is made of itself
            found = self._script.variable(node)
            if isinstance(node, ast.Call):
                self._known[node] = self._made(node)
            elif found and found.parameter_of and not found.values and isinstance(node, ast.Name):
                self._known[node] = self._parameter(found.parameter_of, node.id)
            elif found:
                self._known[node] = self._first(found.values)
        return self._known[node]

    def _first(self, values: Iterable[ast.expr]) -> str:
        if any(map(_is_unwrapped, values)):  # somewhere, so it may be here
            return ""
        return next(filter(None, map(self.of, values)), "")

    def _made(self, call: ast.Call) -> str:
        name = self._script.name(call.func)
        if kind := _kind_named(name):
            return kind
        if name == "torch.compile" and call.args:
            return self.of(call.args[0])
        if isinstance(call.func, ast.Attribute) and (owner := self.of(call.func.value)):
            if owner == "session" and call.func.attr == "prepare":
                return "run"
            return owner if call.func.attr in _SAME else ""
        return self._first(self._script.values(call))

    def _parameter(self, function: Function, name: str) -> str:
        """The kind passed as a parameter by the program's calls, else that of its type or name."""
        passed = self._script.origins.passed(function, name)
        if any(known := {self._passed(value) for value in passed if value}):
            return known.pop() if len(known) == 1 else ""
        annotation = next(one.annotation for one in parameters(function) if one.arg == name)
        if annotation is not None:
            return _kind_named(self._script.name(annotation))
        if name == "accelerator":
            return name if "accelerate" in self._script.modules else ""
        return {"job": "session", "run": "run"}.get(name, "") if self._script.has_runtime else ""

    def _passed(self, value: ast.expr) -> str:
        if _is_unwrapped(value):
            return "unwrapped"
        return self.of(value) or ("own" if self._script.instance(value) else "")


def _is_unwrapped(value: ast.expr) -> bool:
    return isinstance(value, ast.Attribute) and value.attr == "module"


def _kind_named(name: str) -> str:
    return next((kind for kind, made_by in _CONSTRUCTORS if made_by.fullmatch(name)), "")
