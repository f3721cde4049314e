"""`k8sjob logs`: what the replicas wrote, on stdout or in files."""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from contextlib import nullcontext
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import click
from rich.text import Text

from k8sjob.cli.find_job import Place, place_options
from k8sjob.cli.job_to_read import job_or_labels, read_job
from k8sjob.cli.options import ago, format_option
from k8sjob.cli.output import first_names, line, print_status
from k8sjob.contract import EVENT_MARK, Event, EventKind
from k8sjob.errors import K8sJobError
from k8sjob.observe.logs import MOST_AT_ONCE, logs, select
from k8sjob.observe.status import JobStatus, job_status
from k8sjob.observe.training import Progress
from k8sjob.sanitize import integer, safe_json, text
from k8sjob.view.follow import Interrupts, batches
from k8sjob.view.formats import position
from k8sjob.view.lines import LinePrinter, phrase, unstyled
from k8sjob.view.views import console_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from k8sjob.backends.api import LogLine
    from k8sjob.view.lines import Line

_FIELDS: Final = ("replica", "attempt", "timestamp", "text", "gap")
_CHUNK: Final = 1 << 20


def _pattern(
    _ctx: click.Context, _parameter: click.Parameter, value: str | None
) -> re.Pattern[str] | None:
    try:
        return None if value is None else re.compile(value)
    except (re.error, OverflowError, RecursionError) as error:
        raise click.BadParameter(
            f"{value!r} is not a regular expression: {error}; put a backslash before characters"
            r" that are meant as they are, as in '\[rank0\]'"
        ) from None


@click.command("logs")
@job_or_labels
@click.option(
    "-r",
    "--replica",
    "replicas",
    multiple=True,
    help="master-0, worker-2, or all of a role: worker.",
)
@click.option("--rank", "ranks", type=int, multiple=True, help="The replica of a process rank.")
@click.option("-f", "--follow", is_flag=True, help="Follow the output until the job ends.")
@click.option("-p", "--previous", is_flag=True, help="Show the output of the previous attempt.")
@click.option("--tail", type=click.IntRange(min=0), help="Only the last lines of each replica.")
@click.option(
    "--since", metavar="AGE", callback=ago, help="Only lines of the last 90s, 5m, 2h or 1d."
)
@click.option(
    "--grep",
    "pattern",
    metavar="REGEX",
    callback=_pattern,
    help='Only lines that match; "(?i)oom" ignores case. --tail counts these.',
)
@click.option("--timestamps", is_flag=True, help="Show the time of each line.")
@click.option(
    "--save",
    "folder",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write files to DIR, one per replica and attempt, instead of printing.",
)
@format_option("text", "json")
@place_options()
def logs_command(  # noqa: PLR0917 - click hands them over by name
    job: str | None,
    replicas: tuple[str, ...],
    ranks: tuple[int, ...],
    follow: bool,
    previous: bool,
    tail: int | None,
    since: datetime | None,
    pattern: re.Pattern[str] | None,
    timestamps: bool,
    folder: Path | None,
    output: str,
    place: Place,
) -> int:
    """Print what the replicas of a job (the newest without NAME) wrote, ordered by time.

    Lines of several replicas begin with the replica's name. Control sequences are removed; with -o
    json and in files, lines are unchanged; --grep looks at them as they are printed. A separate
    line marks output that the node has not kept. --save only appends to existing files: other
    output goes to new files next to them.
    """
    if folder and output == "json":
        raise click.UsageError("--save writes the lines as they are; omit -o json")
    backend, ref, snapshot = read_job(job, place)
    chosen = select(snapshot.job, replicas, ranks)
    # Each replica that is followed is a connection and a thread.
    if len(chosen) > MOST_AT_ONCE and (follow or tail is None) and not previous:
        print_status(
            f"following {chosen[0]} and the next {MOST_AT_ONCE - 1} of {len(chosen)} replicas;"
            " select others with -r"
            if follow
            else f"the lines of {len(chosen)} replicas are printed one replica after the other"
        )
    writers = set[str]()
    printer = _Printer(output, names=len(chosen) > 1, times=timestamps)
    fits = partial(_matches, pattern) if pattern else None
    lines = logs(
        backend, ref, chosen, follow=follow, previous=previous, since=since, tail=tail, fits=fits
    )
    saver = Saver(folder, ref.name, times=timestamps) if folder else nullcontext(printer)
    # An interrupt ends after the batch at hand, so that no file has half a line.
    with saver as shown, Interrupts() as interrupts:
        for batch in batches(lines):
            shown.show(batch)
            writers |= {log_line.replica for log_line in batch}
            if interrupts.count:
                break
    if interrupts.count and follow:
        print_status("\nDetached; run the same command to reattach")
    # With --follow or --since no output is an answer; without them a reader would wonder.
    elif not (follow or since or interrupts.count) and tail != 0:
        silent = [replica for replica in chosen if replica not in writers]
        for message in _waiting(job_status(snapshot), silent):
            print_status(message)
        if pattern and not writers:
            print_status(f"no line matches {pattern.pattern!r}")
    return interrupts.exit_code


