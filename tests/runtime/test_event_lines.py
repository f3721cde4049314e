import io
import json

import pytest
import torch

from k8sjob.backends.api import LogLine
from k8sjob.contract import Event, EventKind, Reason
from k8sjob.observe.logs import Excerpt
from k8sjob.runtime.base.event_lines import Reporter, write_restart

EXAMPLES = {
    EventKind.STARTED: (
        {"world_size": 4, "backend": "gloo", "device": "cpu", "strategy": "ddp", "restart": 0},
        "started: 4 processes, gloo on cpu, strategy ddp",
    ),
    EventKind.PROGRESS: (
        {
            "epoch": 0,
            "epochs": 3,
            "step": 5,
            "steps": 9,
            "loss": 0.12345,
            "samples_per_s": 99.6,
            "eta_s": 2.4,
        },
        "epoch 1/3  step 5/9  loss 0.1235  100 samples/s  2 s left",
    ),
    EventKind.METRICS: ({"epoch": 1, "accuracy": 0.98765}, "epoch 1  accuracy 0.9877"),
    EventKind.CHECKPOINT: (
        {"path": "/c/step-1.pt", "step": 9, "seconds": 0.1},  # of a loop written by hand
        "checkpoint /c/step-1.pt (step 9)",
    ),
    EventKind.RESUMED: (
        {"path": "/c/step-1.pt", "epoch": 1, "step": 9},
        "resumed from /c/step-1.pt (epoch 1, step 9)",
    ),
    EventKind.WARNING: ({"message": "look"}, "warning: look"),
    EventKind.STOPPING: (
        {"signal": "SIGTERM", "epoch": 1, "step": 9},
        "stopping after SIGTERM (epoch 1, step 9)",
    ),
    EventKind.FINISHED: ({"seconds": 12.34}, "finished in 12.3 s"),
}


def reporter(**options):
    out = io.StringIO()
    return Reporter(**{"active": True, "events": True, "out": out, **options}), out


@pytest.mark.parametrize("kind", EXAMPLES)
def test_every_event_is_a_sentence_for_people_and_a_line_for_k8sjob(kind):
    data, sentence = EXAMPLES[kind]
    speaker, out = reporter(events=False)
    speaker.emit(kind, **data)
    assert out.getvalue() == sentence + "\n"
    speaker, out = reporter()
    speaker.emit(kind, **data)
    event = Event.decode(out.getvalue())
    assert (event.kind, event.data) == (kind, data)
    assert event.time > 1e9


def test_the_other_ranks_are_silent():
    speaker, out = reporter(active=False)
    speaker.sink = lambda *_: pytest.fail("it tracks nothing")
    speaker.warn("look")
    speaker.emit(EventKind.METRICS, accuracy=0.5)
    assert out.getvalue() == ""


def test_tensors_and_numpy_numbers_are_numbers():
    speaker, out = reporter()
    speaker.emit(EventKind.METRICS, loss=torch.tensor(0.5), n=torch.ones(1).numpy().sum())
    assert Event.decode(out.getvalue()).data == {"loss": 0.5, "n": 1.0}


def test_one_warning_for_a_loss_that_is_not_finite():
    speaker, out = reporter(events=False)
    speaker.emit(EventKind.METRICS, epoch=2, auc=float("nan"), best_loss=float("inf"))
    assert "warning" not in out.getvalue()
    for _ in range(2):
        speaker.emit(EventKind.METRICS, epoch=3, val_loss=torch.tensor(float("inf")))
    (warning,) = [line for line in out.getvalue().splitlines() if line.startswith("warning")]
    assert warning.startswith("warning: the val_loss is inf in epoch 3: lower the learning rate")


def test_the_epoch_of_that_warning_is_the_one_that_progress_shows():
    speaker, out = reporter(events=False)
    rest = {"samples_per_s": 1.0, "eta_s": 0.0, "loss": float("nan")}
    speaker.emit(EventKind.PROGRESS, epoch=0, epochs=3, step=1, steps=4, **rest)
    assert "warning: the loss is nan in epoch 1, step 1: " in out.getvalue()
    assert "epoch 1/3  step 1/4" in out.getvalue()


def test_stdout_is_looked_up_at_each_line(capsys):
    Reporter(active=True, events=False).warn("look")
    assert capsys.readouterr().out == "warning: look\n"


def test_a_restart_is_short_enough_for_why(capsys):
    write_restart(2, Reason(139, 1, "Signal", "é" * 5000, causes=("x" * 3000,)))
    written = capsys.readouterr().out.rstrip()
    event = Event.decode(Excerpt.of(LogLine("master-0", 0, "2026-01-01T00:00:00Z", written)))
    assert (event.kind, event.data["restart"]) == (EventKind.RESTARTING, 2)
    assert Reason.decode(json.dumps(event.data["reason"])).exit_code == 139
