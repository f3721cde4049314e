"""What the agent tells of its processes, and what they let it see."""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec

import pytest

from k8sjob.contract import Event
from k8sjob.runtime.observer import Observer, Seen, read_seen
from k8sjob.runtime.starting import Starting

NOT_YET, RUNS = Seen(), Seen(runs=True)
IMPORTS = Seen(runs=True, torch=True, importing=True)
TRAINS = Seen(runs=True, torch=True)


def phases(out):
    return [Event.decode(line).data["phase"] for line in out.splitlines()]


def test_the_phase_is_that_of_the_process_furthest_behind(capsys):
    starting = Starting(2)
    for seen in (
        (NOT_YET, NOT_YET),
        (NOT_YET, IMPORTS),
        (IMPORTS, IMPORTS),
        (IMPORTS, TRAINS),
        (TRAINS, TRAINS),
        (TRAINS, TRAINS),
    ):
        starting.note(dict(enumerate(seen)))
    out = capsys.readouterr().out
    assert phases(out) == ["python", "importing", "running"]
    assert Event.decode(out.splitlines()[0]).data == {"phase": "python", "processes": 2}


def test_no_import_is_claimed_of_a_script_without_torch(capsys):
    starting = Starting(1)
    for seen in (NOT_YET, RUNS, RUNS):
        starting.note({0: seen})
    assert phases(capsys.readouterr().out) == ["python", "running"]


@pytest.fixture
def torch(monkeypatch):
    """A module of that name, as it is while it is being imported."""
    module = types.ModuleType("torch")
    module.__spec__ = ModuleSpec("torch", None)
    module.__spec__._initializing = True
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


def test_an_observer_tells_an_import_from_its_end(torch, tmp_path):
    observer = Observer(tmp_path / "seen", 1, 0)
    assert read_seen(tmp_path / "seen") == NOT_YET
    observer.write()
    assert read_seen(tmp_path / "seen") == IMPORTS
    torch.__spec__._initializing = False
    observer.write()
    seen = read_seen(tmp_path / "seen")
    assert (seen.torch, seen.importing) == (True, False)


def test_an_observer_is_seen_without_torch(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    Observer(tmp_path / "seen", 1, 0).write()
    assert read_seen(tmp_path / "seen") == RUNS
