"""What rendering loads: a look at a manifest must not wait for the packages of a spec."""

import subprocess
import sys
from pathlib import Path

import pytest

from k8sjob.rendering.manifest import _SHM_VOLUME
from k8sjob.spec.replicas import SHM_VOLUME

JOB = Path(__file__).resolve().parents[2] / "manifests/own-script/job.yaml"
HEAVY = {"click", "jinja2", "kubernetes", "pydantic", "rich", "torch"}


@pytest.mark.parametrize(
    ("statement", "loaded"),
    [
        ("import k8sjob.rendering", set()),
        (
            "from k8sjob.targets.pytorchjob.operator import webhook_problems; webhook_problems({})",
            set(),
        ),
        (
            f"from k8sjob import render; from k8sjob.spec import load; render(load({str(JOB)!r}))",
            {"jinja2", "pydantic"},
        ),
    ],
)
def test_what_is_loaded(statement, loaded):
    script = f"import sys; {statement}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == loaded


def test_the_name_of_shared_memory_is_the_one_that_specs_keep_free():
    assert _SHM_VOLUME == SHM_VOLUME
