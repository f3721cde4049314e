"""Arguments and options that several commands share."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


image_option = click.option(
    "--image", metavar="REF", help="The image that the replicas run, preferably by digest."
)
onto_option = click.option(
    "--onto",
    metavar="REF",
    help="Add the code to this image, which has the job's dependencies, instead of the base.",
)
build_option = click.option(
    "--build",
    "builds",
    is_flag=True,
    help="Build the image with the job's dependencies first, unless it exists.",
)
plain_http_option = click.option(
    "--plain-http",
    multiple=True,
    metavar="HOST",
    envvar="K8SJOB_PLAIN_HTTP",
    help="A registry (host[:port]) that has no TLS; may be given more than once.",
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
    *formats: str, text: str = "Output format."
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option `-o`; the first of the formats is the default."""
    kinds = click.Choice(formats)
    return click.option(
        "-o", "--output", type=kinds, default=formats[0], show_default=True, help=text
    )


def view_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options -o, -v and --no-logs of a command that follows a job."""
    formats = "auto: a live screen in a terminal, else plain lines. json: one event per line."
    no_logs = click.option(
        "--no-logs", is_flag=True, help="Show only the job's state, without output and progress."
    )
    verbose = click.option(
        "-v", "--verbose", is_flag=True, help="Also show library frames in tracebacks."
    )
    return format_option("auto", "plain", "json", text=formats)(verbose(no_logs(command)))


def source_name(file: Path) -> str:
    """The name of a file in messages."""
    return "<stdin>" if str(file) == "-" else str(file)


_KEY: Final = r"[A-Za-z0-9][\w./-]*"
_VALUE: Final = r"[\w.-]*"
_TERM: Final = (
    rf"\s*+(?:(?P<set>{_KEY})\s+(?P<in>in|notin)\s*\((?P<values>[\w.,\s-]*)\)"
    rf"|(?P<key>{_KEY})\s*(?P<is>==?|!=)\s*(?P<value>{_VALUE})"
    rf"|(?P<absent>!?)\s*(?P<there>{_KEY}))\s*(?:,|$)"
)


def selector(text: str) -> Callable[[Mapping[str, str]], bool]:
    """A test of labels by a selector in kubectl's syntax; an empty one fits all.

    Raises:
        click.UsageError: it is not a selector.
    """
    if not text:  # mostly there is none, and the pattern takes long to compile
        return lambda _labels: True
    pattern, terms, at = re.compile(_TERM), list[re.Match[str]](), 0
    while at < len(text):
        term = pattern.match(text, at)
        if term is None:
            raise click.UsageError(
                f"-l {text!r}: {text[at:]!r} is not a selector; write key=value, key!=value,"
                " key in (a, b), key notin (a, b), key or !key, with commas between"
            )
        terms.append(term)
        at = term.end()
    return lambda labels: all(_holds(term, labels) for term in terms)


def _holds(term: re.Match[str], labels: Mapping[str, str]) -> bool:
    if term["set"]:
        values = {value.strip() for value in term["values"].split(",")}
        return (labels.get(term["set"]) in values) == (term["in"] == "in")
    # As in Kubernetes, != and notin also fit objects without the label.
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
