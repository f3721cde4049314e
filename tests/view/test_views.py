"""The three views over the same events: lines, JSON, and the screen."""

import io
import json
import math
import re
from contextlib import closing, redirect_stdout

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text
from view.conftest import ANY_EVENTS, summary_of

from k8sjob.contract import Event, EventKind
from k8sjob.view.final_report import report
from k8sjob.view.formats import duration, last_line
from k8sjob.view.live import LiveView, Panel
from k8sjob.view.views import (
    EVERY_S,
    PlainView,
    ascii_only,
    close_with_report,
    is_live,
    json_view,
    viewer,
)


def plain(events):
    out = io.StringIO()
    PlainView(out, "x").show(events)
    return out.getvalue().splitlines()


def test_a_pipe_gets_plain_lines(life, failure):
    last = "master-0 | epoch 2/2  loss 0.25  accuracy 0.97  samples/s 1,234  ETA 1:15"
    assert plain(life) == [
        "k8sjob   | Created",
        "k8sjob   | Running",
        "master-0 | 2 processes joined: ddp over gloo on cpu",
        "worker-0 | reading data",
        "master-0 | epoch 1/2  step 10/20  loss 2  1,234 samples/s  ETA 1:15",
        "master-0 | epoch 1/2  loss 1  accuracy 0.91  samples/s 1,234  ETA 1:15",
        f"{last}  checkpoint step-40.pt",
        "k8sjob   | Succeeded",
    ]
    assert plain(failure) == [
        "worker-0 | Failed, exit code 1: ValueError: no",
        "k8sjob   | Failed: worker-0 failed",
    ]


@pytest.mark.parametrize(
    ("data", "detail"),
    [
        ({"phase": "Succeeded", "exit_code": 0, "reason": "Completed"}, None),
        ({"phase": "Failed", "exit_code": 1, "reason": "Error"}, "Failed, exit code 1"),
        ({"phase": "Failed", "exit_code": 137, "reason": "OOMKilled", "restarts": 2},
         "Failed, OOMKilled, exit code 137"),
        ({"phase": "Running", "exit_code": 1, "reason": "CrashLoopBackOff", "restarts": 2},
         "CrashLoopBackOff after exit code 1"),
        ({"phase": "Running", "exit_code": 1, "reason": "Error", "restarts": 2, "message": "no"},
         "restart 2 after exit code 1: no"),
        ({"phase": "Pending", "reason": "Unschedulable"}, "Pending, Unschedulable"),
        ({"phase": "Pending", "reason": "Init:0/1"}, None),
        ({"phase": "Pending", "reason": "Init:0/1", "restarts": 3}, "Init:0/1"),
    ],
)  # fmt: skip
def test_what_is_worth_a_line_of_a_replica(data, detail):
    lines = plain([Event(EventKind.REPLICA, data, 0, "worker-1")])
    assert lines == ([f"worker-1 | {detail}"] if detail else [])


def test_a_line_that_many_replicas_share_is_shown_for_some():
    lost = {"phase": "Failed", "exit_code": 138}
    events = [Event(EventKind.REPLICA, lost, 0, f"worker-{i}") for i in range(100)]
    other = Event(EventKind.REPLICA, {"phase": "Failed", "exit_code": 1}, 0, "worker-77")
    assert plain([*events, other, *events]) == [
        *(f"worker-{i} | Failed, exit code 138" for i in range(5)),
        "k8sjob   | more replicas: Failed, exit code 138",
        "worker-77 | Failed, exit code 1",
        *(f"worker-{i}  | Failed, exit code 138" for i in range(5)),
    ]


def starting(phase, replica="master-0", time=0.0, **data):
    return Event(EventKind.STARTING, {"phase": phase, **data}, time, replica)


