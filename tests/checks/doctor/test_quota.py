import pytest

from k8sjob.checks.doctor.check import Verdict
from k8sjob.checks.doctor.namespace import limits, quotas
from k8sjob.checks.doctor.needs import quota_need
from k8sjob.rendering import manifest
from k8sjob.spec import JobSpec

TEAM = "/api/v1/namespaces/team"


def the(checks):
    [check] = checks
    return check


def quota(hard, used, **spec):
    found = {"metadata": {"name": "q"}, "spec": spec, "status": {"hard": hard, "used": used}}
    return {f"{TEAM}/resourcequotas": {"items": [found]}}


def test_no_quota_and_none_that_may_be_read(facts, refused):
    assert the(quotas(facts())).seen == "team has no ResourceQuota"
    answers = {f"{TEAM}/resourcequotas": refused}
    assert the(quotas(facts(answers))).verdict is Verdict.UNKNOWN


def test_a_quota_with_room(facts):
    check = the(quotas(facts(quota({"pods": "10"}, {"pods": "8"}))))
    assert check.verdict is Verdict.OK
    assert check.details == ("pods: 8 of 10 used",)


def test_a_quota_that_is_nearly_used_up(facts):
    check = the(
        quotas(facts(quota({"requests.nvidia.com/gpu": "8"}, {"requests.nvidia.com/gpu": "8"})))
    )
    assert check.verdict is Verdict.WARNING
    assert check.seen == "q is nearly used up: requests.nvidia.com/gpu"


@pytest.mark.parametrize(
    ("hard", "used", "enough"),
    [
        ({"pods": "4"}, {"pods": "0"}, True),
        ({"pods": "4"}, {"pods": "1"}, False),
        ({"services": "4"}, {"services": "1"}, False),
        ({"requests.nvidia.com/gpu": "8"}, {"requests.nvidia.com/gpu": "0"}, True),
        ({"requests.nvidia.com/gpu": "7"}, {"requests.nvidia.com/gpu": "0"}, False),
        ({"requests.memory": "15Gi"}, {"requests.memory": "0"}, False),
        ({"memory": "15Gi"}, {}, False),
        ({"limits.memory": "16Gi"}, {}, True),
        ({"count/pytorchjobs.kubeflow.org": "1"}, {"count/pytorchjobs.kubeflow.org": "1"}, False),
        ({"secrets": "1"}, {"secrets": "1"}, True),
    ],
)
def test_a_job_against_a_quota(hard, used, enough, facts, make_job):
    job = make_job(workers=3, requests={"cpu": "1", "memory": "4Gi", "nvidia.com/gpu": "2"})
    verdicts = [check.verdict for check in quotas(facts(quota(hard, used), job=job))]
    assert (Verdict.PROBLEM not in verdicts) is enough


@pytest.mark.parametrize(
    ("target", "objects"),
    [
        ("job", {"jobs.batch"}),
        ("jobset", {"jobs.batch", "jobsets.jobset.x-k8s.io"}),
        (
            "trainjob",
            {"jobs.batch", "jobsets.jobset.x-k8s.io", "trainjobs.trainer.kubeflow.org"},
        ),
    ],
)
def test_what_a_job_with_one_service_adds_to_a_quota(target, objects):
    spec = {"name": "a", "image": "i", "run": {"script": "a.py"}, "target": target}
    need = quota_need(manifest(JobSpec.model_validate({**spec, "replicas": {"workers": 3}})))
    assert (need["pods"], need["services"], need["count/services"]) == (4, 1, 1)
    assert {what[6:] for what in need if "." in what and what.startswith("count/")} == objects


def test_a_quota_for_some_pods_alone_is_not_held_against_the_job(facts, make_job):
    answers = quota({"pods": "1"}, {"pods": "0"}, scopes=["BestEffort"])
    assert the(quotas(facts(answers, job=make_job()))).verdict is Verdict.OK


def test_a_quota_wants_what_the_job_does_not_say(facts, make_job):
    hard = {"limits.memory": "64Gi", "requests.cpu": "8", "pods": "9"}
    checks = list(quotas(facts(quota(hard, {}), job=make_job(requests={"cpu": "1"}))))
    assert [check.verdict for check in checks] == [Verdict.OK, Verdict.PROBLEM]
    assert "limits.memory; the job's do not" in checks[1].seen


def test_a_limit_range_may_fill_it_in(facts, make_job):
    fills = {"items": [{"spec": {"limits": [{"type": "Container", "default": {"memory": "1Gi"}}]}}]}
    answers = {
        **quota({"limits.memory": "64Gi", "memory": "64Gi"}, {}),
        f"{TEAM}/limitranges": fills,
    }
    assert the(quotas(facts(answers, job=make_job()))).verdict is Verdict.OK


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
    assert (check.verdict is Verdict.OK) is allowed


def test_a_limit_range_without_a_maximum_says_nothing(facts):
    found = {"metadata": {"name": "l"}, "spec": {"limits": [{"type": "Container", "min": {}}]}}
    assert list(limits(facts({f"{TEAM}/limitranges": {"items": [found]}}))) == []
