"""Metrics in the lines that a training script prints, by templates or in the formats of libraries.

It needs the standard library alone, as the contract does, and travels inside every job's image.
"""

from __future__ import annotations

import math
import re
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from k8sjob.contract import EventKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Numbers: TypeAlias = "dict[str, float]"
    Report: TypeAlias = "tuple[EventKind, Numbers]"

MAX_LINE: Final = 1000
"""Characters of a line that are read: a pattern takes up to quadratic time."""
_MAX_METRICS: Final = 32
_EVERY_S: Final = 1.0
"""Seconds between two reports of the same metrics, as between those of a session."""
_FIRST: Final = 100
_FIRST_EVERY_S: Final = 0.05
"""The same of the first _FIRST reports, so that a short training has a curve."""
_POSITION: Final = ("epoch", "epochs", "step", "steps")
_NO_METRICS: Final = {*_POSITION, "iter", "iteration", "eta", "v_num", "batch_size"}
# Possessive: the digits that were read are not given back one by one.
_NUMBER: Final = r"[-+]?(?:\d++(?:,\d{3})*+(?:\.\d*+)?+|\.\d++|nan|inf(?:inity)?+)(?:e[-+]?\d++)?+"
_PIECE: Final = re.compile(r"(\{\{|\}\}|\{[^{}]*\}|\s+)")
_FIELD: Final = re.compile(r"\{([A-Za-z_][\w@./-]*)(\s*=)?\s*(?:![rsa])?(?::[^{}]*)?\}")
_PAIR: Final = re.compile(
    # `loss: 0.5`, `'loss': 0.5`, `max mem=5990`; of known names without a sign, too: `Loss 0.5`.
    r"(?<![\w@./-])(?:['\"]?(?P<name>[a-z][\w@./-]{0,40}(?: [a-z][\w-]{0,20})?)['\"]?\s?[:=]\s{0,4}"
    r"|(?P<known>(?:[a-z]+ )?(?:loss|acc(?:uracy)?|acc@\d|top-?\d|lr|ppl|mfu|f1))\s{1,4})"
    # Not the first digits of a time, of a fraction or of a number with a unit.
    rf"(?P<quote>['\"])?(?P<number>{_NUMBER})(?![\w:/]|,\d)",
    re.IGNORECASE,
)
_CONTROL: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Template:
    """A line of a script as the f-string that prints it: `epoch {epoch} loss={loss:.4f}`.

    A field with a name is a number, and `{}` is any text. What is between such texts is searched
    from left to right and never again, so that no line takes more than quadratic time.

    Raises:
        ValueError: it is no such text; the message has the next step.
    """

    def __init__(self, text: str) -> None:
        patterns, self._names, words, before = [""], list[str](), "", ""
        for piece in filter(None, _PIECE.split(text.strip())):
            field = _FIELD.fullmatch(piece)
            if piece == "{}":
                patterns.append("")
            elif field:
                name, shown = field.groups()
                if name in self._names:
                    raise ValueError(f"{{{name}}} is in it twice; write {{}} for one of them")
                if _FIELD.fullmatch(before):
                    raise ValueError(f"nothing is between {before} and {piece}; write a space")
                self._names.append(name)
                # An f-string pads a number: `{step:>6}`.
                start = r"\s*+" if patterns[-1] else r"(?<![\w.,])"
                shown = f"{re.escape(name)}\\s*+=\\s*+" if shown else start
                patterns[-1] += f"{shown}({_NUMBER})%?"
            elif piece.isspace():
                patterns[-1] += r"\s++"
            elif "{" in piece.replace("{{", "") or "}" in piece.replace("}}", ""):
                raise ValueError(f"{piece} is no field; write a name in braces, such as {{loss}}")
            else:
                literal = piece[:1] if piece in {"{{", "}}"} else piece
                patterns[-1] += re.escape(literal)
                words += literal
            before = piece
        if not self._names:
            raise ValueError("it has no field; write a name in braces for a number: loss={loss}")
        if not re.search(r"\w", words):
            raise ValueError("it fits every line with a number; write the words around the fields")
        # Atomic: a part is not searched again if the next one is missing.
        parts = "".join(f"(?>.*?{pattern})" for pattern in patterns if pattern)
        self._pattern = re.compile(parts, re.IGNORECASE)

    def read(self, line: str) -> Numbers | None:
        """The numbers of a line by their names; None for another line."""
        match = self._pattern.match(line)
        return match and dict(zip(self._names, map(_value, match.groups()), strict=True))