def test_the_way_to_the_script_is_shown_once_for_all_replicas():
    names = ["master-0", "worker-0", "worker-1"]
    missing = [
        starting("waiting", time=at, world_size=3, missing=len(ranks), ranks=ranks)
        for at, ranks in ((1.0, [1, 2]), (2.0, [2]), (12.0, [2]))
    ]
    assert plain([
        *(starting("python", name) for name in names),
        *(starting("importing", name) for name in names),
        *(starting("running", name) for name in names),
        *missing,
        Event(EventKind.STARTED, {"world_size": 3}, 13.0, "master-0"),
    ]) == [
        "master-0 | starting Python",
        "master-0 | importing torch",
        "master-0 | waiting for 2 of 3 processes: ranks 1, 2",
        "master-0 | waiting for 1 of 3 processes: rank 2",
        "master-0 | 3 processes joined",
    ]  # fmt: skip


def test_a_termination_message_made_of_a_log_shows_its_last_line():
    message = "\n".join(["one", "two", Event("progress", {"step": 1}).encode(), ""])
    assert last_line(message) == "two"


def test_a_line_comes_now_and_then_of_progress_and_once_of_a_state(progress):
    lines = plain([progress(step=1 + i, time=float(i)) for i in range(25)])
    assert len(lines) == 1 + 24 // EVERY_S
    states = [Event(EventKind.JOB, {"state": "Running", "reason": why}) for why in "ab"]
    assert plain(states) == ["k8sjob   | Running"]


def test_json_lines_carry_everything_and_have_no_nan(life):
    out = io.StringIO()
    odd = Event("metrics", {"loss": math.nan, "all": [math.inf, {"x": -math.inf}]})
    json_view(out).show([*life, odd])
    lines = [json.loads(line, parse_constant=pytest.fail) for line in out.getvalue().splitlines()]
    assert [line["kind"] for line in lines[:-1]] == [str(event.kind) for event in life]
    read = {"text": "reading data", "attempt": 0}
    assert lines[7] == {"kind": "log", "data": read, "time": 0.0, "replica": "worker-0"}
    assert lines[-1]["data"] == {"loss": None, "all": [None, {"x": None}]}


def screen(events, width=80, height=24, **options):
    return [line.plain for line in Panel(summary_of(events), **options).lines(width, height)]


def test_the_panel_shows_where_the_training_stands(life):
    title, group, bar, where = screen(life[:-4])
    assert title.startswith("digits  Running  ")
    assert group == "2 processes joined: ddp over gloo on cpu  2 Running on here"
    assert bar == "━" * 74 + " 100%"
    assert where == "epoch 2/2  step 20/20  loss 0.25  1,234 samples/s  ETA 1:15"
    assert screen(life[:-4], width=40)[-1] == "epoch 2/2  step 20/20  loss 0.25"
    wide = screen(life[:-4], width=160)
    assert (len(wide), wide[0].endswith(group)) == (3, True)


def test_the_panel_has_the_stages_of_the_job_and_the_replicas_that_differ():
    def job(state, now, **stamps):
        return Event(EventKind.JOB, {"state": state, "created": 100.0, **stamps}, now)

    def pod(name, now, **data):
        return Event(EventKind.REPLICA, data, now, name)

    begun = [
        job("Created", 101.0),
        pod("master-0", 105.0, phase="Pending", node="a"),
        pod("worker-0", 105.0, phase="Pending", node="b"),
        *(pod(name, 115.0, phase="Running", node="a") for name in ("master-0", "worker-0")),
        starting("python", time=115.2),
        starting("importing", time=117.2),
        starting("waiting", time=137.2, world_size=2, missing=1, ranks=[1]),
    ]
    stages = "queued 0:05 > pulling 0:10 > starting 0:02 > importing 0:20 > joining 0:08"
    waiting = "2 Running on a  waiting for 1 of 2 processes: rank 1"
    assert screen([*begun, job("Running", 145.0)])[1:] == [stages, waiting]
    assert screen([*begun, job("Running", 145.0)], width=60)[1].startswith("... > starting 0:02 > ")
    # Who comes late reads how the objects are now, and then the output from its beginning.
    late = [*begun[3:5], job("Running", 990.0, started=112.0)]
    ended = [*begun[5:], job("Succeeded", 990.0, started=112.0, finished=150.0)]
    restarted = pod("worker-0", 990.0, phase="Running", node="a", restarts=1)
    assert screen([*late, *begun[5:], restarted, job("Running", 145.0)])[1:] == [
        "queued 0:12 > running 0:03 > starting 0:02 > importing 0:20 > joining 0:08",
        waiting.replace("2 Running", "1 Running"),
        "worker-0  Running    1 restart  a",
    ]
    for events in ([*late, *ended], ended):
        assert "> importing 0:20 > joining 0:13" in "\n".join(screen(events))
    # Without a group, and after one replica has ended, the script still runs.
    runs = [*late, begun[5], starting("running", time=120.0), job("Running", 145.0)]
    over = pod("worker-0", 145.0, phase="Succeeded", node="a")
    assert "starting 0:05 > running 0:25  " in screen([*runs, over])[1]
    gone = [begun[5], starting("running", time=120.0), ended[-1]]
    assert "starting 0:05 > running 0:30" in "\n".join(screen(gone))