def _waiting(status: JobStatus, silent: Sequence[str]) -> Iterator[str]:
    """Why replicas that have not run have no output; those that wait for the same together."""
    by_name = {replica.name: replica for replica in status.replicas}
    alike: dict[str, list[str]] = defaultdict(list)
    for name in silent:
        replica = by_name.get(name)
        if replica is None and not status.state.finished:
            alike[f"it has no pod, the job is {status.state}"].append(name)
        elif (
            replica
            and replica.exit_code is None
            and (replica.waiting or replica.phase == "Pending")
        ):
            alike[replica.situation].append(name)
    for why, names in alike.items():
        yield f"{first_names(names, 1)}: there is no output ({why}); -f waits for it"


class _Printer:
    """Writes log lines: for people as they read them, as JSON for programs."""

    def __init__(self, output: str, *, names: bool, times: bool) -> None:
        self._json, self._names, self._times = output == "json", names, times
        self._printer = LinePrinter()
        self._console = console_for(sys.stdout)

    def show(self, lines: Sequence[LogLine]) -> None:
        """Write the lines."""
        if not self._json:
            lines = [log_line for log_line in lines if not _is_printed(log_line)]
        if not lines:
            return
        if self._json:
            rows = ({key: getattr(log_line, key) for key in _FIELDS} for log_line in lines)
            sys.stdout.write("".join(safe_json(row) + "\n" for row in rows))
        elif self._console.is_terminal:
            texts = (Text.assemble(*self._line(log_line)) for log_line in lines)
            self._console.print(Text("\n").join(texts), soft_wrap=True)
        else:
            sys.stdout.write("".join([unstyled(self._line(log_line)) + "\n" for log_line in lines]))
        sys.stdout.flush()

    def _line(self, log_line: LogLine) -> Line:
        line = [(f"{text(log_line.timestamp)} ", "dim")] if self._times else []
        if self._names:
            line.append(self._printer.prefix(log_line.replica))
        return line + _shown_text(log_line)


def _matches(pattern: re.Pattern[str], log_line: LogLine) -> bool:
    return pattern.search(unstyled(_shown_text(log_line))) is not None


def _is_printed(log_line: LogLine) -> bool:
    """Whether it is an event alone of which the script's own line says all."""
    event = Event.decode(log_line.text) if log_line.text.startswith(EVENT_MARK) else None
    return event is not None and event.printed


def _shown_text(log_line: LogLine) -> Line:
    event = Event.decode(log_line.text, log_line.replica)
    if event and event.printed:  # behind the bar of a script that has not ended its line
        return [(text(log_line.text.partition(EVENT_MARK)[0]), "")]
    return _event_text(event) if event else [(text(log_line.text), "")]


def _event_text(event: Event) -> Line:
    """A runtime event as it is shown in the log of its replica."""
    if event.kind == EventKind.PROGRESS:
        return [("  ".join(position(Progress.of(event.data))), "")]
    if event.kind == EventKind.RESTARTING:
        return [(f"restart {integer(event.data.get('restart'))}", "yellow")]
    return phrase(event) or [(text(event.kind), "")]


