"""One rank's saves, as files and as folders: what is on the disk, what is read and refused."""

import errno
import io
import os
import pickle
import re
import subprocess
import sys
import time
from collections import Counter, OrderedDict
from enum import Enum, IntEnum
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from k8sjob.runtime.base.env import dist_env
from k8sjob.runtime.base.event_lines import Reporter
from k8sjob.runtime.base.heartbeat import Observer
from k8sjob.runtime.checkpoint import format as checkpoint_format
from k8sjob.runtime.checkpoint import integrity
from k8sjob.runtime.checkpoint.store import (
    Checkpoints,
    check_state,
    measure,
    read_digests,
    write_digests,
)
from k8sjob.runtime.checkpoint.writer import Checkpointer
from k8sjob.runtime.comm.process_group import Group


class Desk:
    """A group of one that saves and resumes in one folder."""

    def __init__(self, folder, form="sharded"):
        self.folder, self.detail, self.form = folder, io.StringIO(), form
        self.suffix = "" if form == "sharded" else ".pt"
        self.keep = 2

    @property
    def saves(self):
        group = Group(dist_env({}), "gloo", torch.device("cpu"))
        reporter = Reporter(active=True, events=False, out=self.detail)
        return Checkpointer(Checkpoints(self.folder, self.keep), group, reporter, form=self.form)

    def save(self, *steps):
        saves = self.saves
        for step in steps:
            begin(saves, step)
        saves.settle()

    def of(self, step):
        """The path of a step's checkpoint."""
        return self.folder / f"step-{step:08d}{self.suffix}"

    def newest(self):
        saved = self.saves.newest("test")
        return saved and checkpoint_format.gathered(saved.state)

    @property
    def names(self):
        return sorted(path.name for path in self.folder.iterdir())

    @property
    def skipped(self):
        return [line for line in self.detail.getvalue().splitlines() if "skipped" in line]


def state(step):
    weight = torch.arange(6.0).view(2, 3) + step
    numbers = {"momentum": weight * 2, "step": torch.tensor(float(step))}
    groups = [{"lr": 0.1 * step, "betas": (0.9, 0.99), "params": [0]}]
    return {"model": {"a.weight": weight}, "optimizer": {"state": {0: numbers}, "groups": groups}}


def begin(saves, step, parts=None):
    content = parts or state(step)
    how = {"whole": lambda: content, "parts": lambda: content}
    saves.save("test", step, {"epoch": step}, **how, epoch=step)


@pytest.fixture
def desk(tmp_path):
    """One that saves folders."""
    return Desk(tmp_path / "deep" / "saved")


@pytest.fixture(params=["full", "sharded"])
def either(request, tmp_path):
    """One that saves files, and one that saves folders."""
    return Desk(tmp_path / "deep" / "saved", request.param)


def test_what_is_saved_is_found_again(either):
    desk = either
    desk.save(1, 7)
    found = desk.newest()
    assert (found["epoch"], Observer.resumed) == (7, 7)
    assert torch.equal(found["model"]["a.weight"], state(7)["model"]["a.weight"])
    assert torch.equal(
        found["optimizer"]["state"][0]["momentum"], state(7)["model"]["a.weight"] * 2
    )
    assert found["optimizer"]["groups"] == state(7)["optimizer"]["groups"]
    assert desk.names == [desk.of(1).name, desk.of(7).name]
    assert desk.detail.getvalue().startswith(f"checkpoint {desk.of(1)} (epoch 1, step 1)\n")


def test_plain_values_are_found_again(either):
    plain = [None, True, 1, 2.5, "text", b"bytes", (1, "two")]
    ordered = OrderedDict(a=torch.tensor([1, 2]))
    saves = either.saves
    saves.save("test", 1, {"counts": Counter([1, 1, 2]), "plain": plain, "ordered": ordered})
    saves.settle()
    found = either.newest()
    assert (found["plain"], found["counts"]) == (plain, {1: 2, 2: 1})
    assert found["ordered"]["a"].tolist() == [1, 2]


def test_nothing_there_is_nothing(either):
    assert either.newest() is None
    assert not either.detail.getvalue()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_tools_read_it(desk):
    desk.save(3)
    into = {"model": {"a.weight": torch.zeros(2, 3)}}
    dcp.load(into, checkpoint_id=desk.folder / "step-00000003", no_dist=True)
    assert torch.equal(into["model"]["a.weight"], state(3)["model"]["a.weight"])


