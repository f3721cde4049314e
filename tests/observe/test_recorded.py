"""Snapshots of sick jobs, recorded from Kubernetes 1.34.4 with training operator 1.9.4.

Trimmed to what can matter; tests/cluster/test_why.py causes each of them anew.
"""

import json
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k8sjob.backends.api import Snapshot
from k8sjob.observe.diagnose import diagnose
from k8sjob.observe.diagnose.containers import explain_pull

FOLDER = Path(__file__).with_name("recorded")

SAID = {
    "account": "service-account | master-0: there is no service account 'trainer' in namespace"
    " team",
    "claim-pending": "volume-claim | master-0: the claim 'pending' has no volume: no persistent"
    " volumes available for this claim and no storage class is set, for 37 s",
    "command": 'start | master-0: its command cannot be started: exec: "no-such-program":'
    " executable file not found in $PATH",
    "config": "config-map | master-0: there is no config map 'settings' in namespace team",
    "crash": "crash | master-0: exit code 3: ValueError: no",
    "drained": "evicted | master-0: its node was drained, or it was evicted by request: Eviction"
    " API: evicting, 31 s ago",
    "evicted": "evicted | master-0: evicted by its node: Pod ephemeral local storage usage exceeds"
    " the total limit of containers 10Mi",
    "gpus": "unschedulable | master-0: none of 3 nodes takes it: 1 has too little nvidia.com/gpu"
    " free (it asks for 8): there is 1 node of A100 with 4; 2 have a taint that it does not"
    " tolerate (k8sjob-tests/ghost, not ready), for 29 s",
    "image-access": "image-access | master-0: the registry refuses the image"
    " 127.0.0.1:31205/secret/train:1: pulling from host 127.0.0.1:31205 failed with status code"
    " [manifests 1]: 401 Unauthorized",
    "image-missing": "image-missing | master-0: there is no image registry.example/team:no-such in"
    " its registry",
    "image-name": "image-name | master-0: 'Train:1:2' is not a valid image name: Failed to apply"
    " default image tag \"Train:1:2\": couldn't parse image name \"Train:1:2\": invalid reference"
    " format: repository name (library/Train) must be lowercase",
    "image-registry": "registry | master-0: the registry of the image 127.0.0.1:1/train:1 cannot be"
    ' reached from its node: failed to do request: Head "http://127.0.0.1:1/v2/train/manifests/1":'
    " dial tcp 127.0.0.1:1: connect: connection refused",
    "init": "init | master-0: its init container 'mine' ended with exit code 6, 2 times over, for"
    " 3 s",
    "interface": "interface | master-0: it found no network interface of the given name:"
    " [enforce fail at ./gloo/transport/tcp/device.cc:83] ifa != nullptr. Unable to find address"
    " for: ib7",
    "job-name": "job-name | master-0: the job's name is too long for a Service of this replica...",
    "leftover": "leftover | worker-0: still running though the job ended (Succeeded) 3 min ago",
    "limit": "crash | master-0: exit code 5",
    "lost": "node-lost | master-0: its node ghost-lost is not ready: Kubelet stopped posting node"
    " status, for 47 s",
    "meeting": "rendezvous | master-0: 1 of 4 processes joined the rendezvous within 6 s",
    "memory": "memory | master-0: killed by the kernel, which was out of memory: its limit is 64Mi"
    " (restarted 2 times; the next start is at most five minutes away)",
    "path": "volume | master-0: the volume 'v' cannot be mounted: hostPath type check failed:"
    " /no/such is not a directory, for 42 s",
    "preempted": "preempted | master-0: a pod of higher priority took its place, 21 s ago",
    "probe": "master-awaited | worker-0: its init container waits until the name probe-master-0 can"
    " be found; the Master runs but is not ready, by its readinessProbe, for 3 min",
    "quota": "quota | worker-0: the namespace's quota 'small' has no room: pods 1 asked, 1 of 1"
    " used",
    "restricted": "pod-security | worker-0 (1 more has no pod yet): namespace team enforces the pod"
    " security level 'restricted:latest': ...",
    "root": "container | master-0: its container 'pytorch' cannot be created: container has"
    " runAsNonRoot and image will run as root",
    "scheduler": "waiting | master-0: the scheduler 'nobody' has not looked at it, for 36 s",
    "secret": "secret | master-0: there is no secret 'hf' in namespace team",
    "selector": "unschedulable | master-0: none of 3 nodes takes it: 1 lacks the labels that it"
    " asks for (gpu=a100); 2 have a taint that it does not tolerate (k8sjob-tests/ghost, not"
    " ready), for 35 s",
    "webhook": "webhook | master-0 and worker-0: the admission webhook 'pods.k8sjob.test' does not"
    " answer: ...",
}  # fmt: skip
AND_THEN = {"limit": ["restart-limit", "leftover"]}


