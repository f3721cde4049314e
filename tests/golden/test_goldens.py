"""The examples are the goldens: what is rendered from them lies beside them.

`make goldens` (pytest tests/golden --regenerate) writes them anew; read the difference before you
commit it.
"""

from pathlib import Path

import pytest
import yaml

from k8sjob.rendering.dockerfile import dockerfile
from k8sjob.rendering.dockerignore import dockerignore
from k8sjob.rendering.manifest import render
from k8sjob.spec import load
from k8sjob.targets.jobs import TARGETS
from k8sjob.targets.pytorchjob.operator import webhook_problems

ROOT = Path(__file__).resolve().parents[2]
JOBS = sorted(ROOT.glob("manifests/*/job.yaml"))
DOCKERFILES = {"cpu": "own-script", "cuda": "fashion-ddp"}


@pytest.fixture
def golden(request):
    """Compares a text with a file of the repository, or writes it there."""

    def check(path, text):
        if request.config.getoption("--regenerate"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"{path.relative_to(ROOT)} is missing; run `make goldens`"
        assert text == path.read_text(encoding="utf-8"), (
            f"{path.relative_to(ROOT)} is not what is rendered; run `make goldens`, read the"
            " difference, commit it"
        )

    return check


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.parent.name)
def test_manifest(job, golden, crd_problems):
    text = render(load(job))
    golden(job.with_name("pytorchjob.yaml"), text)
    manifest = yaml.safe_load(text)
    assert crd_problems(manifest) == []
    assert webhook_problems(manifest) == []


@pytest.mark.parametrize("target", TARGETS[1:], ids=lambda target: target.name)
@pytest.mark.parametrize("example", ["digits-ddp", "own-script", "transformer-fsdp"])
def test_other_target(example, target, golden, crd_problems):
    folder = ROOT / "manifests" / example
    text = render(load(folder / "job.yaml").with_(target=target.name))
    golden(folder / target.file, text)
    for document in yaml.safe_load_all(text):
        assert document["kind"] == "Service" or crd_problems(document) == []


@pytest.mark.parametrize("kind", DOCKERFILES)
def test_dockerfile(kind, golden):
    spec = load(ROOT / "manifests" / DOCKERFILES[kind] / "job.yaml")
    golden(ROOT / "docker" / f"Dockerfile.{kind}", dockerfile(spec))


def test_dockerignore(golden):
    golden(ROOT / "docker" / "dockerignore", dockerignore())


def test_every_manifest_has_its_job():
    rendered = {path.parent for path in ROOT.glob("manifests/*/pytorchjob.yaml")}
    assert rendered <= {job.parent for job in JOBS}
    assert {"fashion-ddp", "own-script"} <= {job.parent.name for job in JOBS}
