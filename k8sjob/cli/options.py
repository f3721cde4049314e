"""Arguments and options that several commands share; FILE, with what changes it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import click

from k8sjob.errors import field_path
from k8sjob.spec import JobSpec, load
from k8sjob.spec.errors import field_paths, field_values
from k8sjob.spec.load import Change, folder_of, located, steps
from k8sjob.spec.names import TargetName
from k8sjob.yamldoc import JOB_FILE, flow

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager


image_option = click.option(
    "--image", metavar="REF", help="The image that the replicas run, best with its digest."
)
onto_option = click.option(
    "--onto",
    metavar="REF",
    help="Add the code to this image, which has what the job installs, not to the base.",
)
build_option = click.option(
    "--build",
    "builds",
    is_flag=True,
    help="Build what the job installs first, unless it is built already.",
)
plain_http_option = click.option(
    "--plain-http",
    multiple=True,
    metavar="HOST",
    envvar="K8SJOB_PLAIN_HTTP",
    help="A registry (host[:port]) that has no TLS; may be given more than once.",
)
AUTO: Final = "auto"
target_option = click.option(
    "--target",
    type=click.Choice([*get_args(TargetName), AUTO]),
    help="The kind of object that the job becomes, instead of the file's. auto: the first that the"
    " cluster can take it as.",
)
selector_option = click.option(
    "-l",
    "--selector",
    "labels",
    metavar="SELECTOR",
    default="",
    help="Only jobs with these labels: team=vision, 'stage in (dev, test)', !draft.",
)


def format_option(
    *formats: str, text: str = "The format of the output."
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option `-o`; the first of the formats is the default."""
    kinds, first = click.Choice(formats), formats[0]
    return click.option("-o", "--output", type=kinds, default=first, show_default=True, help=text)


