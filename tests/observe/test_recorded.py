"""Snapshots of sick jobs, recorded from Kubernetes 1.34.4 with training operator 1.9.4.

Trimmed to what can matter; tests/cluster/test_why.py causes each of them anew.
"""

import json
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from observed import lacking

from k8sjob.backends.api import Snapshot
from k8sjob.observe.diagnose import diagnose
from k8sjob.observe.diagnose.containers import explain_pull

FOLDER = Path(__file__).with_name("recorded")

RECORDED = {path.stem: json.loads(path.read_text()) for path in FOLDER.glob("*.json")}
"""The jobs by name; `why` is the first cause and message; "..." at its end cuts it short."""


BY_OUTPUT = {"inner-exception", "jobset-restart"}
"""Jobs of which only the output has the cause."""


def why(seen, *, logs=True, related=True):
    snapshot = Snapshot(seen["job"], seen.get("pods", []), seen.get("events", []))
    return diagnose(
        snapshot,
        seen.get("logs", {}) if logs else {},
        seen.get("related", []) if related else [],
        now=datetime.fromisoformat(seen["now"]),
    )


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_a_recorded_job(name):
    seen = RECORDED[name]
    first, *others = why(seen)
    detail, expected = f"{first.cause} | {first.message}", seen["why"]
    assert detail == expected or (
        expected.endswith("...") and detail.startswith(expected.removesuffix("..."))
    )
    assert first.next_step
    assert [finding.cause for finding in others] == seen.get("others", [])


IMAGES = {
    "image-access": "127.0.0.1:31205/secret/train:1",
    "image-missing": "registry.example/team:no-such",
    "image-registry": "127.0.0.1:1/train:1",
}


@pytest.mark.parametrize("host", ["127.0.0.1:35401", "10.40.3.1:5403", "404.forbidden.example"])
@pytest.mark.parametrize("path", ["train:401", "not-found/a:403", "unauthorized:404", "EOF:429"])
@pytest.mark.parametrize("name", IMAGES)
def test_the_name_of_an_image_is_not_its_error(name, host, path):
    before, image = IMAGES[name].split("/", 1)
    detail = (FOLDER / f"{name}.json").read_text()
    here = detail.replace(f"{before}/{image}", f"{host}/{path}").replace(before, host)
    here = here.replace("v2/train/manifests/1", "v2/{}/manifests/{}".format(*path.split(":")))
    found = why(json.loads(here))
    causes = [finding.cause for finding in why(RECORDED[name])]
    assert [finding.cause for finding in found] == causes
    assert f"{host}/{path}" in found[0].message


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_the_cause_is_found_without_logs_and_nodes(name):
    """Output, nodes and claims are forbidden to some users."""
    found = why(RECORDED[name], logs=False, related=False)
    if name in {"interface", "meeting"}:  # it had not ended when it was looked at
        assert found == []
    else:
        cause = RECORDED[name]["why"].partition(" ")[0]
        alone = {"lost": "waiting", "gang-queue": "waiting"}
        cause = {**alone, **dict.fromkeys(BY_OUTPUT, "crash")}.get(name, cause)
        assert found[0].cause == cause


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), name=st.sampled_from(sorted(RECORDED)))
def test_objects_that_lack_something_are_no_error(data, name):
    """Other versions, other kubelets and virtual ones leave out what these objects have."""
    seen = lacking(data, RECORDED[name], lambda path: {"status", "spec", "events"} & {*path})
    for finding in why({**seen, "logs": {}}):
        assert finding.message
        assert finding.next_step


PULL_ERRORS = json.loads(Path(__file__).with_name("image_errors.json").read_text())
"""Of containerd, CRI-O and Docker, before the well-known registries, by cause."""


@pytest.mark.parametrize(
    ("cause", "message"), [(c, text) for c, texts in PULL_ERRORS.items() for text in texts.values()]
)
def test_an_error_of_a_registry_has_its_cause(cause, message):
    assert explain_pull("ErrImagePull", "team/train:1", message).cause == cause
