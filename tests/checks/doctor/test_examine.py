import re
from pathlib import Path

import pytest
from healthy import the

from k8sjob.checks.doctor import examine
from k8sjob.checks.doctor.check import Permission, verdict
from k8sjob.checks.doctor.permissions import (
    Grant,
    all_permissions,
    asked_for,
    binding,
    permissions,
    role,
    server,
)
from k8sjob.findings import Severity
from k8sjob.kube.client.transport import ApiError

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/reference/doctor.md").read_text()


def test_a_healthy_cluster_hinders_nobody(facts):
    report = examine(facts())
    assert not report.is_blocked
    assert {check.severity for check in report.checks} == {Severity.OK}
    assert report.as_dict()["can_submit"] is True
    assert report.rbac == []


def test_a_problem_hinders(facts):
    report = examine(facts({"/apis/kubeflow.org/v1": None}))
    assert report.is_blocked
    assert report.as_dict()["can_submit"] is False


@pytest.mark.parametrize("allowed", [True, False])
def test_what_is_not_well_has_a_next_step(allowed, facts, cluster, refused):
    answer = refused if allowed else None
    paths = [path for path in cluster.answers if path.startswith("/api")]
    review = {"selfsubjectaccessreviews": {"status": {"allowed": allowed}}}
    checks = examine(facts(dict.fromkeys([*paths, "pytorchjobs"], answer) | review)).checks
    told = [check for check in checks if check.severity is not Severity.OK]
    assert len(told) > 5
    assert all(check.next_step for check in told)


@pytest.mark.parametrize(
    ("error", "step"),
    [
        (ApiError("connection refused"), "specify another one with --context"),
        (ApiError("self-signed certificate", reason="Untrusted"), "certificate-authority"),
        (ApiError("Unauthorized", code=401), "log in again"),
        (ApiError("internal error", code=500), "ask the cluster's administrator"),
    ],
)
def test_a_server_that_does_not_answer_is_all_there_is_to_say(error, step, facts):
    check = the(examine(facts({"/version": error})).checks)
    assert (check.id, check.severity) == ("server", Severity.ERROR)
    assert str(error) in check.message
    assert step in check.next_step


def test_a_server_is_reported_with_its_time(facts):
    assert the(server(facts(seconds=0.2))).message.endswith("answered in 200 ms")


# --- permissions ----------------------------------------------------------------------------------


def without(*verbs_and_resources):
    lost = {tuple(each.split()) for each in verbs_and_resources}
    return {
        one: (one.verb, one.resource) not in lost or one.cluster_wide for one in all_permissions()
    }


@pytest.mark.parametrize("lost", ["create pytorchjobs", "watch pytorchjobs"])
def test_what_no_submission_goes_without(lost, facts):
    check = the(permissions(facts(allowed=without(lost))))
    verb, resource = lost.split()
    assert check.severity is Severity.ERROR
    assert check.message == "eve cannot submit and follow jobs in team"
    assert f"{verb} {resource}.kubeflow.org: for" in check.details[0]


def test_what_some_commands_go_without(facts):
    check = the(permissions(facts(allowed=without("get pods/log", "list events", "watch events"))))
    assert check.severity is Severity.WARNING
    assert check.details == (
        "get pods/log: for logs, watch, why",
        "list, watch events: for watch, why",
    )


def test_what_is_cluster_wide_is_nobodys_duty(facts):
    allowed = {one: not one.cluster_wide for one in all_permissions()}
    mine, wide = permissions(facts(allowed=allowed))
    assert (mine.severity, wide.severity) == (Severity.OK, Severity.UNKNOWN)
    assert "get, list nodes; " in wide.message
    assert "manifests/rbac/capacity.yaml and manifests/rbac/cluster-viewer.yaml" in wide.next_step
    assert asked_for(facts(allowed=allowed)) == []


def test_an_apiserver_that_does_not_tell(facts):
    assert the(permissions(facts(allowed={}))).severity is Severity.UNKNOWN
    assert asked_for(facts(allowed={})) == []


@pytest.mark.parametrize(
    ("user", "subject"),
    [
        ("eve", {"kind": "User", "name": "eve"}),
        (
            "system:serviceaccount:ci:robot",
            {"kind": "ServiceAccount", "name": "robot", "namespace": "ci"},
        ),
        ("", {"kind": "User", "name": "YOUR-NAME"}),
    ],
)
def test_the_roles_to_ask_for(user, subject, facts):
    allowed = {Permission("create", "pytorchjobs", "kubeflow.org"): False}
    assert asked_for(facts(allowed=allowed, user=user)) == [
        role(Grant.SUBMITTER, "team"),
        binding(Grant.SUBMITTER, [subject], "team"),
    ]


# --- docs/reference/doctor.md ---------------------------------------------------------------------


def test_every_topic_is_explained():
    listed = (ROOT / "docs/reference/findings.md").read_text().split("## Topics of doctor\n")[1]
    topics = set(re.findall(r"`([a-z -]+)`", listed.split("\n\n")[1]))
    cells = re.findall(r"^\| (`[^|]+) \|", PAGE, re.MULTILINE)
    explained = set(re.findall(r"`([a-z -]+)`", "".join(cells)))
    assert len(topics) > 20
    assert topics == explained


def test_every_verdict_is_explained():
    verdicts = re.findall(r"^\| (ok|unknown|warning|problem) \|", PAGE, re.MULTILINE)
    assert verdicts == [verdict(severity) for severity in Severity]
