"""Nodes: which take Pods, what is free of their GPUs, and whether a job fits."""

import pytest
from healthy import node, pod, the
from observed import make_pod, reported

from k8sjob.checks.doctor.cluster import free_devices, nodes, preflights
from k8sjob.checks.doctor.needs import fit
from k8sjob.findings import Severity
from k8sjob.kube.capacity import Node, refusal

OK, WARNING, UNKNOWN, PROBLEM = Severity.OK, Severity.WARNING, Severity.UNKNOWN, Severity.ERROR
GPU, PRODUCT = "nvidia.com/gpu", "nvidia.com/gpu.product"
TAINT = {"key": GPU, "value": "present", "effect": "NoSchedule"}


@pytest.fixture
def look(facts):
    """Makes a check look at these nodes, and at Pods that use them."""

    def make(check, *nodes, pods=None, **changes):
        answers = {"/api/v1/nodes": {"items": list(nodes)}}
        answers |= {} if pods is None else {"/api/v1/pods": pods}
        return check(facts(answers, **changes))

    return make


def gpu_node(name, gpus, **more):
    return node(name, **{"cpu": "64", "memory": "512Gi", GPU: str(gpus), **more})


def using(**gpus):
    return {"items": [pod(name, **{GPU: str(count)}) for name, count in gpus.items()]}


def test_nodes_that_take_no_pods(look, facts, refused):
    assert the(look(nodes, node("a", ready=False), node("b"))).message == "1 of 2 nodes accept pods"
    check = the(look(nodes, node("a", ready=False)))
    assert (check.severity, check.details) == (PROBLEM, ("a: not ready",))
    assert the(nodes(facts({"/api/v1/nodes": refused}))).severity is UNKNOWN


def test_nodes_that_a_preflight_refused(facts):
    end = reported(4, 0, "Preflight", "node b (rank 1): slow", culprits=[1], nodes=["b"])
    pods = {"items": [make_pod("master-0", "Failed", terminated=end)]}
    assert list(preflights(facts())) == []
    check = the(preflights(facts({"/api/v1/namespaces/team/pods": pods})))
    assert (check.severity, "refused node b" in check.message) == (WARNING, True)
    assert "policy.avoid_nodes: [b]" in check.next_step


def test_free_gpus_by_model_in_all_and_by_node(look):
    h100 = {"gpus": 8, "labels": {PRODUCT: "H100"}}
    taint = {"key": "team", "value": "x", "effect": "NoSchedule"}
    amd, nvidia = look(
        free_devices,
        node("a", **h100, taints=[taint]),
        node("b", **h100),
        node("c", **h100, ready=False),
        node("d", **{"amd.com/gpu": "4"}),
        pods={"items": [*using(a=3, b=8)["items"], pod("", **{GPU: "1"})]},
    )
    assert amd.message == "amd.com/gpu: 4 of 4 free"
    assert (nvidia.severity, nvidia.message) == (OK, "nvidia.com/gpu (H100): 5 of 24 free")
    assert nvidia.details == (
        "a: 5 of 8 free; only for jobs that tolerate team=x:NoSchedule",
        "b: 0 of 8 free",
        "c: 0 of 8 free, not ready",
    )


@pytest.mark.parametrize(
    ("one", "pods", "verdict", "text"),
    [
        (node("a", gpus=1), using(a=1), WARNING, "has to wait"),
        (node("a", gpus=8), "refused", UNKNOWN, "nvidia.com/gpu: 8 on 1 node; how many are free"),
        (
            node("a", labels={"feature.node.kubernetes.io/pci-10de.present": "true"}),
            None,
            WARNING,
            "device plugin",
        ),
        (node("a"), None, OK, "no node offers GPUs"),
    ],
)
def test_devices(look, refused, one, *, pods, verdict, text):
    check = the(look(free_devices, one, pods=refused if pods == "refused" else pods))
    assert check.severity is verdict
    assert text in f"{check.message}: {check.next_step}"


def test_many_nodes_are_not_all_named(look):
    check = the(look(free_devices, *(node(f"n{i}", gpus=1) for i in range(1000))))
    assert check.message == "nvidia.com/gpu: 1000 of 1000 free"
    assert check.details[-1] == "... and 992 more nodes"
    assert len(check.details) == 9


# --- whether the job fits -------------------------------------------------------------------------


def test_without_a_job_there_is_nothing_to_fit(facts):
    assert list(fit(facts())) == []


FOUR = [gpu_node("a", 4)]
LARGE = [gpu_node("a", 8, memory="64Gi"), gpu_node("b", 0)]
CLOSED = [gpu_node("a", 8, taints=[TAINT]), gpu_node("b", 8, cordoned=True)]
ALL_OF = f"it requests all of {GPU} 8, memory 128Gi, pods 1"


