"""The doctor's checks one by one: what a cluster answers, and what is made of it."""

import pytest
from healthy import deployment, the

from k8sjob.checks.doctor import gather
from k8sjob.checks.doctor.cluster import (
    limits,
    namespace,
    pod_security,
    quota_need,
    quotas,
    storage,
)
from k8sjob.checks.doctor.controller import crd, dry_run, init_image, init_wait, operator, webhook
from k8sjob.findings import Severity
from k8sjob.kube.client.transport import ApiError
from k8sjob.rendering.manifest import manifest
from k8sjob.spec import JobSpec
from k8sjob.targets.jobs import by_name

OK, WARNING, UNKNOWN, PROBLEM = Severity.OK, Severity.WARNING, Severity.UNKNOWN, Severity.ERROR
HOOK = "validator.pytorchjob.training-operator.kubeflow.org"
API, TRAINER = "/apis/kubeflow.org/v1", "/apis/trainer.kubeflow.org"
DEPLOYMENTS = "/apis/apps/v1/deployments"
OWN_DEPLOYMENTS = "/apis/apps/v1/namespaces/kubeflow/deployments"
TEAM = "/api/v1/namespaces/team"
WORKERS = f"{TEAM}/pods"
CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
REFUSED = ApiError("forbidden", code=403, reason="Forbidden", detail="cannot list resource")
DOWN = ApiError(f'failed calling webhook "{HOOK}": connect: connection refused', code=500)
GONE = ApiError('namespaces "team" not found', code=404, reason="NotFound")
GIVES_UP = {"securityContext": {"allowPrivilegeEscalation": False}}
RESTRICTED = {
    TEAM: {
        "metadata": {"name": "team", "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}
    }
}
IMAGE_FLAG = "--pytorch-init-container-image"


def denied(by):
    return ApiError(f'admission webhook "{by}" denied the request: no', code=403)


def dry_runs(answer, bad=None):
    """What the apiserver answers to the dry run of a job and to that of a bad one."""
    bad = answer if bad is None else bad
    return {"pytorchjobs": lambda body: bad if body["metadata"]["name"][0] == "0" else answer}


NOT_REFUSED = dry_runs({"kind": "PyTorchJob"})


def items(*found):
    return {"items": list(found)}


def worker(image="mirror.example/alpine:3.10", *, node="n1", container=(), **status):
    init = {"name": "init-pytorch", "image": image, **dict(container)}
    return {
        "spec": {"nodeName": node, "initContainers": [init]},
        "status": {"initContainerStatuses": [{"name": "init-pytorch", **status}]},
    }


def with_command(*words):
    pulled = worker(imageID="sha256:1", container={"command": list(words)})
    return {WORKERS: items(worker(), pulled)}


def deployed(*args, **more):
    return {DEPLOYMENTS: items(deployment(*args, **more))}


OPERATORS_OWN = "for i in $(seq 100); do if nslookup m; then err=0 && break; fi; sleep 2; done"
BY_DEFAULT = "the operator's default, unless another one is set"
INVALID = ApiError("is invalid", code=422, causes=[("spec.nprocPerNode", "text")])
PULLED = {WORKERS: items(worker(node="n2", imageID="x"), worker(imageID="x"))}
WAITING = worker(state={"waiting": {"reason": "ImagePull"}})
NOT_PULLED = {WORKERS: items(worker(imageID=""), WAITING)}
SLOW = {CLASSES: items({"metadata": {"name": "slow"}})}
LOOKS = [
    # the API
    (crd, {}, OK, "PyTorchJob is served"),
    (crd, {TRAINER: {"kind": "APIGroup"}}, OK, "Kubeflow Trainer is also served"),
    (crd, {API: None}, PROBLEM, "the CRD of the training operator is not installed"),
    (crd, {API: {"resources": [{"name": "tfjobs"}]}}, PROBLEM, "is not installed"),
    (crd, {API: None, TRAINER: {"kind": "x"}}, PROBLEM, "only Kubeflow Trainer", "--target"),
    (crd, {API: ApiError("unavailable", code=503)}, PROBLEM, "cannot be read: unavail"),
    # the webhook
    (webhook, {}, OK, f"answers: {HOOK} refused an invalid job"),
    (webhook, dry_runs(DOWN), PROBLEM, "connection refused", "-n kubeflow get pods"),
    (webhook, NOT_REFUSED, WARNING, "its version has none"),
    (webhook, dry_runs(REFUSED), UNKNOWN, "failed for another reason", "the dry-run check"),
    (webhook, dry_runs(denied("policy.example")), UNKNOWN, "failed for another reason"),
    (webhook, {"pytorchjobs": None}),
    # the dry run
    (dry_run, {}, OK, "the job is accepted"),
    (dry_run, dry_runs(ApiError("exists", code=409)), WARNING, "a job of that name", "attaches"),
    (dry_run, dry_runs(DOWN), PROBLEM, "connection refused", "the webhook check"),
    (dry_run, dry_runs(denied("p.example")), PROBLEM, "p.example", "owner of that policy"),
    (dry_run, dry_runs(denied(HOOK)), PROBLEM, "no", "correct the job"),
    (dry_run, dry_runs(ApiError("x cannot create", code=403)), PROBLEM, "create", "permissions"),
    (dry_run, dry_runs(INVALID), PROBLEM, "spec.nprocPerNode: text", "correct the job"),
    # the operator
    (operator, {}, OK, "1 of 1 ready, image registry.example/training-operator:v1.9.4"),
    (operator, deployed(ready=0), PROBLEM, "0 of 1 ready", "kubectl -n kubeflow describe pods"),
    (operator, {DEPLOYMENTS: REFUSED, OWN_DEPLOYMENTS: items(deployment())}, OK, "1 of 1"),
    (operator, {DEPLOYMENTS: REFUSED}, OK, "its webhook answers; you cannot read"),
    (operator, {DEPLOYMENTS: items()}, OK, "its webhook answers; no Deployment"),
    (operator, NOT_REFUSED | {DEPLOYMENTS: REFUSED}, UNKNOWN, "you cannot read", "capacity.yaml"),
    (operator, NOT_REFUSED | {DEPLOYMENTS: items()}, UNKNOWN, "no Deployment is labeled"),
    # its init container
    (init_image, {}, OK, f"alpine:3.10 ({BY_DEFAULT}), which", f"{IMAGE_FLAG}=IMAGE"),
    (init_image, deployed(f"{IMAGE_FLAG}=a/b:1"), OK, "of a/b:1, which"),
    (init_image, deployed(IMAGE_FLAG, "a/b:1"), OK, "of a/b:1, which"),
    (init_image, PULLED, OK, "mirror.example/alpine:3.10; pulled on 2 nodes, such as n1", None),
    (init_image, NOT_PULLED, PROBLEM, "alpine:3.10: ImagePull on node n1", IMAGE_FLAG),
    (init_image, {API: None}),
    (init_wait, {}),
    (init_wait, with_command("sh", "-c", OPERATORS_OWN), OK, "sleep 2 s", "more often"),
    (init_wait, with_command("sh", "-c", "sleep 1.5"), OK, "workers sleep 1.5 s"),
    (init_wait, with_command()),
    (init_wait, with_command(2)),
    (init_wait, with_command("sh", "-c", "sleep 0.2; sleep $s")),
    # the namespace
    (namespace, {}),
    (namespace, {TEAM: None}, PROBLEM, "there is no namespace team"),
    (namespace, {TEAM: REFUSED, "pytorchjobs": GONE}, PROBLEM, "there is no namespace team"),
    (pod_security, {}, OK, "team enforces nothing"),
    (pod_security, {TEAM: REFUSED}, UNKNOWN, "cannot read the labels"),
    (storage, {}, OK, "claims get the StorageClass fast (available: fast)"),
    (storage, SLOW, WARNING, "no StorageClass is the default (available: slow)"),
    (storage, {CLASSES: REFUSED}, UNKNOWN),
]
"""A check, what the cluster answers, and what is found: the verdict, and parts of the text."""


@pytest.mark.parametrize("row", LOOKS)
def test_a_look(row, facts, make_job):
    look, answers, verdict, seen, step = (*row, *(None, "", "")[len(row) - 2 :])
    found = list(look(facts(answers, job=make_job() if look is dry_run else None)))
    assert [check.severity for check in found] == ([verdict] if verdict else [])
    for check in found:
        assert seen in check.message
        assert (step in check.next_step) if step is not None else check.next_step == ""


def test_a_flag_among_the_words_of_the_command(facts):
    found = deployed()
    (only,) = found[DEPLOYMENTS]["items"][0]["spec"]["template"]["spec"]["containers"]
    only["command"] = ["/manager", f"{IMAGE_FLAG}=a/b:1"]
    assert "of a/b:1, which" in the(init_image(facts(found))).message


def test_a_minimal_job_is_sent_where_there_is_none(facts):
    assert the(dry_run(facts())).message == "a minimal job is accepted in team; nothing was created"


def test_the_controller_of_another_kind(cluster):
    def asked(**answers):
        cluster.answers |= answers
        found = gather(cluster, "team", target=by_name("jobset"))
        return [one for check in (crd, webhook, operator) for one in check(found)]

    seen = "JobSet is not served: the CRD of the JobSet controller is not installed"
    assert asked()[0].message == seen
    served = {"/apis/jobset.x-k8s.io/v1alpha2": {"resources": [{"name": "jobsets"}]}}
    found = asked(**served, jobsets=denied("vjobset.kb.io"), **{DEPLOYMENTS: items()})
    assert [check.severity for check in found] == [OK] * 3
    assert found[1].message == "answers: vjobset.kb.io refused an invalid job"
    assert list(init_image(gather(cluster, "team", target=by_name("jobset")))) == []


# --- pod security ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "verdict", "text"),
    [
        ({}, WARNING, "--pytorch-init-container-template-file"),
        (deployed("--pytorch-init-container-template-file=/etc/t.yaml"), OK, "/etc/t.yaml"),
        ({WORKERS: items(worker())}, WARNING, "drops its privileges"),
        ({WORKERS: items(worker(container=GIVES_UP))}, OK, "complies, as pods here show"),
    ],
)
def test_restricted_and_the_operators_init_container(answers, verdict, text, facts):
    check = the(pod_security(facts(RESTRICTED | answers)))
    assert check.severity is verdict
    assert text in check.message + check.next_step