class Saver:
    """Writes output to files in a folder, one per replica and attempt; a context manager.

    At the end the names of the files are printed.

    Nodes do not keep output, so a file may be all that is left of an attempt. Lines are written as
    the job wrote them, byte for byte. An existing file grows by what was written since; one with
    other lines (of an earlier pod, of a job of the same name) stays, and "-2" is added to the new
    one's name. While more may come the name ends in ".part", and still does after the process was
    killed. What is missing before the first line of a file is printed, and is not in it.

    Args:
        folder: created if missing.
        job: begins the names of the files.
        times: the time in front of each line.

    Attributes:
        saved: the files that have the lines.
    """

    def __init__(self, folder: Path, job: str, *, times: bool = False) -> None:
        self._folder, self._job, self._times = folder, job, times
        self._parts: dict[str, dict[int, Path]] = defaultdict(dict)
        self.saved: list[Path] = []

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        for replica, parts in self._parts.items():
            for attempt in sorted(parts):
                self._complete(replica, attempt)
        for path in sorted(self.saved):
            line(path)

    def show(self, lines: Sequence[LogLine]) -> None:
        """Take some lines; an attempt is complete when a line of the next one comes."""
        texts: dict[tuple[str, int], list[bytes]] = defaultdict(list)
        for log_line in lines:
            key = log_line.replica, log_line.attempt
            if (
                log_line.gap
                and key not in texts
                and log_line.attempt not in self._parts[log_line.replica]
            ):
                print_status(log_line.text)
                continue
            time = f"{log_line.timestamp} ".encode() if self._times else b""
            texts[key].append(time + log_line.written)
        for (replica, attempt), written in texts.items():
            parts = self._parts[replica]
            if attempt not in parts:
                parts[attempt] = self._begin(replica, attempt)
            try:
                # Others who may write into the folder could put a link in its place.
                flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
                with os.fdopen(os.open(parts[attempt], flags), "ab") as file:
                    file.writelines(written)
            except OSError as error:
                self._parts.clear()  # none of them is complete
                raise K8sJobError(
                    f"{self._folder} cannot be written: {error.strerror or error}; what was saved"
                    " is in its *.part files; free some space, or save into another folder"
                ) from error
            for earlier in [number for number in parts if number < attempt]:
                self._complete(replica, earlier)

    def _begin(self, replica: str, attempt: int) -> Path:
        """A new file: an existing one may be another process's, or of one that was killed."""
        for path in self._names(replica, attempt):
            part = path.with_name(path.name + ".part")
            try:
                part.touch(exist_ok=False)
            except FileExistsError:
                continue
            return part
        raise AssertionError("there is always another name")

    def _complete(self, replica: str, attempt: int) -> None:
        part = self._parts[replica].pop(attempt)
        path = next(name for name in self._names(replica, attempt) if _may_become(name, part))
        # The existing file has all of it already.
        if path.exists() and path.stat().st_size >= part.stat().st_size:
            part.unlink()
        else:
            part.replace(path)
        self.saved.append(path)

    def _names(self, replica: str, attempt: int) -> Iterator[Path]:
        """Possible names, the best one first.

        The names come from the cluster, so they must not lead to another folder.
        """
        name = re.sub(r"[^A-Za-z0-9-]", "_", f"{self._job}-{replica}")
        for more in chain([""], (f"-{number}" for number in count(2))):
            yield self._folder / f"{name}.{attempt}{more}.log"


def _may_become(path: Path, part: Path) -> bool:
    """Whether nothing is lost if `part` takes this name: one of both begins with the other."""
    if not os.path.lexists(path):
        return True
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as first, part.open("rb") as second:
        chunks = (iter(partial(file.read, _CHUNK), b"") for file in (first, second))
        return all(a[: len(b)] == b[: len(a)] for a, b in zip(*chunks, strict=False))