def view_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options -o, -v and --no-logs of a command that follows a job."""
    formats = "auto: a live screen in a terminal, else plain lines. json: one event a line."
    no_logs = click.option(
        "--no-logs", is_flag=True, help="Only the job's state: neither output nor progress."
    )
    verbose = click.option(
        "-v", "--verbose", is_flag=True, help="Show the frames of libraries in tracebacks, too."
    )
    return format_option("auto", "plain", "json", text=formats)(verbose(no_logs(command)))


def source_name(file: Path) -> str:
    """The name of a file in messages."""
    return "<stdin>" if str(file) == "-" else str(file)


_KEY: Final = r"[A-Za-z0-9][\w./-]*"
_VALUE: Final = r"[\w.-]*"
_TERM: Final = re.compile(
    rf"\s*(?:(?P<set>{_KEY})\s+(?P<in>in|notin)\s*\((?P<values>[\w.,\s-]*)\)"
    rf"|(?P<key>{_KEY})\s*(?P<is>==?|!=)\s*(?P<value>{_VALUE})"
    rf"|(?P<absent>!?)\s*(?P<there>{_KEY}))\s*(?:,|$)"
)


def selector(text: str) -> Callable[[Mapping[str, str]], bool]:
    """A test of labels by a selector in kubectl's syntax; an empty one fits all.

    Raises:
        click.UsageError: it is not a selector.
    """
    terms, at = list[re.Match[str]](), 0
    while at < len(text):
        term = _TERM.match(text, at)
        if term is None:
            raise click.UsageError(
                f"-l {text!r}: {text[at:]!r} is no selector; write key=value, key!=value,"
                " key in (a, b), key notin (a, b), key or !key, with commas between"
            )
        terms.append(term)
        at = term.end()
    return lambda labels: all(_holds(term, labels) for term in terms)


def _holds(term: re.Match[str], labels: Mapping[str, str]) -> bool:
    if term["set"]:
        values = {value.strip() for value in term["values"].split(",")}
        return (labels.get(term["set"]) in values) == (term["in"] == "in")
    if term["key"]:
        return (labels.get(term["key"]) == term["value"]) == (term["is"] != "!=")
    return (term["there"] in labels) == (not term["absent"])


def ago(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> datetime | None:
    """The moment that lies `90s`, `5m`, `2h` or `1d` in the past."""
    if value is None:
        return None
    match = re.fullmatch(r"([0-9]{1,6})([smhd])", value)
    if not match:
        raise click.BadParameter(f"{value!r} is not a duration; write 90s, 5m, 2h or 1d")
    seconds = {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
    return datetime.now(UTC) - timedelta(seconds=int(match[1]) * seconds)


# --- FILE, and what the command line changes in it ----------------------------------------------

_ARGS: Final = "k8sjob.args"
_SHORT: Final = {
    "name": ("name", "NAME", str, "The job's name."),
    "workers": ("replicas.workers", "N", int, "Replicas beside the Master."),
    "nproc": ("replicas.nproc_per_node", "N", int, "Processes in each replica."),
    "gpus": ("resources.gpus", "N", int, "GPUs of each replica."),
}
"""Options for the fields that are changed most: field, metavar, type, help."""


@dataclass(frozen=True, slots=True)
class JobFile:
    """A job as the command line names it.

    Attributes:
        path: a job.yaml, a folder with one, a script, or "-".
        changes: of its fields.
    """

    path: Path
    changes: tuple[Change, ...] = ()

    def load(self, *, here: bool = False) -> JobSpec:
        """The spec; see k8sjob.spec.load."""
        return load(self.path, self.changes, here=here)

    def located(self) -> AbstractContextManager[None]:
        """Gives errors about the spec their lines; see k8sjob.spec.load.located."""
        return located(self.path, self.changes)

    @property
    def folder(self) -> Path:
        """What the relative paths of the job start from."""
        return folder_of(self.path)

    def words(self, spec: JobSpec) -> list[str]:
        """The command line that names this job again."""
        named = [str(self.path)]
        for change in self.changes:
            value = list(spec.run.args) if change.adds else change.value
            named += ["--set", f"{field_path(change.path)}={'' if value is None else flow(value)}"]
        return named


def _fields(_ctx: click.Context, _option: click.Parameter, given: str) -> list[str]:
    """Completes the names of fields, and values where there are a few."""
    field, equals, _ = given.partition("=")
    found = (
        [f"{field}={value}" for value in field_values(JobSpec, steps(field))]
        if equals
        else [f"{field_path(path)}=" for path in field_paths(JobSpec)]
    )
    return [word for word in dict.fromkeys(found) if word.startswith(given)]


def _parsed(
    _ctx: click.Context, _option: click.Parameter, given: tuple[str, ...]
) -> tuple[Change, ...]:
    changes = tuple(Change.parse(text) for text in given)
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
        """As click does it, but for those words."""
        if "--" in args:
            at = args.index("--")
            args, ctx.meta[_ARGS] = args[:at], args[at + 1 :]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """The usage line."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGS]"]


def script_args() -> Sequence[str]:
    """The words after `--`."""
    found: Sequence[str] = click.get_current_context().meta.get(_ARGS, ())
    return found


def job_file_options(
    *, required: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The argument FILE and the options that change it, handed over as a JobFile called `job`.

    Args:
        required: FILE is job.yaml where none is given; else `job` may be None.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_job(file: Path | None, sets: tuple[Change, ...], **options: Any) -> Any:
            short = {name: options.pop(name) for name in _SHORT}
            changes = _changes(sets, short, script_args())
            if file is None and not (required or changes):
                return command(job=None, **options)
            return command(job=JobFile(file or Path(JOB_FILE), changes), **options)

        wrapped: Callable[..., Any] = with_job
        for name, (_, metavar, kind, text) in reversed(_SHORT.items()):
            wrapped = click.option(f"--{name}", metavar=metavar, type=kind, help=text)(wrapped)
        path = click.Path(path_type=Path, allow_dash=True)
        return click.argument("file", required=False, type=path)(set_option(wrapped))

    return decorate


def _changes(
    sets: Sequence[Change], short: dict[str, Any], args: Sequence[str]
) -> tuple[Change, ...]:
    found = [*sets]
    for name, value in short.items():
        if value is not None:
            found.append(Change(tuple(_SHORT[name][0].split(".")), value))
    if args:
        found.append(Change(("run", "args"), list(args), adds=True))
    return tuple(found)