def test_restricted_and_a_job_that_is_not(facts, make_job):
    first, _ = pod_security(facts(RESTRICTED, job=make_job()))
    assert first.severity is PROBLEM
    assert first.next_step == "set security: restricted in the job.yaml"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_restricted_job_without_a_master_or_workers_gets_no_init_container(
    workers, facts, make_job
):
    job = make_job(workers=workers, container=GIVES_UP)
    if workers:
        del job["spec"]["pytorchReplicaSpecs"]["Master"]
    check = the(pod_security(facts(RESTRICTED, job=job)))
    assert check.severity is OK
    assert "no init container" in check.message


# --- quotas and limits ----------------------------------------------------------------------------


def quota(hard, used, **spec):
    found = {"metadata": {"name": "q"}, "spec": spec, "status": {"hard": hard, "used": used}}
    return {f"{TEAM}/resourcequotas": {"items": [found]}}


def test_no_quota_and_none_that_may_be_read(facts, refused):
    assert the(quotas(facts())).message == "team has no ResourceQuota"
    answers = {f"{TEAM}/resourcequotas": refused}
    assert the(quotas(facts(answers))).severity is UNKNOWN


def test_a_quota_with_room(facts):
    check = the(quotas(facts(quota({"pods": "10"}, {"pods": "8"}))))
    assert check.severity is OK
    assert check.details == ("pods: 8 of 10 used",)


