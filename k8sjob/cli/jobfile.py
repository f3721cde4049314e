"""The job that a command is given: a file, and what the command line changes in it.

What reads the file is loaded when it is read: a push often remembers what the file says.
"""

from __future__ import annotations

import re
import shlex
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from k8sjob.cli.output import print_status
from k8sjob.contract import JOB_FILE
from k8sjob.findings import field_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from k8sjob.cli.find_job import Place
    from k8sjob.spec import JobSpec
    from k8sjob.spec.changes import Change

_ARGS: Final = "k8sjob.args"
_SHORT_OPTIONS: Final = {
    "name": ("name", "NAME", str, "The job's name."),
    "workers": ("replicas.workers", "N", int, "Workers, in addition to the Master."),
    "nproc": ("replicas.nproc_per_node", "N", int, "Processes in each replica."),
    "gpus": ("resources.gpus", "N", int, "GPUs of each replica."),
}
"""Options for the fields that are changed most: field, metavar, type, help."""
AUTO: Final = "auto"


def target_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options --target and --runtime."""
    from k8sjob.targets.jobs import TARGETS  # noqa: PLC0415 - see the module

    text = "The runtime of the platform that the job is laid over, instead of the file's."
    command = click.option("--runtime", metavar="NAME", help=text)(command)
    kinds = click.Choice([*(target.name for target in TARGETS), AUTO])
    text = "The kind of object that the job becomes, instead of the file's. auto: the first kind"
    return click.option("--target", type=kinds, help=f"{text} that the cluster can run.")(command)


class JobFile(NamedTuple):
    """A job as the command line names it.

    Attributes:
        path: a job.yaml, a folder with one, a script, or "-".
        changes: of its fields.
    """

    path: Path
    changes: tuple[Change, ...] = ()

    def load(self, *, local: bool = False) -> JobSpec:
        """The spec; see k8sjob.spec.load."""
        from k8sjob.spec.load import load  # noqa: PLC0415 - see the module

        return load(self.path, self.changes, local=local)

    def located(self) -> AbstractContextManager[None]:
        """Gives errors about the spec their lines; see k8sjob.spec.load.located."""
        from k8sjob.spec.load import located  # noqa: PLC0415 - see the module

        return located(self.path, self.changes)

    @property
    def folder(self) -> Path:
        """The folder that the relative paths of the job start from."""
        from k8sjob.spec.load import folder_of  # noqa: PLC0415 - see the module

        return folder_of(self.path)

    def words(self, spec: JobSpec) -> list[str]:
        """The command line that names this job again."""
        from k8sjob.yamldoc import flow  # noqa: PLC0415 - see the module

        named = [str(self.path)]
        for change in self.changes:
            value = list(spec.run.args) if change.adds else change.value
            named += ["--set", f"{field_path(change.path)}={'' if value is None else flow(value)}"]
        return named


def _fields(_ctx: click.Context, _option: click.Parameter, incomplete: str) -> list[str]:
    """Completes the names of fields, and values where there are a few."""
    from k8sjob.spec import JobSpec  # noqa: PLC0415 - see the module
    from k8sjob.spec.base import field_paths  # noqa: PLC0415 - the same
    from k8sjob.spec.changes import path_of  # noqa: PLC0415 - the same
    from k8sjob.spec.errors import field_values  # noqa: PLC0415 - the same

    field, equals, _ = incomplete.partition("=")
    words = (
        [f"{field}={value}" for value in field_values(JobSpec, path_of(field))]
        if equals
        else [f"{field_path(path)}=" for path in field_paths(JobSpec)]
    )
    return [word for word in dict.fromkeys(words) if word.startswith(incomplete)]


def _parsed(
    _ctx: click.Context, _option: click.Parameter, texts: tuple[str, ...]
) -> tuple[Change, ...]:
    if not texts:
        return ()
    from k8sjob.spec.changes import Change  # noqa: PLC0415 - see the module

    changes = tuple(Change.parse(text) for text in texts)
    if Change(("target",), "auto") in changes:
        raise click.UsageError(
            "--set target=auto: a job.yaml names a target; use --target auto, which submit, diff"
            " and doctor have"
        )
    return changes


set_option = click.option(
    "--set",
    "sets",
    metavar="FIELD=VALUE",
    multiple=True,
    callback=_parsed,
    shell_complete=_fields,
    help="Change a field of the file: replicas.workers=3; may be given more than once.",
)


class JobCommand(click.Command):
    """A command whose words after `--` are arguments of the job's script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does, except for those words."""
        if "--" in args:
            at = args.index("--")
            args, ctx.meta[_ARGS] = args[:at], args[at + 1 :]
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name
            # A short option may stand in a bundle, or have its value attached: -n2.
            pattern = re.compile(re.escape(name) + ("" if len(name) == 2 else "(=|$)"))
            at = next((at for at, word in enumerate(words) if pattern.match(word)), 0)
            # Only behind a script may an unknown option be the script's.
            if not any(word.endswith((".py", ".ipynb")) for word in words[:at]):
                raise
            line = shlex.join([*words[:at], "--", *words[at:], *ctx.meta.get(_ARGS, ())])
            message = f"no such option {name}; if it is the script's: {ctx.command_path} {line}"
            raise click.UsageError(message, ctx) from None

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """The usage line."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGS]"]


def script_args() -> Sequence[str]:
    """The words after `--`."""
    args: Sequence[str] = click.get_current_context().meta.get(_ARGS, ())
    return args


def _short_changes(options: dict[str, Any]) -> Iterator[Change]:
    """The changes of short options, which are taken out of all options, and of words after `--`."""
    fields = {option: field for option, (field, *_) in _SHORT_OPTIONS.items()}
    values = {
        option: (field, value)
        for option, field in {**fields, "runtime": "runtime"}.items()
        if (value := options.pop(option, None)) is not None
    }
    if values or script_args():
        from k8sjob.spec.changes import Change  # noqa: PLC0415 - see the module

        for option, (field, value) in values.items():
            yield Change(tuple(field.split(".")), value, option=f"--{option}")
        if args := script_args():
            yield Change(("run", "args"), list(args), adds=True)


def job_command(
    name: str, *, required: bool = True
) -> Callable[[Callable[..., Any]], click.Command]:
    """A command of that name with the argument FILE and the options that change it.

    Its function gets them as a JobFile called `job`.

    Args:
        name: as it is typed.
        required: FILE is job.yaml where none is given; else `job` may be None.
    """

    def decorate(command: Callable[..., Any]) -> click.Command:
        @wraps(command)
        def with_job(file: Path | None, sets: tuple[Change, ...], **options: Any) -> Any:
            # Applied in this order: --set first, then the short options.
            changes = [*sets, *_short_changes(options)]
            if file is None and not (required or changes):
                return command(job=None, **options)
            return command(job=JobFile(file or Path(JOB_FILE), tuple(changes)), **options)

        wrapped: Callable[..., Any] = with_job
        for option, (_, metavar, kind, text) in reversed(_SHORT_OPTIONS.items()):
            wrapped = click.option(f"--{option}", metavar=metavar, type=kind, help=text)(wrapped)
        path = click.Path(path_type=Path, allow_dash=True)
        wrapped = click.argument("file", required=False, type=path)(set_option(wrapped))
        return click.command(name, cls=JobCommand)(wrapped)

    return decorate


def with_target(spec: JobSpec, target: str | None, place: Place) -> JobSpec:
    """The spec with the target of the option; prints what `auto` has chosen."""
    if target == AUTO:
        from k8sjob.jobs.auto_target import choose_target  # noqa: PLC0415 - few ask for it

        spec, why = choose_target(spec, place.connect(spec.namespace))
        print_status(f"target {spec.target}: {why}")
        return spec
    return spec.with_(target=target) if target else spec


def old_base(spec: JobSpec, *, linted: bool = False) -> Iterator[str]:
    """A remark on a base that is older than the runtime needs (see lint), or than torch here."""
    base = getattr(spec.image, "base", None)
    if not (base and spec.uses_agent):
        return
    from k8sjob.checks.base_images import too_old  # noqa: PLC0415 - of no use for most jobs
    from k8sjob.checks.distributions import installed_version  # noqa: PLC0415 - the same

    torch = installed_version("torch").partition("+")[0]
    # Lint reports the runtime's own limit itself, so it is not repeated beside lint.
    if (why := too_old(base, torch)) and not (linted and too_old(base)):
        yield f"image.base: {base} has {why}; use a newer base"
