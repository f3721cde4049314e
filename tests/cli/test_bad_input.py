"""Whatever is in a file, the answer is a line and an exit code."""

import contextlib
import io

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from k8sjob.cli import main

PIECES = [
    "name: x\n", "image: a/b:1\n", "run: {script: main.py}\n", "kind: PyTorchJob\n", "spec:\n",
    "apiVersion: kubeflow.org/v1\n", "  pytorchReplicaSpecs:\n", "    Master: {replicas: 1}\n",
    "import torch\n", "&a [*a]\n", "---\n", "- 1\n", "? {a: b}\n", "<<: 3\n", "!!python/x y\n",
    "\t", "\0", "\x1b]0;t\x07", "\ud7ff", "overlay: {spec: null}\n", "replicas: []\n", "{" * 70,
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=20), max_size=8).map("".join)


def stream(data=b""):
    return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", write_through=True)


def written(out):
    return out.buffer.getvalue().decode()


@pytest.mark.parametrize("command", ["validate", "render", "adopt", "lint"])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=100) | TEXTS.map(lambda text: text.encode()))
@example(data=b"")
@example(data=b"\xff\xfe")
@example(data=b"[" * 100_000)
@example(data=b"kind: PyTorchJob\nspec: 7\n")
@example(data=b"name: x\nimage: {}\nrun: []\nreplicas: 'x'\n")
def test_no_file_is_a_bug(command, data, monkeypatch):
    monkeypatch.setattr("sys.stdin", stream(data))
    out, err = stream(), stream()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        main([command, "-"])
    detail = written(err)
    assert end.value.code in (0, 1), detail
    assert "bug in k8sjob" not in detail
    assert "Traceback" not in detail
    assert "\x1b" not in detail
    if end.value.code == 1:
        assert detail.startswith("error: ") or written(out)


@pytest.mark.parametrize("command", ["validate", "render", "adopt"])
def test_a_file_without_an_end_is_too_large(command, k8sjob):
    done = k8sjob(command, "/dev/zero")
    assert done.code == 1
    assert "/dev/zero: longer than the 1048576 bytes" in done.err