def test_the_screen_has_one_line_for_agents_that_are_alike_and_wraps_at_words(console, terminal):
    view = LiveView(console(60), "x")
    lines = [
        *(
            f"k8sjob: 0.1, job x, node {at} of 3, Python 3.12, torch 2.{8 + at // 2}"
            for at in range(3)
        ),
        "RuntimeError: " + "no " * 20,
    ]
    for at, line in enumerate(lines):
        view.show([Event(EventKind.LOG, {"text": line}, 0, f"worker-{at}")])
    logged = {f"metric_{at}": 0.5 for at in range(9)}
    view.show([Event(EventKind.METRICS, logged, 0, "worker-0")])
    pod = "a-pod-of-a-deployment-with-a-long-name-6d4cf56db6-x7k2p"
    view.show([Event(EventKind.LOG, {"text": "some words"}, 0, pod)])
    seen = Screen()
    seen.write(terminal.getvalue())
    assert [line.rstrip() for line in seen.lines if " | " in line] == [
        "worker-2 | k8sjob: Python 3.12, torch 2.9, while worker-0",
        "         | has Python 3.12, torch 2.8",
        "worker-3 | RuntimeError: " + "no " * 11 + "no",
        "         | " + "no " * 7 + "no",
        "worker-0 | metric_0 0.5  metric_1 0.5  metric_2 0.5",
        f"{pod} | some words",
    ]


COSTS = {"grad_norm": 0.5123, "memory_bytes": 3 << 29, "step_s": 0.2, "wait_s": 0.05, "slowest": 3}


@pytest.mark.parametrize(
    ("data", "detail"),
    [
        (COSTS, "25% waiting for rank 3  200 ms/step  gradient norm 0.5123  memory 1.50 GiB"),
        ({**COSTS, "wait_s": 0.001}, "200 ms/step  gradient norm 0.5123  memory 1.50 GiB"),
        ({**COSTS, "step_s": 0, "wait_s": 0}, "gradient norm 0.5123  memory 1.50 GiB"),
        ({"grad_norm": "x", "memory_bytes": -1, "wait_s": True, "step_s": -1}, None),
    ],
)
def test_what_a_training_costs_has_a_line_of_its_own(progress, data, detail):
    event = progress(**data)
    assert screen([event])[3:] == ([detail] if detail else [])
    (line,) = plain([event])
    assert line.endswith(f"ETA 1:15  {detail}" if detail else "ETA 1:15")


def test_the_bar_fills_as_the_epochs_go(progress):
    """Its marks differ: under NO_COLOR, and for who sees no colors, these alone show it."""
    for epoch, step, filled in ((0, 0, 0), (0, 10, 25), (1, 0, 50), (1, 20, 100)):
        for narrow, (full, empty) in ((True, "#."), (False, "━─")):
            bar = screen([progress(epoch, step)], width=200, ascii_only=narrow)[1]
            assert bar.startswith(full * filled + empty * (100 - filled) + " ")