def test_a_quota_that_is_nearly_used_up(facts):
    check = the(quotas(facts(quota({"pods": "8"}, {"pods": "8"}))))
    assert (check.severity, check.message) == (WARNING, "q is nearly used up: pods")


@pytest.mark.parametrize(
    ("hard", "used", "enough"),
    [
        ({"pods": "4"}, {"pods": "0"}, True),
        ({"pods": "4"}, {"pods": "1"}, False),
        ({"services": "4"}, {"services": "1"}, False),
        ({"requests.nvidia.com/gpu": "8"}, {}, True),
        ({"requests.nvidia.com/gpu": "7"}, {}, False),
        ({"requests.memory": "15Gi"}, {"requests.memory": "0"}, False),
        ({"memory": "15Gi"}, {}, False),
        ({"limits.memory": "16Gi"}, {}, True),
        ({"count/pytorchjobs.kubeflow.org": "1"}, {"count/pytorchjobs.kubeflow.org": "1"}, False),
        ({"secrets": "1"}, {"secrets": "1"}, True),
    ],
)
def test_a_job_against_a_quota(hard, used, enough, facts, make_job):
    job = make_job(workers=3, requests={"cpu": "1", "memory": "4Gi", "nvidia.com/gpu": "2"})
    verdicts = [check.severity for check in quotas(facts(quota(hard, used), job=job))]
    assert (PROBLEM not in verdicts) is enough


