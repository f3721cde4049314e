"""An earlier layer of the same code: known without reading it, and never of files that changed."""

import os
import random
import time
from contextlib import closing

import pytest

from k8sjob.image.build_context import read_context
from k8sjob.image.layers import pack_code
from k8sjob.image.packed_before import PackedBefore


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "k8sjob"


def known(folder, *, alone=False):
    return PackedBefore(folder, alone=alone).layer(read_context(folder))


def packed(folder, later=10.0):
    """The layer of a folder, which is read so many seconds from now."""
    before = PackedBefore(folder, alone=False)
    before._begun += later
    context = read_context(folder)
    with closing(pack_code(context)) as layer:
        before.remember(context, layer)
        return layer


def same_time(path, content):
    state = path.stat()
    path.write_text(content)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def test_the_layer_is_known_with_its_findings(code):
    (code / "settings.sh").write_text("TOKEN=gl" + "pat-" + "a1B2c3D4e5F6g7H8i9J0\n")
    layer, again = packed(code), known(code)
    assert (again.content.digest, again.content.size) == (layer.content.digest, layer.content.size)
    assert (again.diff_id, again.findings) == (layer.diff_id, layer.findings)
    assert [finding.line for finding in again.findings] == [1]
    assert known(code, alone=True) is None


CHANGES = {
    "another text": lambda code: (code / "main.py").write_text("print('other')\n"),
    "of the same size and time": lambda code: same_time(code / "main.py", "print('hellO')\n"),
    "a mode": lambda code: (code / "main.py").chmod(0o755),
    "a new file": lambda code: (code / "new.py").touch(),
    "a file is gone": lambda code: (code / "pkg/__init__.py").unlink(),
    "another name": lambda code: (code / "main.py").rename(code / "main2.py"),
    "a link in its place": lambda code: [(code / "main.py").unlink(), link(code, "pkg")],
    "another target": lambda code: [(code / "link").unlink(), (code / "link").symlink_to("pkg")],
    "left out": lambda code: (code / ".dockerignore").write_text("pkg\n"),
}


def link(code, target):
    (code / "main.py").symlink_to(target)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_is_seen(code, change):
    (code / "link").symlink_to("main.py")
    packed(code)
    assert known(code)
    change(code)
    assert known(code) is None


def test_a_state_that_a_network_kept_too_long_is_not_believed(code):
    """As NFS does, whose lstat shows another machine's write up to a minute later."""
    packed(code)
    late = read_context(code)
    same_time(code / "main.py", "print('hellO')\n")
    assert PackedBefore(code, alone=False).layer(late) is None


def test_what_is_left_out_changes_nothing(code):
    packed(code)
    (code / "__pycache__").mkdir()
    (code / "__pycache__" / "main.pyc").touch()
    assert known(code)


def test_times_that_are_too_young_are_not_trusted(code):
    packed(code, later=0)
    assert known(code) is None
    packed(code, later=-1)  # a clock that was set back
    assert known(code) is None


def test_no_write_is_missed_however_fast_it_follows(code, monkeypatch):
    monkeypatch.setattr("k8sjob.image.packed_before._RACY_SECONDS", 0.02)  # ticks are of 4 ms
    chance, hits = random.Random(1), 0
    for _ in range(150):
        (code / "main.py").write_text(f"print('{chance.randrange(10, 13)}')\n")
        time.sleep(chance.choice([0, 0, 0.01, 0.03]))
        earlier = known(code)
        layer = packed(code, later=0)
        hits += earlier is not None
        assert earlier is None or earlier.content.digest == layer.content.digest
        again = known(code)
        hits += again is not None
        assert again is None or again.content.digest == layer.content.digest
    assert hits > 10


def test_a_cache_that_others_can_write_is_not_used(code, cache):
    packed(code)
    cache.chmod(0o777)
    assert known(code) is None
