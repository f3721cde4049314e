"""The command that is started in each replica, and its environment."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, Strict
from pydantic_core.core_schema import no_info_before_validator_function

from k8sjob.contract import RUNTIME_HOME
from k8sjob.findings import invalid
from k8sjob.kube.quantity import parse
from k8sjob.printed_metrics import Template
from k8sjob.spec.base import FROZEN_EMPTY, FrozenMap, Part, doc, refuse
from k8sjob.spec.values import Duration, EnvName, Memory, ObjectName, Text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.findings import Finding

_OPERATOR: Final = frozenset(
    {"MASTER_ADDR", "MASTER_PORT", "PYTHONUNBUFFERED", "RANK", "WORLD_SIZE"}
)
_AGENT: Final = frozenset({"GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"})


_LAUNCHERS: Final = ("accelerate", "deepspeed", "mpirun", "torchrun")


def shell_words(text: str) -> list[str]:
    """A command line as a shell splits it; none where a quote is never closed."""
    try:
        return shlex.split(text)
    except ValueError:
        return []


def started_by(line: str) -> dict[str, Any]:
    """The fields of `run` that start what a command line starts."""
    command = shell_words(line) or [line]
    python = re.fullmatch(r"python[0-9.]*", command[0]) is not None
    match command[1:] if python else command:
        case ["-m", module, *args] if python:
            start = {"module": module}
        case [script, *args] if script.endswith(".py"):
            start = {"script": script}
        case _:
            return {"command": command}
    return {**start, "args": args} if args else start


def _script(value: str) -> str:
    if not value or value.startswith("-") or not value.isprintable():
        refuse(f"{value!r} is not a script", "write its path inside the image, such as main.py")
    started = started_by(value)
    is_line = started.keys() != {"command"} or started["command"][0] in _LAUNCHERS
    if is_line and started != {"script": value}:
        from k8sjob.yamldoc import flow  # noqa: PLC0415 - YAML is not needed for specs from Python

        fields = " and ".join(f"{field}: {flow(argument)}" for field, argument in started.items())
        refuse(f"{value!r} is a command line", f"write {fields}")
    if ".." in value.split("/"):
        refuse(
            f"{value!r} is outside image.context, the folder that is copied to /app",
            "set image.context to a folder that contains the script, and write the path inside it",
        )
    return value


def _module(value: str) -> str:
    if not all(part.isidentifier() for part in value.split(".")):
        refuse(f"{value!r} is not a module", "write its dotted name, such as pkg.train")
    return value


def _template(value: str) -> str:
    try:
        Template(value)
    except ValueError as error:
        message, _, next_step = str(error).partition("; ")
        refuse(f"{value!r}: {message}", next_step)
    return value


class _OrFlag:
    """Reads true and false as other values; in the JSON Schema, too."""

    def __init__(self, on: Any, off: Any) -> None:
        self._values = {True: on, False: off}

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """The part's, after a flag is replaced."""
        return no_info_before_validator_function(
            lambda value: self._values[value] if isinstance(value, bool) else value,
            handler(source),
        )

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        """The part's, and a boolean."""
        return {"anyOf": [{"type": "boolean"}, *handler(schema)["anyOf"]]}


class EnvFrom(Part):
    """All keys of a Secret or a ConfigMap as variables, by reference: values are never rendered."""

    secret: ObjectName | None = doc("A Secret in the job's namespace.", "wandb-key", default=None)
    config_map: ObjectName | None = doc(
        "A ConfigMap in the job's namespace.", "training-settings", default=None
    )

    def rules(self) -> Iterator[Finding]:
        """Exactly one source."""
        if (self.secret is None) == (self.config_map is None):
            count = "both are" if self.secret else "neither is"
            yield invalid((), f"secret and config_map: {count} given", "write exactly one")


