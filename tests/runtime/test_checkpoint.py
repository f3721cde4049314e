import pickle
import subprocess
import sys
from collections import Counter, OrderedDict

import pytest
import torch

from k8sjob.runtime.checkpoint import reader
from k8sjob.runtime.checkpoint.reader import load
from k8sjob.runtime.checkpoint.store import Checkpoints


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "deep" / "folder", keep=2)


def state(number):
    return {"weights": torch.full((4,), float(number)), "epoch": number}


def names(checkpoints):
    return sorted(path.name for path in checkpoints.folder.iterdir())


def newest(checkpoints):
    """(state, warnings)"""
    warnings = []
    found = reader.newest(checkpoints, warnings.append)
    return found and load(found), warnings


def test_what_is_saved_is_loaded(checkpoints):
    whole = {
        "model": torch.nn.Linear(2, 2).state_dict(),
        "counts": Counter([1, 1, 2]),
        "plain": [None, True, 1, 2.5, "text", b"bytes", (1, "two")],
        "ordered": OrderedDict(a=torch.tensor([1, 2])),
    }
    path = checkpoints.save(7, whole)
    assert path.name == "step-00000007.pt"
    loaded, warnings = newest(checkpoints)
    assert not warnings
    assert loaded["plain"] == whole["plain"]
    assert loaded["counts"] == whole["counts"]
    assert torch.equal(loaded["model"]["weight"], whole["model"]["weight"])


def test_nothing_there_is_nothing(checkpoints):
    assert newest(checkpoints) == (None, [])


def test_the_last_ones_stay(checkpoints):
    for step in (1, 2, 10, 9):
        checkpoints.save(step, state(step))
    assert names(checkpoints) == ["step-00000002.pt", "step-00000009.pt", "step-00000010.pt"]
    checkpoints.save(11, state(11))
    assert names(checkpoints) == ["step-00000010.pt", "step-00000011.pt"]


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "replaced"])
def test_a_torn_file_is_passed_over_and_told(checkpoints, damage):
    checkpoints.save(1, state(1))
    path = checkpoints.save(2, state(2))
    content = bytearray(path.read_bytes())
    if damage == "cut":
        content = content[:-10]
    elif damage == "flipped":
        content[content.index(torch.full((4,), 2.0).numpy().tobytes()) + 2] ^= 0xFF
    else:
        content = b"" if damage == "emptied" else b"something else altogether"
    path.write_bytes(content)
    loaded, [warning] = newest(checkpoints)
    assert loaded["epoch"] == 1
    assert str(path) in warning


def test_a_torn_one_does_not_push_out_the_whole_ones(checkpoints):
    checkpoints.keep = 1
    checkpoints.save(1, state(1))
    (checkpoints.folder / "step-00000009.pt").write_bytes(b"torn")
    checkpoints.save(2, state(2))
    loaded, _ = newest(checkpoints)
    assert loaded["epoch"] == 2


def test_other_files_are_left_alone(checkpoints):
    checkpoints.save(1, state(1))
    other = checkpoints.folder / "best.pt"
    other.write_bytes(b"mine")
    for step in (2, 3, 4):
        checkpoints.save(step, state(step))
    assert other.read_bytes() == b"mine"


def test_code_is_never_run(checkpoints, tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    checkpoints.save(1, state(1))
    torch.save({"model": Evil()}, checkpoints.folder / "step-00000002.pt")
    (checkpoints.folder / "step-00000003.pt").write_bytes(pickle.dumps(Evil()))
    loaded, warnings = newest(checkpoints)
    assert loaded["epoch"] == 1
    assert len(warnings) == 2
    assert not (tmp_path / "ran").exists()


class Own(dict):
    pass


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        ({"best": [object()]}, r"state\['best'\]\[0\] is a builtins.object"),
        ({"own": Own()}, r"state\['own'\] is a Own"),
        ({"f": torch.ones(2).numpy()}, r"state\['f'\] is a numpy.ndarray"),
        ({"f": torch.ones(2).double().numpy()[0]}, r"state\['f'\] is a numpy.float64"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(checkpoints, value, seen):
    checkpoints.save(1, state(1))
    with pytest.raises(TypeError, match=seen):
        checkpoints.save(2, value)
    assert names(checkpoints) == ["step-00000001.pt"]


FULL_DISK = """
import resource, signal, sys, torch
from pathlib import Path
from k8sjob.runtime.checkpoint.store import Checkpoints
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
try:
    Checkpoints(Path(sys.argv[1])).save(2, {"big": torch.zeros(1 << 16)})
except OSError as error:
    print("OSError", error)
"""


def test_a_full_disk_leaves_the_older_ones_whole(checkpoints):
    checkpoints.save(1, state(1))
    # a process of its own: the limit is for all that a process writes
    seen = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(checkpoints.folder)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "OSError" in seen
    assert "File too large" in seen
    assert names(checkpoints) == ["step-00000001.pt"]
    assert newest(checkpoints)[0]["epoch"] == 1


def test_a_folder_that_cannot_be_is_an_oserror(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Checkpoints(tmp_path / "file").save(1, state(1))


def test_a_folder_is_tried_before_there_is_anything_to_lose(checkpoints, tmp_path):
    assert checkpoints.refusal() is None
    assert names(checkpoints) == []
    (tmp_path / "file").write_text("")
    assert "file/saves cannot be written by user" in Checkpoints(tmp_path / "file/saves").refusal()


def test_what_a_killed_process_left_is_tidied(checkpoints):
    checkpoints.save(1, state(1))
    (checkpoints.folder / ".step-00000002.77.tmp").write_bytes(b"half")
    checkpoints.tidy()
    assert names(checkpoints) == ["step-00000001.pt"]
