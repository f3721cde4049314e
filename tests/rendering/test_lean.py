"""What rendering loads: a look at a manifest must not wait for the packages of a spec."""

import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).resolve().parents[2] / "manifests/own-script/job.yaml"
HEAVY = {"click", "jinja2", "kubernetes", "pydantic", "rich", "torch"}


@pytest.mark.parametrize(
    ("statement", "loaded"),
    [
        ("import k8sjob.rendering", set()),
        ("from k8sjob.targets.pytorchjob.operator import webhook_problems as f; f({})", set()),
        (f"import k8sjob as k; k.render(k.load({str(JOB)!r}))", {"jinja2", "pydantic"}),
    ],
)
def test_what_is_loaded(statement, loaded):
    script = f"import sys; {statement}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == loaded
