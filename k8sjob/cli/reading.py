"""The command that prints what a job's replicas wrote."""

from __future__ import annotations

import json
import shlex
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.text import Text

from k8sjob.cli.failure import say
from k8sjob.cli.naming import find, job_argument
from k8sjob.cli.output import format_option, line
from k8sjob.cli.place import Place, place_options
from k8sjob.cli.saving import Saver
from k8sjob.cli.selecting import ago
from k8sjob.contract import Event, EventKind
from k8sjob.lifecycle.logs import MOST_AT_ONCE, logs, select
from k8sjob.lifecycle.status import job_status
from k8sjob.view.follow import Feed, Interrupts
from k8sjob.view.lines import LinePrinter, phrase, position
from k8sjob.view.safe import text
from k8sjob.view.summary import JobSummary
from k8sjob.view.views import console_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from datetime import datetime

    from k8sjob.backends.api import LogLine
    from k8sjob.lifecycle.status import JobStatus

__all__ = ["logs_command"]

_FIELDS = ("replica", "attempt", "timestamp", "text", "gap")


@click.command("logs")
@job_argument()
@click.option(
    "-r",
    "--replica",
    "replicas",
    multiple=True,
    help="master-0, worker-2, or all of a role: worker.",
)
@click.option("--rank", "ranks", type=int, multiple=True, help="The replica of a process rank.")
@click.option("-f", "--follow", is_flag=True, help="Wait for more until the job ends.")
@click.option("-p", "--previous", is_flag=True, help="The attempt before the last one.")
@click.option("--tail", type=click.IntRange(min=0), help="Only the last lines of each replica.")
@click.option("--since", callback=ago, help="Only what is newer, as 90s, 5m, 2h, 1d.")
@click.option("--timestamps", is_flag=True, help="The time in front of each line.")
@click.option(
    "--save",
    "folder",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Into files of DIR, one a replica and attempt, in place of printing it.",
)
@format_option("text", "json")
@place_options()
def logs_command(  # noqa: PLR0917 - click hands them over by name
    job: str,
    replicas: tuple[str, ...],
    ranks: tuple[int, ...],
    follow: bool,
    previous: bool,
    tail: int | None,
    since: datetime | None,
    timestamps: bool,
    folder: Path | None,
    output: str,
    place: Place,
) -> int:
    """Print what the replicas of a job wrote, in the order of its times.

    Lines of several replicas have the replica's name in front. Control sequences are taken out;
    with -o json and in files each line is as it was written. What its node has not kept is told in
    a line of its own. Files of --save only grow: other output goes beside them.
    """
    if folder and output == "json":
        raise click.UsageError("--save writes the lines as they are; leave -o json out")
    backend, ref = find(job, place)
    snapshot = backend.snapshot(ref)
    chosen = select(snapshot.job, replicas, ranks)
    if len(chosen) > MOST_AT_ONCE and (follow or tail is None) and not previous:
        say(_choice(chosen, follow=follow))
    silent = dict.fromkeys(chosen)
    lines = _heard(
        logs(backend, ref, chosen, follow=follow, previous=previous, since=since, tail=tail), silent
    )
    choice = [
        *(("-r", name) for name in replicas),
        *(("--rank", str(rank)) for rank in ranks),
        *([("--timestamps",)] if timestamps else []),
        *([("--save", str(folder))] if folder else []),
        *([("-o", "json")] if output == "json" else []),
    ]
    words = shlex.join(word for option in choice for word in option)
    again = f"k8sjob logs -f {ref}{words and ' '}{words}{place.words}" if follow else ""
    if folder is None:
        printer = _Printer(output, names=len(chosen) > 1, times=timestamps)
        code = _show(lines, printer.show, again)
    else:
        code = _save(lines, Saver(folder, ref.name, times=timestamps), again)
    if not (follow or since or code) and tail != 0:
        for told in _waiting(job_status(snapshot), tuple(silent)):
            say(told)
    return code


def _save(lines: Iterable[LogLine], saver: Saver, again: str) -> int:
    try:
        with saver:
            return _show(lines, saver.show, again)
    finally:
        for path in sorted(saver.saved):
            line(path)


def _heard(lines: Iterable[LogLine], silent: dict[str, None]) -> Iterator[LogLine]:
    """The same lines; who has one is not silent."""
    for one in lines:
        silent.pop(one.replica, None)
        yield one


def _waiting(status: JobStatus, silent: Sequence[str]) -> Iterator[str]:
    """Why silent replicas that have not run have no output; those that wait alike at once."""
    there = {replica.name: replica for replica in status.replicas}
    alike: dict[str, list[str]] = defaultdict(list)
    for name in silent:
        replica = there.get(name)
        if replica is None and not status.state.finished:
            alike[f"it has no pod, the job is {status.state}"].append(name)
        elif (
            replica
            and replica.exit_code is None
            and (replica.waiting or replica.phase == "Pending")
        ):
            alike[replica.situation].append(name)
    for why, names in alike.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{names[0]}{more}: there is no output ({why}); -f waits for it"


def _choice(replicas: Sequence[str], *, follow: bool) -> str:
    """What becomes of more replicas than are read side by side."""
    if follow:
        return (
            f"following {replicas[0]} and the next {MOST_AT_ONCE - 1} of {len(replicas)} replicas;"
            " choose others with -r"
        )
    return f"the lines of {len(replicas)} replicas come one replica after the other"


def _show(lines: Iterable[LogLine], show: Callable[[Sequence[LogLine]], None], again: str) -> int:
    """Show lines until they end or an interrupt comes; the exit code."""
    with Interrupts() as interrupts:
        for batch in Feed(lines):
            show(batch)
            if interrupts.count:
                if again:
                    say(f"\nno longer followed; again: {again}")
                return interrupts.exit_code
    return 0


class _Printer:
    """Writes log lines: for people as they read them, as JSON for programs.

    Args:
        output: "text" or "json".
        names: the replica's name in front of each line.
        times: the time in front of each line.
    """

    def __init__(self, output: str, *, names: bool, times: bool) -> None:
        self._json, self._names, self._times = output == "json", names, times
        self._printer = LinePrinter()
        self._console = console_for(sys.stdout)

    def show(self, lines: Sequence[LogLine]) -> None:
        """Write the lines."""
        if not lines:
            return
        if self._json:
            rows = ({key: getattr(one, key) for key in _FIELDS} for one in lines)
            sys.stdout.write("".join(json.dumps(row) + "\n" for row in rows))
        elif self._console.is_terminal:
            self._console.print(Text("\n").join(map(self._line, lines)), soft_wrap=True)
        else:
            sys.stdout.write("".join(self._line(one).plain + "\n" for one in lines))
        sys.stdout.flush()

    def _line(self, one: LogLine) -> Text:
        line = Text(f"{text(one.timestamp)} " if self._times else "", style="dim")
        if self._names:
            line.append_text(self._printer.prefix(one.replica))
        event = Event.decode(one.text, one.replica)
        return line.append_text(_told(event) if event else Text(text(one.text)))


def _told(event: Event) -> Text:
    """What a runtime event says in the log of its replica."""
    if event.kind == EventKind.PROGRESS:
        summary = JobSummary()
        summary.add(event)
        return Text("  ".join(position(summary.progress)))
    return phrase(event) or Text(text(event.kind))
