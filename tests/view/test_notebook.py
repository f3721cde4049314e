"""Jobs in a real Jupyter kernel: cards, progress, errors, interrupts, and the page about it."""

import asyncio
import os
import re
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from pages import ROOT, blocks

nbformat = pytest.importorskip("nbformat", reason="needs the development dependencies")
nbclient = pytest.importorskip("nbclient", reason="needs the development dependencies")
kernelspec = pytest.importorskip("ipykernel.kernelspec")

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs/how-to/notebook.md"
SPEC = """
from k8sjob import JobFailed, JobSpec, SpecError, run
spec = JobSpec(
    name="cell", image="r/x:1", run={"command": ["python", "main.py"]},
    policy={"max_restarts": 0, "termination_grace": 5},
)
"""
TRAINS = """
%%writefile main.py
import time
from k8sjob.contract import Event
for step in range(1, 4):
    data = {"epoch": 0, "epochs": 1, "step": step, "steps": 3, "loss": 1 / step}
    print(Event("progress", data, time.time()).encode(), flush=True)
    time.sleep(0.3)
note = "<script>alert(1)</script> déjà 한글"
print(Event("metrics", {"accuracy": float("nan"), "note": note}, 1.0).encode())
print("<img src=x onerror=alert(2)> \\x1b[31mred\\u202e")
"""


@pytest.fixture
def cells(tmp_path, monkeypatch):
    """`cells(*sources)`: the outputs of each cell of a notebook that was run in a kernel."""
    kernelspec.write_kernel_spec(str(tmp_path / "jupyter/kernels/python3"))
    for name in ("JUPYTER_PATH", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
    monkeypatch.setenv("K8SJOB_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    (tmp_path / "work").mkdir()

    def execute(*sources, started=lambda _client, _index: None, allow_errors=False):
        notebook = nbformat.v4.new_notebook()
        notebook.cells = [
            nbformat.v4.new_code_cell(textwrap.dedent(source).strip()) for source in sources
        ]
        client = nbclient.NotebookClient(
            notebook,
            timeout=120,
            allow_errors=allow_errors,
            kernel_name="python3",
            resources={"metadata": {"path": str(tmp_path / "work")}},
            on_cell_start=lambda cell, cell_index: started(client, cell_index),
        )
        client.execute()
        return [cell.outputs for cell in notebook.cells]

    return execute


def html(outputs):
    return [out["data"]["text/html"] for out in outputs if "text/html" in out.get("data", {})]


def written(outputs):
    return "".join(out["text"] for out in outputs if out["output_type"] == "stream")


@pytest.mark.essential
def test_a_job_in_a_cell_is_one_card_that_is_drawn_again_and_a_result(cells):
    *_, first, last = cells(
        SPEC,
        TRAINS,
        "spec",
        "result = run(spec); result",
        """
        assert [row["loss"] for row in result.history[:3]] == [1.0, 0.5, 1 / 3]
        assert list(result.logs) == ["master-0"] and "onerror" in result.logs["master-0"]
        again = run(spec)
        print(again.state, len(again.history))
        """,
    )
    shown = html(first)
    assert len(shown) == 2, "the card of the run, and that of its result"
    assert written(first) == ""
    for one in shown:
        assert "Succeeded" in one
        assert "<polyline" in one
        assert not re.search(r"<(script|img)|\x1b|\u202e", one)
    assert "&lt;img src=x onerror=alert(2)&gt; red" in shown[0]
    assert "&lt;script&gt;alert(1)&lt;/script&gt; déjà 한글" in shown[1]
    assert "nan" in shown[1]
    assert "Succeeded 3" in written(last)


def test_a_job_that_fails_shows_its_cause_and_the_line_of_the_cell(cells):
    _, _, failed, carried, *errors = cells(
        SPEC,
        "%%writefile main.py\nimport notthere",
        "before = 1\nrun(spec)",
        """
        try:
            run(spec)
        except JobFailed as error:
            assert error.result.why[0].next_step
            print(error.result.state, "notthere" in error.result.logs["master-0"])
        run(spec, check=False)
        """,
        'JobSpec(name="Bad", image="r/x:1", run={"scirpt": "main.py"})',
        "spec.replicas.workers = 3",
        allow_errors=True,
    )
    (error,) = [out for out in failed if out["output_type"] == "error"]
    shown = "\n".join(error["traceback"])
    assert "no module named 'notthere'" in shown
    assert "line 2" in shown
    assert "run(spec)" in shown
    assert "python_api.py" not in shown
    assert "why:" in html(failed)[0]
    assert "Failed True" in written(carried)
    assert "why:" in html(carried)[-1]
    for outputs, step in zip(errors, ("did you mean 'script'", "spec.with_("), strict=True):
        (error,) = [out for out in outputs if out["output_type"] == "error"]
        shown = "\n".join(error["traceback"])
        assert step in shown
        assert "pydantic" not in shown


def test_an_interrupt_stops_the_job_and_the_kernel_lives(cells):
    def interrupt(client, index):
        def once_it_runs():
            while "| here" not in str(client.nb.cells[2].outputs):
                time.sleep(0.1)
            asyncio.run(client.km.interrupt_kernel())

        if index == 2:
            threading.Thread(target=once_it_runs, daemon=True).start()

    *_, stopped, after = cells(
        SPEC,
        "%%writefile main.py\nimport time; print('here', flush=True); time.sleep(99)",
        "run(spec)",
        "!k8sjob status local/cell",
        started=interrupt,
        allow_errors=True,
    )
    (error,) = [out for out in stopped if out["output_type"] == "error"]
    assert (error["ename"], error["evalue"]) == ("KeyboardInterrupt", "local/cell was stopped")
    assert "Stopped" in html(stopped)[-1]
    assert "Stopped" in written(after)


def test_the_page_about_notebooks_runs_in_one(cells):
    sources = []
    for block in blocks(PAGE):
        if block["note"] == "file":
            sources.append(f"%%writefile {block['text']}\n{block['body']}")
        elif block["language"] == "python" and block["note"] is None:
            sources.append(block["body"])
    assert len(sources) > 3
    cells(*sources)


def test_help_in_a_cell_is_short(cells):
    _, shown = cells(
        "from k8sjob import JobSpec", "print(get_ipython().object_inspect_text('JobSpec'))"
    )
    assert "image: str | Image,\n" in written(shown)
    assert "replicas (Replicas, default Replicas()): How many" in written(shown)
    assert len(written(shown)) < 8000