def test_what_changes_while_it_is_written_is_not_in_it(desk):
    saves, parts = desk.saves, state(1)
    begin(saves, 1, parts)
    parts["model"]["a.weight"].fill_(-1)
    saves.settle()
    assert torch.equal(desk.newest()["model"]["a.weight"], state(1)["model"]["a.weight"])


def test_the_last_ones_stay_and_other_files(either):
    either.folder.mkdir(parents=True)
    (either.folder / "best.pt").write_bytes(b"mine")
    either.save(1, 2, 10, 9)
    steps = [either.of(step).name for step in (2, 9, 10)]
    assert either.names == ["best.pt", *steps]
    either.save(11)
    assert either.names == ["best.pt", either.of(10).name, either.of(11).name]


def test_a_torn_one_does_not_push_out_the_whole_ones(either):
    either.keep = 1
    either.save(1)
    (either.folder / "step-00000009.pt").write_bytes(b"torn")
    either.save(2)
    assert either.newest()["epoch"] == 2


def test_what_a_killed_process_left_is_removed(either):
    either.save(1)
    (either.folder / ".step-00000002.77.tmp").write_bytes(b"half")
    assert either.newest()["epoch"] == 1
    assert either.names == [either.of(1).name]


def test_the_same_step_again_replaces_it(desk):
    desk.save(1, 2)
    saves = desk.saves
    begin(saves, 2, state(9))
    saves.settle()
    assert desk.names == ["step-00000001", "step-00000002"]
    assert torch.equal(desk.newest()["model"]["a.weight"], state(9)["model"]["a.weight"])


def test_one_that_is_being_replaced_counts_until_the_new_one_is_there(desk):
    desk.save(1, 2)
    (desk.folder / "step-00000002").rename(desk.folder / "step-00000002.old")
    assert desk.newest()["epoch"] == 2


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "others.pt", "digests.json"])
def test_a_damaged_file_is_reported_and_the_one_before_taken(desk, name, damage):
    desk.save(1, 2)
    file = desk.folder / "step-00000002" / name
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    else:
        content[len(content) // 2] ^= 0x80
        file.write_bytes(content[:-9] if damage == "cut" else content)
    assert desk.newest()["epoch"] == 1
    [told] = desk.skipped
    assert told.startswith(f"warning: checkpoint {desk.of(2)} is skipped: ")
    assert name in told


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "replaced"])
def test_a_damaged_checkpoint_of_one_file_is_skipped(tmp_path, damage):
    desk = Desk(tmp_path, "full")
    desk.save(1, 2)
    content = bytearray(desk.of(2).read_bytes())
    if damage == "cut":
        content = content[:-10]
    elif damage == "flipped":
        content[content.index(state(2)["model"]["a.weight"].numpy().tobytes()) + 2] ^= 0xFF
    else:
        content = b"" if damage == "emptied" else b"something else altogether"
    desk.of(2).write_bytes(content)
    assert desk.newest()["epoch"] == 1
    assert str(desk.of(2)) in desk.skipped[0]


def test_the_message_is_the_one_in_the_documentation(desk):
    desk.save(1, 2)
    (desk.folder / "step-00000002" / "others.pt").unlink()
    assert desk.newest()["epoch"] == 1
    page = Path(__file__).parents[2] / "docs/how-to/checkpoints.md"
    [shown] = re.findall(r"^\| `(checkpoint \.{3} .*?)` \|", page.read_text(), re.MULTILINE)
    pattern = re.escape(shown).replace(re.escape("..."), ".*").replace("FILE", "others.pt")
    assert re.search(pattern, desk.detail.getvalue())


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def forge(folder, name, content):
    """Change a file and its digest, as somebody would who means harm."""
    digests = read_digests(folder)
    (folder / name).write_bytes(content)
    write_digests(folder, {**digests, name: measure(folder / name)})


def saved_by_torch(value):
    whole = io.BytesIO()
    torch.save(value, whole)
    return whole.getvalue()


