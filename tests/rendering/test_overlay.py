"""How an overlay changes a manifest, and what it must not change."""

from copy import deepcopy

import pytest

from k8sjob import SpecError
from k8sjob.document import parse
from k8sjob.rendering import manifest, render
from k8sjob.rendering.overlay import merge

DIGEST = "registry.example/d@sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("base", "patch", "result"),
    [
        # RFC 7386, appendix A
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "b"}, ["c"], ["c"]),
        ({"a": "foo"}, "bar", "bar"),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
        # lists of named things
        (
            [{"name": "a", "x": 1}, {"name": "b"}],
            [{"name": "b", "y": 2}, {"name": "c"}],
            [{"name": "a", "x": 1}, {"name": "b", "y": 2}, {"name": "c"}],
        ),
        ([{"name": "a", "x": 1, "y": 2}], [{"name": "a", "x": None}], [{"name": "a", "y": 2}]),
        ([{"name": "a"}, {"name": "b"}], [{"name": "a", "$patch": "delete"}], [{"name": "b"}]),
        ([{"name": "a"}], [{"name": "gone", "$patch": "delete"}], [{"name": "a"}]),
        (None, [{"name": "a", "x": None}], [{"name": "a"}]),
        ([{"name": "a"}], [], []),
        ([{"name": "a"}], [{"key": "b"}], [{"key": "b"}]),
        ([{"name": "a"}, {"key": "b"}], [{"name": "a", "x": 1}], [{"name": "a", "x": 1}]),
        # two mounts of one volume
        (
            [{"name": "data", "mountPath": "/a"}],
            [{"name": "data", "mountPath": "/b"}],
            [{"name": "data", "mountPath": "/a"}, {"name": "data", "mountPath": "/b"}],
        ),
        (
            [{"name": "data", "mountPath": "/a"}],
            [{"name": "data", "readOnly": True}],
            [{"name": "data", "mountPath": "/a", "readOnly": True}],
        ),
    ],
)
def test_merge(base, patch, result):
    before = deepcopy((base, patch))
    assert merge(base, patch) == result
    assert (base, patch) == before


WORKER = ("spec", "pytorchReplicaSpecs", "Worker", "template", "spec")


def nested(path, value):
    for key in reversed(path):
        value = {key: value}
    return value


def container(**fields):
    return nested((*WORKER, "containers"), [{"name": "pytorch", **fields}])


