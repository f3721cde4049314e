import pytest

from k8sjob.checks.doctor.check import Verdict
from k8sjob.checks.doctor.namespace import (
    namespace,
    pod_security,
    pull_secrets,
    storage,
)
from k8sjob.kube.client.transport import ApiError

TEAM = "/api/v1/namespaces/team"
RESTRICTED = {
    TEAM: {
        "metadata": {"name": "team", "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}
    }
}
GIVES_UP = {"securityContext": {"allowPrivilegeEscalation": False}}


def the(checks):
    [check] = checks
    return check


def test_a_namespace_that_is_not_there(facts):
    assert list(namespace(facts())) == []
    assert the(namespace(facts({TEAM: None}))).seen == "there is no namespace team"


def test_a_namespace_that_may_not_be_read_and_is_not_there(facts, refused):
    gone = ApiError('namespaces "team" not found', code=404, reason="NotFound")
    check = the(namespace(facts({TEAM: refused, "pytorchjobs": gone})))
    assert check.verdict is Verdict.PROBLEM


# --- pod security ---------------------------------------------------------------------------------


def test_a_namespace_that_enforces_nothing(facts):
    assert the(pod_security(facts())).seen == "team enforces nothing"


def test_labels_that_may_not_be_read(facts, refused):
    assert the(pod_security(facts({TEAM: refused}))).verdict is Verdict.UNKNOWN


def test_restricted_and_the_operators_own_init_container(facts):
    check = the(pod_security(facts(RESTRICTED)))
    assert check.verdict is Verdict.WARNING
    assert "--pytorch-init-container-template-file" in check.next_step


def test_restricted_and_an_operator_with_a_template(facts):
    container = {"args": ["--pytorch-init-container-template-file=/etc/t.yaml"]}
    deployment = {
        "metadata": {},
        "spec": {"template": {"spec": {"containers": [container]}}},
        "status": {"readyReplicas": 1},
    }
    answers = {**RESTRICTED, "/apis/apps/v1/deployments": {"items": [deployment]}}
    check = the(pod_security(facts(answers)))
    assert check.verdict is Verdict.OK
    assert "/etc/t.yaml" in check.seen


def test_restricted_and_workers_that_were_let_in(facts):
    for container, verdict in (({}, Verdict.WARNING), (GIVES_UP, Verdict.OK)):
        pods = [{"spec": {"initContainers": [{"name": "init-pytorch", **container}]}}]
        check = the(pod_security(facts({**RESTRICTED, f"{TEAM}/pods": {"items": pods}})))
        assert check.verdict is verdict


def test_restricted_and_a_job_that_is_not(facts, make_job):
    first, _ = pod_security(facts(RESTRICTED, job=make_job()))
    assert first.verdict is Verdict.PROBLEM
    assert first.next_step == "set security: restricted in the job.yaml"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_restricted_job_without_a_master_or_workers_gets_no_init_container(
    workers, facts, make_job
):
    job = make_job(workers=workers, container=GIVES_UP)
    if workers:
        del job["spec"]["pytorchReplicaSpecs"]["Master"]
    check = the(pod_security(facts(RESTRICTED, job=job)))
    assert check.verdict is Verdict.OK
    assert "no init container" in check.seen


# --- storage, pull secrets ------------------------------------------------------------------------


def test_storage(facts, refused):
    path = "/apis/storage.k8s.io/v1/storageclasses"
    assert the(storage(facts())).seen == "claims get the StorageClass fast (there are: fast)"
    plain = {"items": [{"metadata": {"name": "slow"}}]}
    check = the(storage(facts({path: plain})))
    assert check.verdict is Verdict.WARNING
    assert "no StorageClass is the default (there are: slow)" in check.seen
    assert the(storage(facts({path: refused}))).verdict is Verdict.UNKNOWN


def test_pull_secrets(facts, refused):
    path = f"{TEAM}/serviceaccounts/default"
    assert "no pull secret" in the(pull_secrets(facts())).seen
    found = {path: {"imagePullSecrets": [{"name": "regcred"}]}}
    assert "brings regcred" in the(pull_secrets(facts(found))).seen
    assert list(pull_secrets(facts({path: refused}))) == []