@pytest.mark.parametrize("name", [".metadata", "others.pt"])
@pytest.mark.parametrize("wrap", [pickle.dumps, saved_by_torch])
def test_code_in_a_description_is_never_run(desk, tmp_path, name, wrap):
    desk.save(1, 2)
    forge(desk.folder / "step-00000002", name, wrap({"model": Evil(tmp_path / "ran")}))
    assert desk.newest()["epoch"] == 1
    assert f"step-00000002 is skipped: {name}" in desk.detail.getvalue()
    assert not (tmp_path / "ran").exists()


ODD = {
    "linked": lambda path: path.symlink_to(path.with_stem("step-00000001")),
    "of another step": lambda path: path.with_stem("step-00000001").rename(path),
}


@pytest.mark.parametrize("odd", ODD)
def test_what_is_no_checkpoint_of_its_name_is_skipped(either, odd):
    either.save(1, 2)
    ODD[odd](either.of(9))
    assert either.newest()["epoch"] == 2
    [told] = either.skipped
    assert told.startswith(f"warning: checkpoint {either.of(9)} is skipped: ")


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_where_the_file_system_fails_nothing_starts_from_scratch(either, monkeypatch, number):
    either.save(1, 2)
    really, failing = io.open, ["step-00000002"]

    def fail(path, *args, **kwargs):
        if any(name in str(path) for name in failing):
            raise OSError(number, os.strerror(number), str(path))
        return really(path, *args, **kwargs)

    monkeypatch.setattr(io, "open", fail)
    assert either.newest()["epoch"] == 1
    assert "cannot be read: " in either.skipped[0]
    failing.append("step-00000001")
    with pytest.raises(OSError, match=f"{either.of(2)}: it cannot be read: .*; make it readable"):
        either.newest()
    failing.clear()
    assert either.newest()["epoch"] == 2


class TwoRanks:
    """Rank 0 of two, of which rank 1 has found a file damaged."""

    rank, world_size = 0, 2

    def gather(self, text):
        return [text, torch.tensor([*b"others.pt does not match\0"], dtype=torch.uint8)]


def test_what_one_rank_finds_damaged_is_damaged_though_another_cannot_read_it(
    tmp_path, monkeypatch
):
    def fail(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(integrity, "verify", fail)
    problem = integrity._verified(tmp_path / "step-00000001", TwoRanks(), lambda: None)
    assert problem == "others.pt does not match"


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "others.pt"])
def test_a_folder_has_files_with_digests(desk, name):
    desk.save(1, 2)
    folder = desk.folder / "step-00000002"
    digests = read_digests(folder)
    write_digests(folder, {file: digest for file, digest in digests.items() if file != name})
    assert desk.newest()["epoch"] == 1
    assert name in desk.skipped[0]


@pytest.mark.parametrize("value", [Evil("/"), Path("/")], ids=["code", "class"])
def test_code_in_a_checkpoint_brings_no_advice_to_run_it(either, value):
    either.save(1, 2)
    content = saved_by_torch({"marked": value})
    if either.form == "sharded":
        forge(either.of(2), "others.pt", content)
    else:
        either.of(2).write_bytes(content)
    assert either.newest()["epoch"] == 1
    assert "it cannot be loaded: " in either.skipped[0]
    assert not re.search("weights.only|torch.serialization|trust", either.skipped[0])


def test_code_in_a_file_is_never_run(tmp_path):
    desk = Desk(tmp_path / "saved", "full")
    desk.save(1)
    for step, wrap in ((2, saved_by_torch), (3, pickle.dumps)):
        desk.of(step).write_bytes(wrap({"model": Evil(tmp_path / "ran")}))
    assert desk.newest()["epoch"] == 1
    assert len(desk.skipped) == 2
    assert not (tmp_path / "ran").exists()


