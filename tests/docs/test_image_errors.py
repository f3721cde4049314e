"""docs/reference/errors-image.md is run: every row of its tables."""

from __future__ import annotations

import re
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from error_tables import kinds, pattern, rows
from wheelhouse import alone, wheel

from k8sjob.errors import ImageError
from k8sjob.image.build_context import read_context
from k8sjob.image.builders.pip_settings import write_secrets
from k8sjob.image.builders.uv import find_uv, unpack
from k8sjob.image.dependencies import Dependencies
from k8sjob.image.inventory import Inventory
from k8sjob.image.layers import pack_code
from k8sjob.image.registry import manifest
from k8sjob.image.registry.credentials import Keyring
from k8sjob.image.registry.manifest import ImageReference, Index
from k8sjob.image.registry.oci_layout import Layout
from k8sjob.spec import Image

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/errors-image.md"
ROWS = list(rows(PAGE))


def code(given, folder):
    (folder / "code").mkdir()
    (folder / "code/main.py").write_text("print('hello')\n")
    subprocess.run(["bash", "-c", given], cwd=folder / "code", check=True)
    with closing(pack_code(read_context(folder / "code"))):
        pass


def login(given, folder):
    (folder / "config.json").write_text(given)
    keyring = Keyring.load({"DOCKER_CONFIG": str(folder), "HOME": str(folder)})
    for entry in keyring.entries(ImageReference.parse("reg.example/team/x")):
        entry.login()


def name(given, folder):
    ImageReference.parse(given)


def read(given, folder):
    found = manifest.read(given.encode(), "", "base")
    if isinstance(found, Index):
        found.choose(None, "base")


def requirements(given, folder):
    (folder / "requirements.txt").write_text(given)
    image = Image(repository="reg.example/x", base="base", requirements="requirements.txt")
    Dependencies.of(image, folder)


def settings(given, folder):
    (folder / "pip.conf").write_text(given)
    write_secrets(folder, {"PIP_CONFIG_FILE": str(folder / "pip.conf"), "HOME": str(folder)})


def wheels(given, folder):
    if find_uv() is None:
        pytest.skip("uv missing; pip install 'k8sjob[build]'")
    links = folder / "links"
    wheel(links, "scipy", "2.0", requires=["numpy>=2.3"])
    wheel(links, "numpy", "2.5")
    (links / "mamba-1.0.tar.gz").write_bytes(b"")
    numpy = {"numpy": "Name: numpy\nVersion: 2.2.4"}
    base = Inventory("base", "/usr/bin/python", "3.11", "amd64", (2, 36), "site", numpy)
    with pytest.MonkeyPatch.context() as patch:
        alone(links, folder, patch)
        unpack(base, Dependencies(requirements=given), folder / "deps", lambda _line: None)


def output(given, folder):
    subprocess.run(["bash", "-c", given], cwd=folder, check=True)
    Layout(folder / "out", ImageReference.parse("reg.example/team/x"))


KINDS = {
    "folder": output,
    "wheels": wheels,
    "code": code,
    "login": login,
    "name": name,
    "manifest": read,
    "requirements": requirements,
    "settings": settings,
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.kind}: {row.given}"[:60])
def test_every_row_says_what_happens(row, tmp_path):
    with pytest.raises(ImageError) as caught:
        KINDS[row.kind](row.given, tmp_path)
    assert re.fullmatch(pattern(row.error), str(caught.value)), caught.value


def test_every_table_is_run():
    assert sorted(kinds(PAGE)) == sorted(KINDS) == sorted({row.kind for row in ROWS})
