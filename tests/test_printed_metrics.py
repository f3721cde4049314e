"""Metrics in the output of scripts: real lines of libraries, templates, and hostile text."""

import io
import json
import math
import os
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from k8sjob.contract import EVENT_MARK, Event
from k8sjob.jobs.result import Reached
from k8sjob.printed_metrics import PrintedMetrics, Template
from k8sjob.runtime.base.printed_output import PrintedOutput

# Lines that projects print, as their logs on the web show them, and the numbers in each.
LINES = [
    row.split("\t")
    for row in Path(__file__).with_name("printed_lines.tsv").read_text().splitlines()
]


def training(lines, templates=None, seconds=2.0):
    """The fold of what some lines lead to, one every few seconds."""
    metrics = PrintedMetrics(templates)
    reports = [
        report for at, line in enumerate(lines) for report in metrics.read(line, at * seconds)
    ]
    return Reached.of(
        Event(kind, data, 1.0) for kind, data in reports + metrics.held_back(seconds * 1e6)
    )


@pytest.mark.parametrize(("_", "line", "expected"), LINES, ids=[row[0] for row in LINES])
def test_a_real_line(_, line, expected):
    line = line.replace("\\t", "\t").replace("\\x1b", "\x1b")
    expected = json.loads(expected)
    position = {name: expected.pop(name, 0) for name in ("epoch", "epochs", "step", "steps")}
    now = training([line])
    logged = {name: value for name, value in now.metrics.items() if name not in position}
    assert logged == pytest.approx(expected, nan_ok=True)
    if position["steps"]:
        assert (now.progress.step, now.progress.steps) == (position["step"], position["steps"])


def bar(step, steps):
    return f" {100 * step // steps:3d}%|###   | {step}/{steps} [00:10<01:12, 6.1it/s]"


def test_transformers_counts_epochs_by_its_bar_and_evaluates_in_between():
    lines = []
    for step in range(61):
        lines.append(bar(step, 60))
        if step % 10 == 9:
            # tqdm.write draws the bar again.
            lines += [f"{{'loss': '{60 - step}', 'epoch': '{step / 20:g}'}}", bar(step, 60)]
        if step and not step % 20:
            lines += [bar(1, 4), bar(4, 4), f"{{'eval_loss': {step}, 'epoch': {step / 20}}}"]
    now = training([*lines[:-10]])
    assert (now.progress.epochs, now.progress.epoch, now.progress.steps) == (3, 3, 20)
    assert now.progress.eta_s == pytest.approx(14, abs=4)  # two seconds a step
    now = training([*lines, bar(1, 8), bar(8, 8)])
    assert now.progress.fraction == 1
    assert [value for _, value in now.curves["loss"]] == [51, 41, 31, 21, 11, 1]
    assert now.curves["eval_loss"] == [(1, 20), (2, 40), (3, 60)]
    for name, curve in now.curves.items():  # no row takes back what another one logged
        assert [row[name] for row in now.history if name in row] == [value for _, value in curve]


@pytest.mark.parametrize("first", [0, 1])
def test_epochs_count_from_what_the_script_counts_from(first):
    now = training([f"epoch {first + epoch}/4: loss=0.{epoch}" for epoch in range(3)])
    assert (now.at, now.progress.epoch, now.progress.fraction, now.progress.eta_s) == (
        3,
        3,
        0.75,
        2,
    )
    assert now.curve == [(1, 0.0), (2, 0.1), (3, 0.2)]


def test_a_run_of_unknown_length_has_curves_by_report():
    now = training([f"step: {step}  loss: {10 - step}  tps: 1,000" for step in range(3)])
    assert now.curves == {"loss": [(0, 10), (1, 9), (2, 8)], "tps": [(at, 1000) for at in range(3)]}
    assert now.metrics["step"] == 2


def test_many_lines_become_few_reports_and_the_last_one_counts():
    metrics, templates = PrintedMetrics(["{} loss={loss:.4f}"]), ["{} loss={loss:.4f}"]
    count = sum(len(metrics.read(f"a loss={at}", at / 1000)) for at in range(100_000))
    assert 190 <= count <= 210
    assert training((f"a loss={at}" for at in range(50)), templates, 0.01).metrics == {"loss": 49}