def why(name, *, logs=True, related=True):
    return findings_of(
        json.loads((FOLDER / f"{name}.json").read_text()), logs=logs, related=related
    )


def findings_of(seen, *, logs=True, related=True):
    snapshot = Snapshot(seen["job"], seen.get("pods", []), seen.get("events", []))
    return diagnose(
        snapshot,
        seen.get("logs", {}) if logs else {},
        seen.get("related", []) if related else [],
        now=datetime.fromisoformat(seen["now"]),
    )


@pytest.mark.parametrize("name", SAID)
def test_a_recorded_job(name):
    first, *others = why(name)
    detail = f"{first.cause} | {first.message}"
    expected = SAID[name].removesuffix("...")
    assert detail.startswith(expected) if SAID[name].endswith("...") else detail == expected
    assert first.next_step
    assert [finding.cause for finding in others] == AND_THEN.get(name, [])


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
    found = findings_of(json.loads(here))
    assert [finding.cause for finding in found] == [finding.cause for finding in why(name)]
    assert f"{host}/{path}" in found[0].message


@pytest.mark.parametrize("name", SAID)
def test_the_cause_is_found_without_logs_and_nodes(name):
    """Output, nodes and claims are forbidden to some users."""
    found = why(name, logs=False, related=False)
    if name in {"interface", "meeting"}:  # it had not ended when it was looked at
        assert found == []
    else:
        cause = "waiting" if name == "lost" else SAID[name].partition(" ")[0]
        assert found[0].cause == cause


def places(value, path=()):
    """Every key of the statuses, specs and Events of a recording."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in pairs:
        if {"status", "spec", "events"} & {*path, key}:
            yield (*path, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, key))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_objects_that_lack_something_are_no_error(data):
    """Other versions, other kubelets and virtual ones leave out what these objects have."""
    seen = json.loads((FOLDER / f"{data.draw(st.sampled_from(sorted(SAID)))}.json").read_text())
    for _ in range(3):
        inner = seen
        if not (left := list(places(seen))):
            break
        *path, last = data.draw(st.sampled_from(left))
        for key in path:
            inner = inner[key]
        del inner[last]
    snapshot = Snapshot(seen["job"], seen.get("pods", []), seen.get("events", []))
    now = datetime.fromisoformat(seen["now"])
    for finding in diagnose(snapshot, {}, seen.get("related", []), now=now):
        assert finding.message
        assert finding.next_step


def test_all_recordings_are_used():
    assert {path.stem for path in FOLDER.glob("*.json")} == set(SAID)


PULL_ERRORS = json.loads(Path(__file__).with_name("image_errors.json").read_text())
"""Of containerd, CRI-O and Docker, before the well-known registries, by cause."""


@pytest.mark.parametrize(
    ("cause", "message"), [(c, text) for c, texts in PULL_ERRORS.items() for text in texts.values()]
)
def test_an_error_of_a_registry_has_its_cause(cause, message):
    assert explain_pull("ErrImagePull", "team/train:1", message).cause == cause
