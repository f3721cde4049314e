"""Unpacked packages as a layer: the same bytes from any machine, and no trace of it."""

import io
import tarfile
from contextlib import closing

import pytest

from k8sjob.errors import ImageError
from k8sjob.image.inventory import Inventory
from k8sjob.image.layers import pack_packages

INVENTORY = Inventory("base", "/opt/py/bin/python", "3.11", "amd64", (2, 36), "opt/py/site", {})
LONG = "#!/bin/sh\n'''exec' \"/a b/python\" \"$0\" \"$@\"\n' '''\nprint(1)\n"


def unpacked(folder, *, python="/usr/bin/python3.11", umask=0o022):
    files = {
        ".lock": "",
        "bin/tool": f"#!{python}\nprint(1)\n" if " " not in python else LONG,
        "bin/script": "#!/bin/sh\necho python\n",
        "bin/program": "\x7fELF #!python\nbin/tool,x\n",
        "tool/__init__.py": "import os\n",
        "tool/__pycache__/x.pyc": python,
        "tool-1.dist-info/RECORD": f"bin/tool,sha256={len(python)},{len(python)}\n"
        f"tool-1.dist-info/RECORD,,\ntool-1.dist-info/uv_cache.json,sha256={len(python)},9\n"
        "tool/__init__.py,sha256=abc,10\n",
        "tool-1.dist-info/uv_cache.json": python,
        "tool-1.dist-info/direct_url.json": python,
        "näme/data.txt": "x",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod((0o777 if name[:3] == "bin" else 0o666) & ~umask)
    return folder


def members(folder):
    with closing(pack_packages(folder, INVENTORY)) as layer:
        blob = b"".join(layer.content.blocks())
    with tarfile.open(fileobj=io.BytesIO(blob)) as archive:
        return {m.name: (m, m.isfile() and archive.extractfile(m).read()) for m in archive}


def test_what_is_in_it(tmp_path):
    found = members(unpacked(tmp_path))
    assert {name: content for name, (_, content) in found.items() if content is not False} == {
        "opt/deps/bin/program": b"\x7fELF #!python\nbin/tool,x\n",
        "opt/deps/bin/script": b"#!/bin/sh\necho python\n",
        "opt/deps/bin/tool": b"#!/opt/py/bin/python\nprint(1)\n",
        "opt/deps/näme/data.txt": b"x",
        "opt/deps/tool-1.dist-info/RECORD": b"bin/tool,,\ntool-1.dist-info/RECORD,,\n"
        b"tool/__init__.py,sha256=abc,10\n",
        "opt/deps/tool/__init__.py": b"import os\n",
        "opt/py/site/zz-k8sjob-deps.pth": b"import site; site.addsitedir('/opt/deps')\n",
    }
    modes = {name: oct(m.mode) for name, (m, _) in found.items()}
    assert (modes["opt/deps/bin/tool"], modes["opt/deps/tool/__init__.py"]) == ("0o755", "0o644")
    assert {(m.uid, m.gid, m.mtime) for m, _ in found.values()} == {(0, 0, 0)}


@pytest.mark.parametrize(
    "how", [{"python": "/home/me/.venv/bin/python3"}, {"python": "/a b/python"}, {"umask": 0o077}]
)
def test_the_machine_that_unpacked_them_does_not_matter(tmp_path, how):
    digests = []
    for name, options in (("one", {}), ("two", how)):
        with closing(pack_packages(unpacked(tmp_path / name, **options), INVENTORY)) as layer:
            digests.append(layer.content.digest)
    assert digests[0] == digests[1]


def test_a_name_that_no_image_can_hold(tmp_path):
    (tmp_path / "caf\udce9.py").write_text("")
    with pytest.raises(ImageError, match="a package has a name that is not UTF-8"):
        pack_packages(tmp_path, INVENTORY)