@pytest.mark.parametrize(
    ("template", "line", "numbers"),
    [
        ("step {step}/{steps} {} loss={loss:.4f}", "step 3/10 (1 s)  loss=-2e-3", (3, 10, -2e-3)),
        ("{epoch:>3}  {acc:.1%} {{x}}", "[rank 0]   7 93.5% {x}", (7, 93.5)),
        ("{loss=} at {step}", "loss=nan at 1,000", (math.nan, 1000)),
        ("a {} b {val/acc@1}", "a 1 b x, b .5", (0.5,)),
        ("loss {loss}", "loss is 0.5", None),
    ],
)  # fmt: skip
def test_a_template_is_the_f_string(template, line, numbers):
    read = Template(template).read(line)
    values = None if read is None else tuple(read.values())
    assert values == (numbers and pytest.approx(numbers, nan_ok=True))


@pytest.mark.parametrize(
    "text",
    ["1", " ", "a 1 ", "epoch ", "epoch 1-", "|", "100%|", "{'a': ", "step 1/2 ", "1,111", "\x1b["],
)  # fmt: skip
def test_a_line_without_end_is_read_up_to_a_limit(text):
    templates = ["step {step}/{steps} {} loss={loss}", "a {x} {} {} b {y} c", "{a} {b} {c} x"]
    for line in (text * 100_000, f"epoch {text * 100_000}", f"loss: {text * 100_000} x"):
        assert not training([line], templates).metrics
        PrintedMetrics().read(line, 0.0)  # the deadline of a test is the limit of its time


@contextmanager
def stdout(monkeypatch, out):
    """Read what is printed in here, to a stream over the bytes `out`."""
    stream = io.TextIOWrapper(out, write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    output = PrintedOutput(["loss={loss}"])
    output.start()
    yield stream.write
    output.stop()


def test_events_follow_the_lines_that_they_are_of(monkeypatch):
    out = io.BytesIO()
    with stdout(monkeypatch, out):
        for text in ("loss=", "0.5", f"\rloss=0.25{'x' * 5000}", "\n\033[1mloss=nan", "\n"):
            sys.stdout.write(text)
    events = [
        event for line in out.getvalue().decode().splitlines() if (event := Event.decode(line))
    ]
    assert [event.data.get("loss") for event in events[:1]] == [0.5]
    assert [event.kind for event in events][-2:] == ["warning", "metrics"]
    assert all(event.printed for event in events)


def test_a_script_that_reports_by_itself_is_left_alone(monkeypatch):
    out = io.BytesIO()
    with stdout(monkeypatch, out) as write:
        monkeypatch.setattr(sys.stdout, "write", lambda text: write(text.replace("5", "five")))
        for text in ("loss=0.5\n", f"{EVENT_MARK}{{}}\n", "loss=0.25\n"):
            sys.stdout.write(text)
    assert out.getvalue().count(b"metrics") == 1
    assert out.getvalue().endswith(b"loss=0.2five\n")


def test_threads_and_forks_print_and_only_the_thread_of_the_script_is_read(monkeypatch):
    out = io.BytesIO()
    with stdout(monkeypatch, out):
        sys.stdout.write("loss=")
        thread = threading.Thread(target=sys.stdout.write, args=("1\nloss=2\n",))
        thread.start()
        thread.join()
        monkeypatch.setattr(os, "getpid", lambda: -1)
        sys.stdout.write("loss=3\n")
        monkeypatch.undo()
    assert out.getvalue() == b"loss=1\nloss=2\nloss=3\n"


def test_much_output_is_read_for_a_small_part_of_the_time(monkeypatch):
    clock, reads = [0.0], []

    def read(_metrics, line, _now):
        reads.append(line)
        clock[0] += 0.2
        return []

    here = "k8sjob.runtime.base.printed_output.time"
    monkeypatch.setattr(here, SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(PrintedMetrics, "read", read)
    with stdout(monkeypatch, io.BytesIO()) as write:
        write("a line of one write\n" * 1000)
        write("a line of another write\n" * 1000)
        assert reads == ["a line of one write"] * 3
        clock[0] += 100
        write("a line of a later write\n" * 1000)
        assert reads[3:] == ["a line of a later write"] * 5


def test_a_print_fails_as_it_would_and_for_no_other_reason(monkeypatch):
    with stdout(monkeypatch, io.BytesIO()) as write:
        with pytest.raises(TypeError):
            write(b"loss=1")
        monkeypatch.setattr(PrintedMetrics, "read", lambda *_: 1 / 0)
        assert write("loss=1\n") == 7