def test_many_replicas_become_counts():
    events = [Event("replica", {"phase": "Running"}, 0, f"worker-{i}") for i in range(100)]
    events[42] = Event("replica", {"phase": "Pending", "reason": "Unschedulable"}, 0, "worker-42")
    crashing = {"phase": "Running", "reason": "CrashLoopBackOff", "restarts": 3, "waiting": True}
    events[70] = Event("replica", crashing, 0, "worker-70")
    title, *named = screen(events)
    assert title.endswith("  98 Running")
    assert named == [
        "worker-42  Pending    Unschedulable",
        "worker-70  Running    3 restarts  CrashLoopBackOff",
    ]
    assert screen(events[70:71])[0].endswith("  1 Running 3 restarts CrashLoopBackOff")
    failed = [Event("replica", {"phase": "Failed"}, 0, f"worker-{i}") for i in range(9, 39)]
    *named, more = screen([*events, *failed])[1:]
    assert (len(named), more) == (9, "and 23 more that differ")


def test_no_character_beyond_ascii_where_only_ascii_can_be_shown(life):
    assert all(line.isascii() for line in screen(life, width=30, ascii_only=True))
    assert shown(life).isascii()


@given(ANY_EVENTS, st.integers(1, 150), st.integers(1, 40))
@example([Event("progress", {"epoch": 0, "step": 1, "loss": math.nan})], 80, 24)
@example([Event("progress", {"epoch": 0, "step": 1, "loss": "x"})], 80, 24)
def test_no_event_breaks_the_panel_which_never_outgrows_the_terminal(events, width, height):
    summary = summary_of(events)
    lines = [line.plain for line in Panel(summary).lines(width, height)]
    assert len(lines) <= max(height - 3, 1)
    assert all(cell_len(line) < max(width, 2) for line in lines)
    assert all("\n" not in line for line in lines)
    assert 0 <= (summary.progress.fraction or 0) <= 1
    assert summary.curve == sorted(summary.curve)
    assert all(math.isfinite(loss) for _, loss in summary.curve)


def test_markup_is_text_and_a_long_line_is_cut_on_a_screen_only(console, terminal):
    detail = "[bold red]no[/] :smile: [link=http://x]x[/link]"
    event = Event(EventKind.LOG, {"text": "x" * 1_000_000}, 0, "master-0")
    LiveView(console(), "x").show([Event(EventKind.LOG, {"text": detail}, 0, "master-0"), event])
    assert f"master-0 | {detail}\n" in terminal.getvalue()
    assert len(terminal.getvalue()) < 10_000
    assert "more characters)" in terminal.getvalue()
    assert len(plain([event])[0]) > 1_000_000


class Screen:
    """The lines of a terminal: it understands what Region writes."""

    def __init__(self):
        self.lines, self.row, self.column = [""], 0, 0

    def write(self, text):
        for part in re.split(r"(\x1b\[\??\d*[A-Za-z]|\n|\r)", text):
            if part == "\n":
                self.row += 1
                if self.row == len(self.lines):
                    self.lines.append("")
                self.column = 0
            elif part == "\r":
                self.column = 0
            elif match := re.fullmatch(r"\x1b\[(\d+)A", part):
                self.row = max(self.row - int(match[1]), 0)
            elif part == "\x1b[J":
                del self.lines[self.row + 1 :]
                self.lines[self.row] = ""
            elif part == "\x1b[K":
                self.lines[self.row] = self.lines[self.row][: self.column]
            elif part and not part.startswith("\x1b"):
                line = self.lines[self.row]
                self.lines[self.row] = line[: self.column] + part + line[self.column + len(part) :]
                self.column += len(part)


def test_lines_scroll_by_above_the_panel_and_stay(life, console, terminal):
    view = LiveView(console(80), "digits")
    seen = Screen()

    def show(events):
        terminal.seek(0)
        terminal.truncate()
        view.show(events)
        seen.write(terminal.getvalue())

    seen.write(terminal.getvalue())
    for event in life:
        show([event])
        show([])
    assert seen.lines[-3].startswith("━━━━━━━━━━")
    above = [line for line in seen.lines if "|" in line]
    terminal.seek(0)
    terminal.truncate()
    view.close()
    seen.write(terminal.getvalue())
    assert [line for line in seen.lines if line] == above
    lines = [line for line in plain(life) if "step 10/20" not in line]
    assert above == [line.replace("  samples/s 1,234  ETA 1:15", "") for line in lines]


