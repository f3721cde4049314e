"""docs/reference/errors-environment.md is run: every row, and every message has one."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from error_tables import literal, pattern, rows

from k8sjob import contract
from k8sjob.runtime.base import config
from k8sjob.runtime.base.env import dist_env, elastic_env, node_env
from k8sjob.runtime.base.errors import EnvError

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/errors-environment.md"
ROWS = list(rows(PAGE))


def settings(environ):
    config.runtime_config(environ)
    config.mapped_paths(environ)


def elastic(environ):
    elastic_env(environ, "digits-worker-0")


READERS = {"node": node_env, "elastic": elastic, "process": dist_env, "settings": settings}


def assignments(words):
    """The NAME=VALUE words in front, and what comes after them."""
    count = next((n for n, word in enumerate(words) if "=" not in word), len(words))
    return dict(word.split("=", 1) for word in words[:count]), words[count:]


@pytest.mark.parametrize("row", [row for row in ROWS if row.kind in READERS], ids=str)
def test_an_environment_is_refused_as_shown(row):
    environ, rest = assignments(shlex.split(row.given))
    assert not rest
    with pytest.raises(EnvError) as caught:
        READERS[row.kind](environ)
    assert str(caught.value) == row.error
    assert caught.value.exit_code == row.exit_code


@pytest.mark.parametrize("row", [row for row in ROWS if row.kind == "command"], ids=str)
def test_a_start_is_refused_as_shown(row, tmp_path):
    given, (_, *argv) = assignments(shlex.split(row.given))
    (tmp_path / "main.py").touch()
    ours = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "PET_", "K8SJOB_", "TORCHELASTIC")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    if version := given.pop("TORCH", None):
        info = tmp_path / "site" / f"torch-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        environ["PYTHONPATH"] = str(info.parent)
    environ[contract.CONFIG_ENV] = contract.RuntimeConfig(rendezvous_timeout=0.5).encode()
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=tmp_path,
        env=environ | given,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == row.exit_code
    assert re.search(pattern(row.error), done.stderr), done.stderr
    assert "Traceback" not in done.stderr


def messages():
    """The messages of all errors that the two readers raise, as patterns."""
    for name in ("env", "config"):
        for node in ast.walk(ast.parse((ROOT / f"k8sjob/runtime/base/{name}.py").read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "EnvError":
                yield pytest.param(literal(node.args[0]), id=f"{name}-{node.lineno}")


@pytest.mark.parametrize("message", list(messages()))
def test_every_message_has_its_row(message):
    assert any(re.fullmatch(message, row.error) for row in ROWS), message


def test_the_page_has_all_its_tables():
    assert {row.kind for row in ROWS} == {*READERS, "command"}
