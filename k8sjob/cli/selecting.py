"""Which jobs or lines are meant: by labels (a cluster reads these itself), or by age."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["ago", "selector", "selector_option"]

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_KEY: Final = r"[A-Za-z0-9][\w./-]*"
_VALUE: Final = r"[\w.-]*"
_TERM: Final = re.compile(
    rf"\s*(?:(?P<set>{_KEY})\s+(?P<in>in|notin)\s*\((?P<values>[\w.,\s-]*)\)"
    rf"|(?P<key>{_KEY})\s*(?P<is>==?|!=)\s*(?P<value>{_VALUE})"
    rf"|(?P<absent>!?)\s*(?P<there>{_KEY}))\s*(?:,|$)"
)

selector_option = click.option(
    "-l",
    "--selector",
    "labels",
    metavar="SELECTOR",
    default="",
    help="Only jobs with these labels: team=vision, 'stage in (dev, test)', !draft.",
)


def selector(text: str) -> Callable[[Mapping[str, str]], bool]:
    """Whether labels fit a selector as kubectl takes it; an empty one takes all.

    Raises:
        click.UsageError: it is none.
    """
    tests, at = list[re.Match[str]](), 0
    while at < len(text):
        term = _TERM.match(text, at)
        if term is None:
            raise click.UsageError(
                f"-l {text!r}: {text[at:]!r} is no selector; write key=value, key!=value,"
                " key in (a, b), key notin (a, b), key or !key, with commas between"
            )
        tests.append(term)
        at = term.end()
    return lambda labels: all(_holds(term, labels) for term in tests)


def _holds(term: re.Match[str], labels: Mapping[str, str]) -> bool:
    if term["set"]:
        values = {value.strip() for value in term["values"].split(",")}
        return (labels.get(term["set"]) in values) == (term["in"] == "in")
    if term["key"]:
        return (labels.get(term["key"]) == term["value"]) == (term["is"] != "!=")
    return (term["there"] in labels) == (not term["absent"])


def ago(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> datetime | None:
    """The moment that lies as long ago as `90s`, `5m`, `2h`, `1d` say."""
    if value is None:
        return None
    match = re.fullmatch(r"([0-9]{1,6})([smhd])", value)
    if not match:
        raise click.BadParameter(f"{value!r} is not a duration; write 90s, 5m, 2h or 1d")
    return datetime.now(UTC) - timedelta(seconds=int(match[1]) * _UNITS[match[2]])