@pytest.mark.parametrize(
    ("target", "objects"),
    [
        ("job", {"jobs.batch"}),
        ("jobset", {"jobs.batch", "jobsets.jobset.x-k8s.io"}),
        ("trainjob", {"jobs.batch", "jobsets.jobset.x-k8s.io", "trainjobs.trainer.kubeflow.org"}),
    ],
)
def test_what_a_job_with_one_service_adds_to_a_quota(target, objects):
    spec = {"name": "a", "image": "i", "run": {"script": "a.py"}, "target": target}
    need = quota_need(manifest(JobSpec.model_validate({**spec, "replicas": {"workers": 3}})))
    assert (need["pods"], need["services"], need["count/services"]) == (4, 1, 1)
    assert {what[6:] for what in need if "." in what and what.startswith("count/")} == objects


def test_a_quota_for_only_some_pods_does_not_count_against_the_job(facts, make_job):
    answers = quota({"pods": "1"}, {"pods": "0"}, scopes=["BestEffort"])
    assert the(quotas(facts(answers, job=make_job()))).severity is OK


def test_a_quota_wants_what_the_job_does_not_say(facts, make_job):
    hard = {"limits.memory": "64Gi", "requests.cpu": "8", "pods": "9"}
    checks = list(quotas(facts(quota(hard, {}), job=make_job(requests={"cpu": "1"}))))
    assert [check.severity for check in checks] == [OK, PROBLEM]
    assert "limits.memory; the job's do not" in checks[1].message


def test_a_limit_range_may_fill_it_in(facts, make_job):
    fills = {"items": [{"spec": {"limits": [{"type": "Container", "default": {"memory": "1Gi"}}]}}]}
    answers = {
        **quota({"limits.memory": "64Gi", "memory": "64Gi"}, {}),
        f"{TEAM}/limitranges": fills,
    }
    assert the(quotas(facts(answers, job=make_job()))).severity is OK


@pytest.mark.parametrize(
    ("kind", "most", "allowed"),
    [
        ("Container", {"memory": "4Gi"}, True),
        ("Container", {"memory": "2Gi"}, False),
        ("Pod", {"memory": "7Gi"}, False),
        ("Pod", {"memory": "8Gi"}, True),
    ],
)
def test_a_job_against_a_limit_range(kind, most, allowed, facts, make_job):
    found = {"metadata": {"name": "l"}, "spec": {"limits": [{"type": kind, "max": most}]}}
    job = make_job(workers=0, requests={"memory": "4Gi"})
    pod = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    pod["containers"].append(pod["containers"][0])
    check = the(limits(facts({f"{TEAM}/limitranges": {"items": [found]}}, job=job)))
    assert (check.severity is OK) is allowed


def test_a_limit_range_without_a_maximum_says_nothing(facts):
    found = {"metadata": {"name": "l"}, "spec": {"limits": [{"type": "Container", "min": {}}]}}
    assert list(limits(facts({f"{TEAM}/limitranges": {"items": [found]}}))) == []
