from decimal import Decimal

import pytest
from healthy import node

from k8sjob.checks.doctor.check import Verdict
from k8sjob.checks.doctor.nodes import fit, refusal
from k8sjob.kube.capacity import Node

GPU = "nvidia.com/gpu"
TAINT = {"key": GPU, "value": "present", "effect": "NoSchedule"}


def the(checks):
    [check] = checks
    return check


def gpu_node(name, gpus, **more):
    return node(name, **{"cpu": "64", "memory": "512Gi", GPU: str(gpus), **more})


def test_without_a_job_there_is_nothing_to_fit(facts):
    assert list(fit(facts())) == []


def test_a_job_that_fits_now(facts, make_job):
    nodes = {"/api/v1/nodes": {"items": [gpu_node("a", 4), gpu_node("b", 4)]}}
    job = make_job(workers=3, requests={"cpu": "1", GPU: "2"})
    check = the(fit(facts(nodes, job=job)))
    assert (check.verdict, check.seen) == (Verdict.OK, "all 4 replicas fit now")


def test_a_job_that_has_to_wait(facts, make_job):
    nodes = {"/api/v1/nodes": {"items": [gpu_node("a", 4)]}}
    job = make_job(workers=3, requests={GPU: "2"})
    check = the(fit(facts(nodes, job=job)))
    assert check.verdict is Verdict.WARNING
    assert check.seen.startswith("2 of 4 replicas fit now")


def test_small_replicas_do_not_take_the_room_of_large_ones(facts, make_job):
    nodes = {"/api/v1/nodes": {"items": [gpu_node("a", 8), gpu_node("b", 1)]}}
    job = make_job(workers=1, requests={GPU: "8"})
    master = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    master["containers"][0]["resources"] = {"requests": {GPU: "1"}}
    assert the(fit(facts(nodes, job=job))).verdict is Verdict.OK


def test_what_others_use_is_not_free(facts, make_job):
    nodes = {"/api/v1/nodes": {"items": [gpu_node("a", 4)]}}
    usage = {"a": {GPU: Decimal(3), "pods": Decimal(1)}}
    job = make_job(workers=1, requests={GPU: "1"})
    check = the(fit(facts(nodes, job=job, usage=usage)))
    assert check.seen.startswith("1 of 2 replicas")


def test_a_replica_that_no_node_could_ever_hold(facts, make_job):
    nodes = {"/api/v1/nodes": {"items": [gpu_node("a", 4), gpu_node("b", 2)]}}
    checks = list(fit(facts(nodes, job=make_job(requests={GPU: "8", "memory": "1Ti"}))))
    assert [check.verdict for check in checks] == [Verdict.PROBLEM] * 2
    assert f"{GPU} 8 (the largest has 4)" in checks[0].seen
    assert "memory 1Ti (the largest has 512Gi)" in checks[0].seen


def test_no_single_node_has_all_of_it(facts, make_job):
    many, large = gpu_node("a", 8, memory="64Gi"), gpu_node("b", 0)
    nodes = {"/api/v1/nodes": {"items": [many, large]}}
    checks = fit(facts(nodes, job=make_job(workers=0, requests={GPU: "8", "memory": "128Gi"})))
    check = the(checks)
    assert check.verdict is Verdict.PROBLEM
    assert check.seen.endswith(f"it asks for all of {GPU} 8, memory 128Gi, pods 1")


def test_why_no_node_takes_it(facts, make_job):
    nodes = {
        "/api/v1/nodes": {
            "items": [gpu_node("a", 8, taints=[TAINT]), gpu_node("b", 8, cordoned=True)]
        }
    }
    check = the(fit(facts(nodes, job=make_job(workers=0, requests={GPU: "1"}))))
    assert (check.verdict, check.seen) == (Verdict.PROBLEM, "no node takes a Master")
    assert check.details == ("1 nodes: taint nvidia.com/gpu=present", "1 nodes: cordoned")


def test_what_may_not_be_read_is_said(facts, make_job, refused):
    job = make_job(requests={GPU: "1"})
    check = the(fit(facts({"/api/v1/nodes": refused}, job=job)))
    assert check.verdict is Verdict.UNKNOWN
    nodes = {"/api/v1/nodes": {"items": [gpu_node("a", 4)]}}
    check = the(fit(facts({**nodes, "/api/v1/pods": refused}, job=job)))
    assert check.verdict is Verdict.UNKNOWN
    assert "fits on an empty node" in check.seen


@pytest.mark.parametrize(
    ("toleration", "tolerated"),
    [
        ({"operator": "Exists"}, True),
        ({"key": GPU, "operator": "Exists"}, True),
        ({"key": GPU, "operator": "Exists", "effect": "NoSchedule"}, True),
        ({"key": GPU, "operator": "Exists", "effect": "NoExecute"}, False),
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
    pod = {"nodeSelector": {"nvidia.com/gpu.product": "H100"}}
    assert refusal(Node("a", {"nvidia.com/gpu.product": "H100"}), pod) == ""
    assert refusal(Node("a"), pod) == "no label nvidia.com/gpu.product=H100"


@pytest.mark.parametrize(
    ("operator", "values", "matches"),
    [
        ("In", ["a", "b"], True),
        ("In", ["b"], False),
        ("NotIn", ["b"], True),
        ("NotIn", ["a"], False),
        ("Exists", [], True),
        ("DoesNotExist", [], False),
        ("Gt", ["4"], False),
        ("Like", ["a"], False),
    ],
)
def test_node_affinity(operator, values, matches):
    expression = {"key": "zone", "operator": operator, "values": values}
    pod = affine({"matchExpressions": [expression]})
    assert (refusal(Node("n", {"zone": "a"}), pod) == "") is matches


@pytest.mark.parametrize(("operator", "matches"), [("Gt", True), ("Lt", False)])
def test_node_affinity_compares_numbers(operator, matches):
    expression = {"key": "cores", "operator": operator, "values": ["9"]}
    pod = affine({"matchExpressions": [expression]})
    assert (refusal(Node("n", {"cores": "64"}), pod) == "") is matches


def test_one_of_several_terms_is_enough():
    fields = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]}
    absent = {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}
    assert refusal(Node("n"), affine(absent, fields)) == ""
    assert refusal(Node("m"), affine(absent, fields)) == "node affinity"


def affine(*terms):
    required = {"nodeSelectorTerms": list(terms)}
    return {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    }
