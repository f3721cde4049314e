"""Snapshots of sick jobs, recorded from Kubernetes 1.34.4 with training operator 1.9.4, Kueue 0.19.

tests/cluster/record.py records them; test_why.py, test_owners.py and test_kueue.py beside it cause
them anew.
The texts of "openshift" are those of OpenShift's admission.
"""

import json
from pathlib import Path

import pytest
from hostile import changed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from observed import OF_JOB_YAML, RECORDED, lacking, replayed

from k8sjob.kube.objects import is_ours
from k8sjob.observe.diagnose.containers import explain_pull

BY_OUTPUT = {"inner-exception", "jobset-restart", "leaves", "two-causes"}
"""Jobs of which only the output has the cause."""


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_a_recorded_job(name):
    """`why` is the first cause and message; "..." at its end cuts it short."""
    seen = RECORDED[name]
    first, *others = replayed(seen)
    detail, expected = f"{first.id} | {first.message}", seen["why"]
    assert detail == expected or (
        expected.endswith("...") and detail.startswith(expected.removesuffix("..."))
    )
    assert seen.get("step", "") in first.next_step
    assert first.next_step
    if not is_ours(seen["job"]):
        texts = [text for f in (first, *others) for text in (f.message, f.next_step)]
        assert not list(filter(OF_JOB_YAML.search, texts))
    assert [finding.id for finding in others] == seen.get("others", [])


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
    detail = json.dumps(RECORDED[name])
    here = detail.replace(f"{before}/{image}", f"{host}/{path}").replace(before, host)
    here = here.replace("v2/train/manifests/1", "v2/{}/manifests/{}".format(*path.split(":")))
    found = replayed(json.loads(here))
    causes = [finding.id for finding in replayed(RECORDED[name])]
    assert [finding.id for finding in found] == causes
    assert f"{host}/{path}" in found[0].message


OTHERS_ONLY = 'provider "anyuid": Forbidden: not usable by user or serviceaccount'
RANGES = "must be in the ranges: [1000750000, 1000759999]"


@pytest.mark.parametrize(
    ("refusals", "shown", "ids"),
    [
        (
            f'[{OTHERS_ONLY}, spec.volumes[1]: Invalid value: "nfs": not allowed, {OTHERS_ONLY}]',
            "spec.volumes[1]: not allowed",
            False,
        ),
        (
            f"provider restricted-v2: .containers[0].runAsUser: Invalid value: 1000: {RANGES}",
            f"restricted-v2: .containers[0].runAsUser: {RANGES}",
            True,
        ),
        (
            "[fsGroup: Invalid value: []int64{185}: 185 is not an allowed group]",
            "fsGroup: 185 is not an allowed group",
            True,
        ),
        (f"[{OTHERS_ONLY}]", "its service account may use no constraint", False),
    ],
    ids=["of others", "a single one", "of old", "none usable"],
)
def test_what_the_constraints_of_openshift_refuse(refusals, shown, ids):
    seen = json.loads(json.dumps(RECORDED["openshift"]))
    for event in seen["events"]:
        head, constraint, _ = event["message"].partition("context constraint: ")
        event["message"] = head + constraint + refusals
    (finding,) = replayed(seen)
    assert f": OpenShift refuses it: {shown}; namespace team allows " in finding.message
    # The recorded job is a plain PyTorchJob, whose fields are those of its manifest.
    assert ("runAsUser" in finding.next_step) == ids


CONTAINER = "spec.pytorchReplicaSpecs.Master.template.spec.containers[0]"
STATE = "pods.0.status.containerStatuses.0.state"
INIT = "pods.0.status.initContainerStatuses.0"
FAILED = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no healthy devices"}
ENDED = {"name": "pytorch", "state": {"terminated": {"exitCode": 255, "reason": "Unknown"}}}
SECRET = {"pods.0.spec.imagePullSecrets": [{"name": "regcred"}]}
UNSAID = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "127.0.0.1:1/train:1"'}
MOUNT = (
    'MountVolume.SetUp failed for volume "v" : mount failed: exit status 32\n'
    "Mounting command: mount\nMounting arguments: -t nfs nas:/data /var/lib/kubelet/pods/1\n"
    "Output: mount.nfs: access denied by server\n"
)
RECYCLED = {"reason": "DeletionByPodGC", "message": "PodGC: node no longer exists"}
EXISTS = 'pods "account-master-0" already exists'