@cache
def _formats() -> list[tuple[str, str, re.Pattern[str]]]:
    """The rows of printed_metrics.tsv: kind, word, pattern."""
    text = Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8")
    rows = (line.split("\t") for line in text.splitlines() if not line.startswith("#"))
    return [(kind, word, re.compile(pattern, re.IGNORECASE)) for kind, word, pattern, _ in rows]


def _known(line: str) -> tuple[str, Numbers]:
    """The kind of a line in a known format, and its numbers; none for another line."""
    lower = line.lower()
    for kind, word, pattern in _formats():
        match = pattern.search(line) if word in lower else None
        if match is None:
            continue
        place = match.groupdict()
        numbers = dict(islice(_pairs(line, match.end(), place.get("split")), _MAX_METRICS))
        epoch = numbers.pop("epoch", None)
        if kind == "dict" and epoch is not None:
            place["epoch"] = epoch
        if kind == "bar" or (numbers and (kind != "dict" or epoch is not None)):
            position = {name: place[name] for name in _POSITION if place.get(name) is not None}
            return kind, numbers | {name: _value(str(text)) for name, text in position.items()}
    return "", {}


def _pairs(line: str, begin: int, split: str | None) -> Iterator[tuple[str, float]]:
    for pair in _PAIR.finditer(line, begin):
        name = "_".join((pair["name"] or pair["known"]).lower().split())
        if name == "epoch" or name not in _NO_METRICS:
            value = _value(pair["number"])
            # Transformers 5 quotes the numbers, and writes the fraction 1.0 of its epochs as '1'.
            value = float(value) if pair["quote"] else value
            yield f"{split.lower()}_{name}" if split else name, value


def _value(text: str) -> float:
    """A number of a line; a whole one stays an int, and one without end is infinite."""
    digits = text.replace(",", "")
    return int(digits) if digits.lstrip("+-").isdecimal() and len(digits) < 16 else float(digits)


class _Place(NamedTuple):
    """Where a training is, as in an event of progress: the epoch from 0, and 0 for not known."""

    epoch: int
    epochs: int
    step: int
    steps: int

    @property
    def behind(self) -> float:
        """Epochs that are behind."""
        return self.epoch + (min(self.step / self.steps, 1.0) if self.steps else 0.0)


