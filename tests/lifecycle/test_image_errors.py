"""What container runtimes and registries say of an image that cannot be pulled, and the cause.

containerd, CRI-O and Docker, before Docker Hub, ghcr.io, quay.io, Artifact Registry, ECR, GitLab
and Harbor.
"""

import json
from pathlib import Path

import pytest

from k8sjob.lifecycle.diagnose.containers import explain_pull

SAID = json.loads(Path(__file__).with_name("image_errors.json").read_text())
CASES = [(cause, name) for cause, said in SAID.items() for name in said]


@pytest.mark.parametrize(("cause", "name"), CASES)
def test_what_a_registry_says_has_its_cause(cause, name):
    assert explain_pull("ErrImagePull", "team/train:1", SAID[cause][name]).cause == cause