def absent(kind, name):
    """What is related to a job and does not exist."""
    return {"kind": "Status", "reason": "NotFound", "details": {"kind": kind, "name": name}}


def refused(message):
    return {"events.0.message": f"Error creating: {message}"}


def uncreated(message):
    return {STATE: {"waiting": {"reason": "CreateContainerError", "message": message}}}


def unplaced(reason):
    """The only node does not accept a Pod, and no node may be read."""
    message = f"0/1 nodes are available: 1 node(s) {reason}."
    return {"pods.0.status.conditions.0.message": message, "related": []}


def short_of(resource, amount):
    """A Pod for whose request the only node has too little."""
    message = f"0/1 nodes are available: 1 Insufficient {resource}."
    return {
        "pods.0.spec.containers.0.resources.requests": {resource: amount},
        "pods.0.status.conditions.0.message": message,
    }


@pytest.mark.parametrize(
    ("name", "changes", "expected", "step"),
    [
        *(("root", uncreated(message), "container | ", "it is the node's container runtime: kubec")
          for message in (
            'failed to reserve container name "x": name "x" is reserved for "1a2b"',
            "context deadline exceeded",
            "CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=0",
        )),
        ("init", {f"{INIT}.state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}},
         "init | master-0: its init container 'mine' ended with exit code 137, 2 times: out of mem",
         ""),
        ("init", {f"{INIT}.name": "x; ls #", "pods.0.spec.initContainers.0.name": "x; ls #"},
         "init | ", "-n team init-master-0 -c 'x; ls #'"),
        # Events may come from anybody: in a record, or in a namespace with several teams.
        ("account", refused('pods "x" is forbidden: error: serviceaccount "x; ls #" not found'),
         "service-account | ", "(kubectl create serviceaccount 'x; ls #' -n"),
        ("account", refused(f"object is being deleted: {EXISTS}"), "name-taken | still being", ""),
        ("account", refused(EXISTS), "name-taken | account-master-0 already exists", ""),
        ("account", refused('admission webhook "x.y" denied the request: no'),
         "webhook | 'x.y' refuses the pod: no", ""),
        ("account", refused('no matches for kind "PodGroup" in version "scheduling.volcano.sh/v1"'),
         "refused | : the cluster does not serve the PodGroup", "have what serves it installed"),
        ("account", refused('pods "x" is forbidden: no PriorityClass with name p'),
         "refused | PriorityC", ""),
        # The name is not always that of a replica: this is a Job of a JobSet of several.
        ("account",
         refused('job "a-1" creation failed with error: jobs.batch "a-1" already exists'),
         "name-taken | : a-1 already exists", "kubectl get jobs.batch a-1 -n team"),
        ("cpus", short_of("memory", "4Ti"), "unschedulable | (it requests 4Ti, and the largest",
         f"waiting will not help: lower {CONTAINER}.resources.limits.memory, or use more, smal"),
        ("cpus", short_of("cpu", "1"), "unschedulable | 1 has too little cpu free (it requests 1)",
         f"lower {CONTAINER}.resources.requests.cpu, or wait until others have ended"),
        ("cpus", {**short_of("cpu", "9"), "related": []}, "unschedulable | (it requests 9)",
         "wait until others have ended"),
        ("cpus", short_of("example.com/gpu", "8"), "unschedulable | no node offers any example.com",
         "have the device plugin of example.com/gpu checked"),
        ("crash", {"pods.0.status": FAILED}, "node-refused | no healthy devices", ""),
        ("crash", {"pods.0.status": {**FAILED, "containerStatuses": [ENDED]}}, "node-refused | ",
         ""),
        ("path", {"events.-1.message": MOUNT},
         "volume | mount failed: exit status 32: mount.nfs: access denied by server, for 42 s", ""),
        ("image-access", SECRET, "image-access | ", "(it uses regcred);"),
        ("image-access", {**SECRET, "related": [absent("secrets", "regcred")]}, "image-access | ",
         "it uses regcred; there is no regcred in namespace team"),
        ("lost", {"related": [absent("nodes", "ghost-lost")]},
         "node-lost | master-0: its node ghost-lost is gone from the cluster", ""),
        ("drained", {f"pods.0.status.conditions.0.{key}": RECYCLED[key] for key in RECYCLED},
         "evicted | master-0: its node is gone", ""),
        ("probe", {"pods.0.spec.containers.0.readinessProbe": None},
         "master-awaited | the name probe-master-0 resolves; the Master is not ready, for 3 min",
         ""),
        # An old kubelet's pull error is in an Event only; that of a Pod before it is no cause.
        ("image-registry", {STATE: {"waiting": UNSAID}},
         "registry | from its node: failed to do request: Head", ""),
        ("image-registry", {STATE: {"waiting": UNSAID}, "pods.0.metadata.uid": "another"},
         "image | ", ""),
        *(("selector", unplaced(reason), "unschedulable | ", step) for reason, step in (
            ("didn't satisfy existing pods anti-affinity rules", "their anti-affinity"),
            ("didn't match pod anti-affinity rules", "Master.template.spec.affinity"),
            ("didn't match pod topology spread constraints", "spec.topologySpreadConstraints"),
            ("had volume node affinity conflict", "another zone"),
            ("exceed max volume count", "fewer volumes"),
            ("were never heard of", "for the full message: kubectl describe"),
            ("had untolerated taint {dedicated: gpu}", ".spec.tolerations"),
            ("had untolerated taint {node.kubernetes.io/not-ready: }", "wait, or have"),
            ("had untolerated taint {node.kubernetes.io/disk-pressure: }", "wait, or have"),
            ("had untolerated taint {karpenter.sh/disrupted: }", "wait, or have"),
        )),
    ],
)  # fmt: skip
def test_a_recorded_job_with_other_fields(name, changes, expected, step):
    seen = RECORDED[name]
    for path, value in changes.items():
        keys = [int(key) if key.lstrip("-").isdigit() else key for key in path.split(".")]
        seen = changed(seen, keys, value)
    (finding,) = replayed(seen)
    cause, _, words = expected.partition(" | ")
    assert finding.id == cause
    assert words in finding.message
    assert step in finding.next_step


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("sidecar", "pods.0.status.containerStatuses.1.state.terminated.finishedAt", "now"),
        ("started-again", "pods.0.spec.restartPolicy", "OnFailure"),
        ("left", "pods.1.status.containerStatuses.0.state.terminated.finishedAt", "now"),
    ],
)
def test_a_job_that_needs_no_cause_yet(name, path, value):
    """Other containers end after the training one, and ranks one after the other."""
    recorded = RECORDED[name]
    keys = [int(key) if key.isdigit() else key for key in path.split(".")]
    moment = recorded["now"] if value == "now" else value
    assert replayed(changed(recorded, keys, moment)) == []


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_the_cause_is_found_without_logs_and_nodes(name):
    """Output, nodes and claims are forbidden to some users."""
    found = replayed(RECORDED[name], logs=False, related=False)
    if name in {"interface", "meeting"}:  # it had not ended when it was looked at
        assert found == []
    else:
        cause = RECORDED[name]["why"].partition(" ")[0]
        alone = {"lost": "waiting", "unmade": "waiting"}
        cause = {**alone, **dict.fromkeys(BY_OUTPUT, "crash")}.get(name, cause)
        assert found[0].id == ("queued" if cause == "no-queue" else cause)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), name=st.sampled_from(sorted(RECORDED)))
def test_objects_that_lack_something_are_no_error(data, name):
    """Other versions, other kubelets and virtual ones leave out what these objects have."""
    seen = lacking(data, RECORDED[name], lambda path: {"status", "spec", "events"} & {*path})
    for finding in replayed({**seen, "logs": {}}):
        assert finding.message
        assert finding.next_step


PULL_ERRORS = json.loads(Path(__file__).with_name("image_errors.json").read_text())
"""Of containerd, CRI-O and Docker, before the well-known registries, by cause."""


@pytest.mark.parametrize(
    ("cause", "message"), [(c, text) for c, texts in PULL_ERRORS.items() for text in texts.values()]
)
def test_an_error_of_a_registry_has_its_cause(cause, message):
    assert explain_pull("ErrImagePull", "team/train:1", message).cause == cause