class EarlyPython(pickle.Pickler):
    """Pickles as Python 3.11.0 to 3.11.3: the members of enumerations by getattr."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_a_description_of_an_early_python_311(desk):
    desk.save(1, 2)
    folder, out = desk.folder / "step-00000002", io.BytesIO()
    EarlyPython(out).dump(pickle.loads((folder / ".metadata").read_bytes()))
    assert b"getattr" in out.getvalue()
    forge(folder, ".metadata", out.getvalue())
    assert desk.newest()["epoch"] == 2


@pytest.mark.parametrize("wrap", [pickle.dumps, saved_by_torch])
def test_code_in_a_part_is_never_run(desk, tmp_path, wrap):
    desk.save(2)
    folder = desk.folder / "step-00000002"
    content = wrap(Evil(tmp_path / "ran"))
    about = pickle.loads((folder / ".metadata").read_bytes())
    for place in about.storage_data.values():
        place.offset, place.length = 0, len(content)
    forge(folder, "__0_0.distcp", content)
    forge(folder, ".metadata", pickle.dumps(about))
    with pytest.raises(ValueError, match=r"a\.weight cannot be loaded"):
        desk.newest()
    assert not (tmp_path / "ran").exists()


def test_a_description_reaches_no_file_outside(desk, tmp_path):
    desk.save(1, 2)
    folder = desk.folder / "step-00000002"
    about = pickle.loads((folder / ".metadata").read_bytes())
    for place in about.storage_data.values():
        place.relative_path = "../secret"
    forge(folder, ".metadata", pickle.dumps(about))
    assert desk.newest()["epoch"] == 1
    assert "names ../secret, of which there is no digest" in desk.detail.getvalue()


class Own(dict):
    pass


class Phase(Enum):
    WARM = "warm"


class Level(IntEnum):
    HIGH = 1


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        ({"best": [object()]}, r"state\['best'\]\[0\] is a builtins.object"),
        ({"none": b""}, r"state\['none'\] is a builtins.bytes"),
        ({"own": Own()}, r"state\['own'\] is a Own"),
        ({"level": Level.HIGH}, r"state\['level'\] is a .*Level"),
        ({"a": {Phase.WARM: 1}}, r"the key <Phase.* of state\['a'\] is a .*Phase"),
        ({torch.ones(2).double().numpy()[0]: 1}, r"the key .* of state is a numpy.float64"),
        ({"f": torch.ones(2).double().numpy()[0]}, r"state\['f'\] is a numpy.float64"),
    ],
)
def test_what_could_not_be_loaded_is_refused(value, seen):
    with pytest.raises(TypeError, match=seen):
        check_state(value)


def test_what_is_refused_leaves_nothing_behind(either):
    either.save(1)
    with pytest.raises(TypeError, match=r"\['odd'\]\[0\] is a builtins.object"):
        begin(either.saves, 2, {"odd": [object()]})
    assert either.names == [either.of(1).name]


FULL_DISK = """
import resource, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import torch
from test_checkpoint import Desk, begin, state
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
desks = [Desk(Path(sys.argv[2], form), form) for form in ("full", "sharded")]
for desk in desks:
    desk.save(1)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
big = {**state(2), "model": {"big": torch.zeros(1 << 16)}}
for desk in desks:
    saves = desk.saves
    begin(saves, 2, big)
    saves.settle()
    begin(saves, 3)
    saves.settle()
    print(desk.detail.getvalue(), desk.names)
"""


def test_a_full_disk_leaves_the_older_ones_and_is_reported(tmp_path):
    # a process of its own: the limit is for all that a process writes
    argv = [sys.executable, "-c", FULL_DISK, Path(__file__).parent, tmp_path]
    seen = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert seen.count("warning: no checkpoint at step 2: ") == 2
    assert seen.count("training continues, and older ones are intact") == 2
    for desk in (Desk(tmp_path / "full", "full"), Desk(tmp_path / "sharded")):
        assert str([desk.of(1).name, desk.of(3).name]) in seen
        assert desk.newest()["epoch"] == 3


def test_a_failed_write_is_reported_at_the_next_step(desk):
    saves = desk.saves
    (desk.folder / "step-00000002.pt" / "in the way").mkdir(parents=True)
    saves.save("test", 2, {"model": torch.zeros(3)})
    until = time.monotonic() + 60
    while not desk.detail.getvalue():
        saves.poll()
        assert time.monotonic() < until
        time.sleep(0.01)
    assert desk.detail.getvalue().startswith("warning: no checkpoint at step 2: ")
    saves.save("test", 3, {"model": torch.zeros(3)})
    saves.settle()
    assert desk.newest()["step"] == 3
    assert not list(desk.folder.glob(".step-*"))


def test_a_file_and_a_folder_count_alike(desk):
    desk.save(1)
    saves = desk.saves
    saves.save("test", 2, {"epoch": 2})
    saves.settle()
    assert desk.newest()["epoch"] == 2
    desk.save(3)
    assert desk.names == ["step-00000002.pt", "step-00000003"]