class Run(Part):
    """The training: exactly one of script, module and command."""

    script: Annotated[Text, AfterValidator(_script)] | None = doc(
        "A Python file, relative to /app in the image.", "main.py", default=None
    )
    module: Annotated[Text, AfterValidator(_module)] | None = doc(
        "A Python module, started as with `python -m`.", "pkg.train", default=None
    )
    command: tuple[Text, ...] | None = doc(
        "A program and its arguments, started directly, without k8sjob's agent.",
        ["torchrun", "main.py"],
        default=None,
    )
    args: tuple[Text, ...] = doc(
        "Arguments of the script, module or command.", ["--epochs", 5, "--lr", 0.1], default=()
    )
    env: FrozenMap[EnvName, Text] = doc(
        "Environment variables; numbers become text, booleans are refused. For secrets use"
        " env_from.",
        {"OMP_NUM_THREADS": 4, "NCCL_DEBUG": "INFO"},
        default=FROZEN_EMPTY,
    )
    env_from: tuple[EnvFrom, ...] = doc(
        "Secrets and ConfigMaps whose keys become variables.", [{"secret": "wandb-key"}], default=()
    )
    metrics: Annotated[
        tuple[Annotated[Text, AfterValidator(_template)], ...] | None, _OrFlag(None, ())
    ] = doc(
        "The f-strings with which a script without session() prints its metrics; null: the formats"
        " of known libraries; false: its output is not read.",
        ["step {step}/{steps} {} loss={loss:.4f}"],
        default=None,
    )
    local_rank_arg: Literal["--local_rank", "--local-rank"] | None = doc(
        "Pass each process its local rank as this argument, for scripts that parse it.",
        "--local-rank",
        default=None,
    )
    rendezvous_timeout: Duration = doc(
        "How long to wait until all ranks have joined.", "10m", unit="time", default=600
    )
    collective_timeout: Duration = doc(
        "How long a collective may take before it fails.", "10m", unit="time", default=600
    )
    hang_timeout: Duration | None = doc(
        "How long a rank may make no progress (in a script without session(): wait in a"
        " collective) before all ranks end with exit code 140; 0: no limit; null: 10m (without"
        " session(): as long as torch's gloo waits, 30m).",
        "10m",
        unit="time",
        default=None,
    )

    def rules(self) -> Iterator[Finding]:
        """Exactly one thing to start, no variable that would be overridden."""
        names = ("script", "module", "command")
        starts = [name for name in names if getattr(self, name) is not None]
        if len(starts) != 1:
            named = " and ".join(starts) or "none is"
            yield invalid((), f"{named} given", "write exactly one of script, module and command")
        if self.command is not None and not (self.command and self.command[0]):
            yield invalid(
                ("command",), "the command is empty", "write the program and its arguments"
            )
        if self.command is not None and self.local_rank_arg is not None:
            yield invalid(
                ("local_rank_arg",),
                f"{self.local_rank_arg!r} is added by k8sjob's agent, which does not start a"
                " command",
                "use script or module, or leave it out",
            )
        if self.command is not None and self.metrics:
            yield invalid(
                ("metrics",),
                "k8sjob's agent, which does not start a command, reads the output",
                "use script or module, or leave it out",
            )
        for name in ("rendezvous_timeout", "collective_timeout"):
            if not getattr(self, name):
                yield invalid((name,), "0s leaves no time", "write a duration, such as 10m")
        for name, value in self.env.items():
            if reason := self._reserved(name, value):
                yield invalid(("env", name), *reason)

    def _reserved(self, name: str, value: str) -> tuple[str, str] | None:
        """Why a job cannot set a variable, and the next step; None: it can."""
        if name in _OPERATOR or name.startswith("PET_"):
            return f"{value!r} would be overridden: the job's controller sets {name}", "remove it"
        if name in _AGENT or name.startswith("K8SJOB_"):
            return f"{value!r} would be overridden: k8sjob sets {name} itself", "remove it"
        if name == "PYTHONPATH" and not self.command and RUNTIME_HOME not in value.split(":"):
            path = ":".join(part for part in (RUNTIME_HOME, value) if part)
            return f"{value!r} would hide k8sjob's runtime", f"write {path!r}"
        return None


class Preflight(Part):
    """What the nodes prove before the program starts; see docs/how-to/preflight.md."""

    timeout: Duration = doc(
        "How long the checks may take once all ranks are there.", "30s", unit="time", default=10
    )
    max_slowdown: Annotated[float, Strict(), Field(gt=1, le=1000)] = doc(
        "Refuse a node that is more than so many times slower than the median of the nodes, in"
        " matrix products or in the better one of its links.",
        1.5,
        unit="times",
        default=3.0,
    )
    min_bandwidth: Memory | None = doc(
        "Bandwidth of an all-reduce of all ranks, in bytes a second (the bus bandwidth of"
        " nccl-tests), below which the job does not start; null: any.",
        "10Gi",
        unit="bytes",
        default=None,
    )

    def rules(self) -> Iterator[Finding]:
        """There is time."""
        if not self.timeout:
            yield invalid(("timeout",), "0s leaves no time", "write a duration, such as 10s")

    @property
    def settings(self) -> dict[str, Any]:
        """The same for the runtime, in seconds and bytes."""
        least = {"min_bandwidth": int(parse(self.min_bandwidth))} if self.min_bandwidth else {}
        return {"timeout": self.timeout, "max_slowdown": self.max_slowdown, **least}


AnyPreflight = Annotated[Preflight | None, _OrFlag({}, None)]
"""A preflight, true for one with its defaults, false and null for none."""