def test_an_overlay_reaches_every_field(job, crd_problems):
    overlay = container(
        env=[{"name": "NCCL_DEBUG", "value": "INFO"}],
        lifecycle={"preStop": {"exec": {"command": ["sync"]}}},
    )
    overlay["spec"]["runPolicy"] = {"suspend": None, "backoffLimit": 5}
    overlay["metadata"] = {"finalizers": ["example.org/keep"]}
    spec = job(replicas={"workers": 2}, overlay=overlay)
    plain, changed = manifest(spec.model_copy(update={"overlay": {}})), manifest(spec)
    pod = changed["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    assert [item["name"] for item in pod["containers"][0]["env"]] == ["K8SJOB_CONFIG", "NCCL_DEBUG"]
    assert pod["containers"][0]["lifecycle"] == {"preStop": {"exec": {"command": ["sync"]}}}
    assert "suspend" not in changed["spec"]["runPolicy"]
    assert changed["spec"]["runPolicy"]["backoffLimit"] == 5
    assert changed["metadata"]["finalizers"] == ["example.org/keep"]
    master = ("spec", "pytorchReplicaSpecs", "Master")
    assert changed[master[0]][master[1]][master[2]] == plain[master[0]][master[1]][master[2]]
    del changed["metadata"]["finalizers"]
    assert crd_problems(changed) == []


def test_the_text_keeps_its_mark_and_its_hash_follows_the_overlay(job):
    one = render(job(overlay={"spec": {"runPolicy": {"backoffLimit": 1}}}))
    two = render(job(overlay={"spec": {"runPolicy": {"backoffLimit": 2}}}))
    assert one.startswith("# Rendered by k8sjob")
    key = "k8sjob/manifest-sha256"
    assert (
        parse(one).data["metadata"]["annotations"][key]
        != parse(two).data["metadata"]["annotations"][key]
    )


@pytest.mark.parametrize(
    ("overlay", "field"),
    [
        ({"metadata": {"name": "other"}}, "overlay.metadata.name"),
        ({"metadata": {"name": None}}, "overlay.metadata.name"),
        ({"metadata": {"namespace": "other"}}, "overlay.metadata.namespace"),
        ({"kind": "TFJob"}, "overlay.kind"),
        ({"apiVersion": "v1"}, "overlay.apiVersion"),
        ({"status": {}}, "overlay.status"),
        ({"spec": None}, "overlay.spec.pytorchReplicaSpecs"),
        (
            {"spec": {"pytorchReplicaSpecs": {"Worker": {"replicas": 0}}}},
            "overlay.spec.pytorchReplicaSpecs[Worker].replicas",
        ),
        (
            {"spec": {"pytorchReplicaSpecs": {"Launcher": {}}}},
            "overlay.spec.pytorchReplicaSpecs[Launcher]",
        ),
        (
            nested((*WORKER, "containers"), [{"name": "pytorch", "$patch": "delete"}]),
            "overlay.spec.pytorchReplicaSpecs[Worker].template.spec.containers",
        ),
        (
            nested((*WORKER, "containers"), [{"name": "side"}]),
            "overlay.spec.pytorchReplicaSpecs[Worker].template.spec.containers[1].image",
        ),
        ({"metadata": "text"}, "overlay.metadata.name"),
    ],
)
def test_what_an_overlay_must_not_do(job, overlay, field):
    with pytest.raises(SpecError) as caught:
        render(job(replicas={"workers": 1}, overlay=overlay))
    assert field in [problem.field for problem in caught.value.problems]


def test_a_built_image_is_not_replaced_but_sidecars_have_theirs(built):
    replace = container(image="other:1")
    with pytest.raises(SpecError, match="would replace the image that is built"):
        render(built(replicas={"workers": 1}, overlay=replace))
    sidecar = nested((*WORKER, "containers"), [{"name": "side", "image": "side:1"}])
    pod = manifest(built(replicas={"workers": 1}, overlay=sidecar), DIGEST)
    images = [
        c["image"]
        for c in pod["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    ]
    assert images == [DIGEST, "side:1"]


def test_an_image_that_is_a_reference_may_differ_between_roles(job):
    rendered = manifest(job(replicas={"workers": 1}, overlay=container(image="worker:2")))
    replicas = rendered["spec"]["pytorchReplicaSpecs"]
    images = {r: replicas[r]["template"]["spec"]["containers"][0]["image"] for r in replicas}
    assert images == {"Master": "registry.example/digits:1", "Worker": "worker:2"}


def of_pod(**pod):
    return {"spec": {"pytorchReplicaSpecs": {"Master": {"template": {"spec": pod}}}}}


def of_trainer(**container):
    return of_pod(containers=[{"name": "pytorch", **container}])


SAFE = {
    "name": "side",
    "image": "x",
    "securityContext": {
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    },
}
HTTP = {"httpGet": {"port": 80, "host": "10.0.0.1"}}


@pytest.mark.parametrize(
    ("overlay", "field"),
    [
        (of_pod(hostNetwork=True), "hostNetwork"),
        (of_pod(hostPID=True), "hostPID"),
        (of_pod(hostIPC=True), "hostIPC"),
        (of_pod(volumes=[{"name": "a", "hostPath": {"path": "/"}}]), "volumes[0]"),
        (of_pod(volumes=[{"name": "a", "nfs": {"server": "x", "path": "/"}}]), "volumes[0]"),
        (of_pod(securityContext={"runAsUser": 0}), "securityContext.runAsUser"),
        (of_pod(securityContext={"runAsNonRoot": False}), "securityContext.runAsNonRoot"),
        (
            of_pod(securityContext={"seccompProfile": {"type": "Unconfined"}}),
            "securityContext.seccompProfile.type",
        ),
        (
            of_pod(securityContext=None),
            "containers[0].securityContext.seccompProfile.type",
        ),
        (
            of_pod(securityContext={"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}),
            "securityContext.sysctls[0].name",
        ),
        (
            of_pod(securityContext={"windowsOptions": {"hostProcess": True}}),
            "securityContext.windowsOptions.hostProcess",
        ),
        (
            of_pod(securityContext={"seLinuxOptions": {"type": "spc_t"}}),
            "securityContext.seLinuxOptions.type",
        ),
        (
            of_trainer(securityContext={"privileged": True}),
            "containers[0].securityContext.privileged",
        ),
        (
            of_trainer(securityContext={"allowPrivilegeEscalation": True}),
            "containers[0].securityContext.allowPrivilegeEscalation",
        ),
        (
            of_trainer(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}),
            "containers[0].securityContext.capabilities.add[0]",
        ),
        (
            of_trainer(securityContext={"capabilities": {"drop": []}}),
            "containers[0].securityContext.capabilities.drop",
        ),
        (
            of_trainer(securityContext={"procMount": "Unmasked"}),
            "containers[0].securityContext.procMount",
        ),
        (
            of_trainer(securityContext={"appArmorProfile": {"type": "Unconfined"}}),
            "containers[0].securityContext.appArmorProfile.type",
        ),
        (of_trainer(ports=[{"name": "p", "hostPort": 80}]), "containers[0].ports[1].hostPort"),
        (of_trainer(livenessProbe=HTTP), "containers[0].livenessProbe.httpGet.host"),
        (of_trainer(lifecycle={"preStop": HTTP}), "containers[0].lifecycle.preStop.httpGet.host"),
        (
            of_pod(containers=[{"name": "side", "image": "x"}]),
            "containers[0].securityContext.allowPrivilegeEscalation",
        ),
        (
            of_pod(initContainers=[SAFE | {"securityContext": {"runAsUser": 0}}]),
            "initContainers[0].securityContext.runAsUser",
        ),
    ],
)
def test_an_overlay_keeps_to_the_standard(job, overlay, field):
    assert render(job(overlay=overlay))
    with pytest.raises(SpecError) as caught:
        render(job(overlay=overlay, security="restricted"))
    fields = [problem.field for problem in caught.value.problems]
    assert f"overlay.spec.pytorchReplicaSpecs.Master.template.spec.{field}" in fields


@pytest.mark.parametrize(
    "overlay",
    [
        of_pod(containers=[SAFE], volumes=[{"name": "a", "csi": {"driver": "x"}}]),
        of_trainer(securityContext={"capabilities": {"add": ["NET_BIND_SERVICE"]}}),
        of_pod(securityContext={"runAsUser": 5, "seccompProfile": {"type": "Localhost"}}),
        of_pod(hostNetwork=False),
    ],
)
def test_an_overlay_may_do_what_the_standard_allows(job, overlay):
    assert render(job(overlay=overlay, security="restricted"))