def test_nothing_is_written_when_nothing_changed(life, console, terminal, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1000.0)
    view = LiveView(console(), "digits")
    view.show(life)
    before = terminal.getvalue()
    for _ in range(10):
        view.show([])
    assert terminal.getvalue() == before


def test_the_cursor_comes_back_when_something_breaks(terminal, monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def use():
        with redirect_stdout(terminal), closing(viewer("auto", job="x")):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        use()
    assert terminal.getvalue().endswith("\x1b[?25h")


def shown(events, **options):
    return Text("\n").join(report(summary_of(events), **options)).plain


def ended(seconds):
    times = {"created": 990.0, "started": 1000.0, "finished": 1000.0 + seconds}
    return Event(EventKind.JOB, {"state": "Succeeded", "exit_code": 0, **times})


def test_the_panel_counts_from_the_making_of_the_job_by_the_servers_clock(life):
    title, *_ = screen([*life, Event(EventKind.JOB, {"state": "Running", "created": 905.0}, 1e3)])
    assert title.startswith("digits  Running  1:35")


def test_the_summary_says_what_was_reached(life):
    text = shown([*life, ended(34.0)], more={"logs": "k8sjob logs digits"})
    assert text == (
        "digits Succeeded after 0:34\n"
        "  accuracy    0.97\n"
        "  checkpoint  /checkpoints/step-40.pt\n"
        "  logs        k8sjob logs digits"
    )


@pytest.mark.parametrize(("kind", "summary"), [("plain", True), ("json", False)])
def test_people_get_the_summary_below_the_lines(kind, summary, life, capsys):
    with closing(viewer(kind, job="digits")) as view:
        view.show([*life, ended(1.0)])
        close_with_report(view)
    out = capsys.readouterr().out
    assert ("digits Succeeded after 0:01" in out) is summary
    assert "\x1b" not in out


def test_the_summary_of_a_failure_says_why(failure):
    assert shown(failure) == (
        "digits Failed\n"
        "why: worker-0: the script raised ValueError: no\n"
        "     at main.py:3\n"
        "next: correct main.py:3 and run it again"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (7.4, "0:07"), (754, "12:34"), (11045, "3:04:05"), (-1, "?"), (math.nan, "?")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("variables", "live"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "CI": "true"}, False),
        ({"TERM": "dumb"}, False),
    ],
)
def test_a_live_screen_is_for_people(variables, live, terminal, monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_live(terminal) is live
    assert not is_live(io.StringIO())


@pytest.mark.parametrize(
    ("variables", "encoding", "ascii_alone"),
    [
        ({"LANG": "ko_KR.UTF-8"}, "utf-8", False),
        ({}, "utf-8", False),
        ({"LANG": "C"}, "utf-8", True),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "POSIX"}, "utf-8", True),
        ({"LANG": "en_US.UTF-8"}, "iso-8859-1", True),
    ],
)
def test_what_a_terminal_can_show(variables, encoding, ascii_alone, monkeypatch):
    for name in ("LANG", "LC_ALL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ascii_only(io.TextIOWrapper(io.BytesIO(), encoding=encoding)) is ascii_alone


def test_what_a_container_wrote_never_speaks_as_k8sjob():
    spoken = [
        Event(EventKind.METRICS, {"Succeeded": ""}, 0, "worker-0"),
        Event(EventKind.STOPPING, {"signal": "x"}, 0, "worker-0"),
        Event(EventKind.RESUMED, {"path": "x"}, 0, "worker-0"),
        Event(EventKind.STARTED, {"strategy": "x"}, 0, "worker-0"),
        Event(EventKind.PROGRESS, {"epoch": 1}, 0, "worker-0"),
        Event(EventKind.WARNING, {"message": "x"}, 0, "worker-0"),
    ]
    assert all(line.startswith("worker-0 | ") for line in plain(spoken))