@pytest.mark.parametrize(
    ("found", "workers", "asked", "verdict", "seen"),
    [
        ([*FOUR, gpu_node("b", 4)], 3, {"cpu": "1", GPU: "2"}, OK, "all 4 replicas fit now"),
        (FOUR, 3, {GPU: "2"}, WARNING, "2 of 4 replicas fit now"),
        (LARGE, 0, {GPU: "8", "memory": "128Gi"}, PROBLEM, ALL_OF),
        (CLOSED, 0, {GPU: "1"}, PROBLEM, "no node accepts a Master"),
    ],
)
def test_a_job_and_the_room(look, make_job, found, *, workers, asked, verdict, seen):
    check = the(look(fit, *found, job=make_job(workers=workers, requests=asked)))
    assert check.severity is verdict
    assert seen in check.message
    if found is CLOSED:
        assert check.details == ("1 node: taint nvidia.com/gpu=present", "1 node: cordoned")


def test_small_replicas_do_not_take_the_room_of_large_ones(look, make_job):
    job = make_job(workers=1, requests={GPU: "8"})
    master = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    master["containers"][0]["resources"] = {"requests": {GPU: "1"}}
    assert the(look(fit, gpu_node("a", 8), gpu_node("b", 1), job=job)).severity is OK


def test_what_others_use_is_not_free(look, make_job):
    job = make_job(workers=1, requests={GPU: "1"})
    assert the(look(fit, *FOUR, pods=using(a=3), job=job)).message.startswith("1 of 2 replicas")


def test_a_replica_that_no_node_could_ever_hold(look, make_job):
    job = make_job(requests={GPU: "8", "memory": "1Ti"})
    checks = list(look(fit, *FOUR, gpu_node("b", 2), job=job))
    assert [check.severity for check in checks] == [PROBLEM] * 2
    assert f"{GPU} 8 (the largest has 4)" in checks[0].message
    assert "memory 1Ti (the largest has 512Gi)" in checks[0].message


def test_what_may_not_be_read_is_reported(look, facts, make_job, refused):
    job = make_job(requests={GPU: "1"})
    assert the(fit(facts({"/api/v1/nodes": refused}, job=job))).severity is UNKNOWN
    check = the(look(fit, *FOUR, pods=refused, job=job))
    assert check.severity is UNKNOWN
    assert "fits on an empty node" in check.message


EXISTS = {"key": GPU, "operator": "Exists"}


@pytest.mark.parametrize(
    ("toleration", "tolerated"),
    [
        ({"operator": "Exists"}, True),
        (EXISTS, True),
        ({**EXISTS, "effect": "NoSchedule"}, True),
        ({**EXISTS, "effect": "NoExecute"}, False),
        ({"key": GPU, "value": "present"}, True),
        ({"key": GPU, "operator": "Equal", "value": "other"}, False),
        ({"key": "other", "operator": "Exists"}, False),
        ({}, False),
    ],
)
def test_tolerations(toleration, tolerated):
    assert (refusal(Node("a", taints=(TAINT,)), {"tolerations": [toleration]}) == "") is tolerated


def test_a_taint_that_only_prefers_keeps_nobody_away():
    assert refusal(Node("a", taints=({**TAINT, "effect": "PreferNoSchedule"},)), {}) == ""


def test_a_node_selector():
    pod = {"nodeSelector": {PRODUCT: "H100"}}
    assert refusal(Node("a", {PRODUCT: "H100"}), pod) == ""
    assert refusal(Node("a"), pod) == "no label nvidia.com/gpu.product=H100"


@pytest.mark.parametrize(
    ("key", "operator", "values", "matches"),
    [
        ("zone", "In", ["a", "b"], True),
        ("zone", "In", ["b"], False),
        ("zone", "NotIn", ["b"], True),
        ("zone", "NotIn", ["a"], False),
        ("zone", "Exists", [], True),
        ("zone", "DoesNotExist", [], False),
        ("zone", "Gt", ["4"], False),
        ("zone", "Like", ["a"], False),
        ("cores", "Gt", ["9"], True),
        ("cores", "Lt", ["9"], False),
    ],
)
def test_node_affinity(key, operator, values, matches):
    pod = affine({"matchExpressions": [{"key": key, "operator": operator, "values": values}]})
    assert (refusal(Node("n", {"zone": "a", "cores": "64"}), pod) == "") is matches


def test_one_of_several_terms_is_enough():
    fields = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]}
    absent = {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}
    assert refusal(Node("n"), affine(absent, fields)) == ""
    assert refusal(Node("m"), affine(absent, fields)) == "node affinity"


def affine(*terms):
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {"affinity": {"nodeAffinity": required}}