class PrintedMetrics:
    """The reports of progress and metrics in the lines of one process, from its first one on.

    Args:
        templates: what the lines look like; None: as known libraries and examples print them.
    """

    def __init__(self, templates: Sequence[str] | None = None) -> None:
        self._templates = None if templates is None else [Template(text) for text in templates]
        self._first_epoch: int | None = None  # how the script counts: from 0 or from 1
        self._logged = self._placed = False
        self._bar, self._rounds = (0, 0), 0
        # Transformers prints epochs as a fraction, and the steps of all of them in a bar.
        self._fraction, self._epoch_steps, self._epochs = 0.0, 0, 0
        self._begin: tuple[float, float] | None = None  # epochs behind, and when
        self._last: _Place | None = None
        # the kind and the names of a line -> when it was reported, how often
        self._reported: dict[tuple[str, ...], tuple[float, int]] = {}
        self._held: dict[tuple[str, ...], tuple[_Place | None, Numbers]] = {}

    def read(self, line: str, now: float) -> list[Report]:
        """The reports that a line leads to; `now` in seconds."""
        line = _CONTROL.sub("", line[:MAX_LINE]) if "\x1b" in line else line[:MAX_LINE]
        kind, numbers = self._numbers(line)
        if not numbers:
            return []
        key = (kind, *sorted(numbers))
        place = self._place(kind, numbers)
        self._logged |= bool(numbers)
        last, count = self._reported.get(key, (-math.inf, 0))
        if now - last < (_FIRST_EVERY_S if numbers and count < _FIRST else _EVERY_S):
            self._held[key] = place, numbers
            return []
        self._held.pop(key, None)
        if len(self._reported) >= _FIRST:  # of a script whose names differ in each line
            self._reported.clear()
        self._reported[key] = now, count + 1
        return list(self._reports(place, numbers, now))

    def held_back(self, now: float) -> list[Report]:
        """The last reports of a training, which came too soon after those before them."""
        done = self._last.behind if self._last else 0.0
        lines = [line for line in self._held.values() if not line[0] or line[0].behind >= done]
        lines.sort(key=lambda line: line[0].behind if line[0] else math.inf)
        self._held.clear()
        return [report for line in lines for report in self._reports(*line, now)]

    def _numbers(self, line: str) -> tuple[str, Numbers]:
        if self._templates is None:
            return _known(line)
        fits = (numbers for template in self._templates if (numbers := template.read(line)))
        return "line", next(fits, {})

    def _reports(self, place: _Place | None, numbers: Numbers, now: float) -> Iterator[Report]:
        # A bar and an evaluation are not ahead of the last loss, and would take it back.
        last = (self._last.epoch, self._last.step) if self._last else (-1, 0)
        if place and ((place.epoch, place.step) > last or "loss" in numbers):
            self._last = place
            data: Numbers = dict(place._asdict())
            if "loss" in numbers:
                data["loss"] = numbers.pop("loss")
            if (eta := self._eta(place, now)) is not None:
                data["eta_s"] = eta
            yield EventKind.PROGRESS, data
        if numbers:
            yield EventKind.METRICS, numbers

    def _eta(self, place: _Place, now: float) -> float | None:
        if self._begin is None or place.behind < self._begin[0]:
            self._begin = place.behind, now
        first, since = self._begin
        if not place.epochs or place.behind <= first:
            return None
        remaining = max(place.epochs - place.behind, 0.0)
        return remaining * (now - since) / (place.behind - first)

    def _place(self, kind: str, numbers: Numbers) -> _Place | None:
        """Where a line is, which is taken out of its numbers; None where it does not say it."""
        position: Numbers = {name: numbers.pop(name) for name in _POSITION if name in numbers}
        epoch = position.get("epoch")
        if kind == "bar" and epoch is None:
            return self._of_bar(int(position["step"]), int(position.get("steps", 0)))
        if kind == "dict" and isinstance(epoch, float):
            return self._of_fraction(epoch)
        epochs, step, steps = (_count(position.get(name)) for name in _POSITION[1:])
        if epoch is None and not steps:
            numbers |= position  # steps of a run of unknown length are a metric beside the others
            return None
        self._placed = True
        if epoch is None:
            return _Place(0, 1, step, steps)
        if self._first_epoch is None:
            self._first_epoch = int(epoch != 0)
        if "step" not in position:
            # What an epoch came to is printed at its end, its number alone at its beginning.
            step = steps = int(bool(numbers))
        elif not steps:
            numbers |= position
            return None
        return _Place(max(_count(epoch) - self._first_epoch, 0), epochs, step, steps)

    def _of_bar(self, step: int, steps: int) -> _Place | None:
        """A bar without an epoch: of the whole run, or of one epoch after the other."""
        done, total = self._bar
        # Other lines say more. A bar of another length is of an evaluation, or of the data.
        is_other = total not in {0, steps} and (done < total or self._logged)
        if self._placed or is_other or not steps:
            return None
        self._rounds += step < done == total == steps
        self._bar = step, steps
        if self._fraction and step:
            self._epoch_steps = max(round(step / self._fraction), 1)
            self._epochs = max(math.ceil(steps * self._fraction / step - 0.05), 1)
            self._fraction = 0.0
        if not self._epoch_steps:
            return _Place(self._rounds, int(not self._rounds), step, steps)
        epoch = min(max(math.ceil(step / self._epoch_steps) - 1, 0), self._epochs - 1)
        return _Place(epoch, self._epochs, step - epoch * self._epoch_steps, self._epoch_steps)

    def _of_fraction(self, behind: float) -> _Place | None:
        """Epochs as Transformers prints them; how many steps they have shows in its bar."""
        if not 0 < behind < math.inf:
            return None
        self._fraction = behind
        if not self._epoch_steps:
            return _Place(0, 1, *self._bar) if self._bar[1] else None
        epoch = max(math.ceil(behind) - 1, 0)
        step = round((behind - epoch) * self._epoch_steps)
        return _Place(epoch, self._epochs, step, self._epoch_steps)


def _count(value: float | None) -> int:
    return int(value) if value is not None and 0 <= value < 2**53 else 0
