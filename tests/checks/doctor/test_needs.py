import re
from dataclasses import replace

import pytest
from healthy import deployment
from observed import RECORDED

from k8sjob.checks.doctor import examine_needs, gather, gather_needs
from k8sjob.checks.doctor.needs import gang, named_objects, queue
from k8sjob.findings import Severity
from k8sjob.kube.api_resources import ObjectReference
from k8sjob.kube.client.transport import ApiError
from k8sjob.kube.openshift import AllowedIds
from k8sjob.rendering.manifest import manifest, render
from k8sjob.spec import JobSpec
from k8sjob.targets.jobs import job_of, references
from k8sjob.yamldoc import parse

TEAM = "/api/v1/namespaces/team"


@pytest.fixture
def job():
    """A job that names one of each."""
    spec = JobSpec(
        name="digits",
        image={"repository": "team/digits", "pull_secrets": ["regcred"]},
        run={"script": "main.py", "env_from": [{"secret": "hf-token"}, {"config_map": "settings"}]},
        volumes=[
            {"name": "data", "mount": "/data", "pvc": "data"},
            {"name": "keys", "mount": "/keys", "secret": "keys"},
            {"name": "conf", "mount": "/conf", "config_map": "conf"},
        ],
        service_account="trainer",
        priority_class="high",
        runtime_class="nvidia",
        kueue_queue="team-queue",
        kueue_priority_class="urgent",
        resources={"cpu": 2, "extended": {"example.com/gpu": 2}},
        replicas={"workers": 2},
    )
    return parse(render(spec)).data


NAMED = {
    ("service account", "trainer"),
    ("pull secret", "regcred"),
    ("secret", "hf-token"),
    ("secret", "keys"),
    ("config map", "settings"),
    ("config map", "conf"),
    ("claim", "data"),
    ("priority class", "high"),
    ("runtime class", "nvidia"),
    ("queue", "team-queue"),
    ("workload priority class", "urgent"),
}


def paths(job):
    return {str(one): one.path("team") for one in references(job_of(job))}


def test_everything_that_a_job_names_is_found_once(job):
    found = references(job_of(job))
    assert {(one.kind, one.name) for one in found} == NAMED
    assert len(found) == len(NAMED)


def test_what_is_optional_is_left_out(make_job):
    container = {
        "env": [
            {"name": "A", "valueFrom": {"secretKeyRef": {"name": "a", "key": "k"}}},
            {"name": "B", "valueFrom": {"secretKeyRef": {"name": "b", "optional": True}}},
            {"name": "C", "value": "plain"},
        ],
        "envFrom": [{"configMapRef": {"name": "c", "optional": True}}],
    }
    volumes = [
        {"secret": {"secretName": "d", "optional": True}},
        {"projected": {"sources": [{"secret": {"name": "e"}}, {"configMap": {"name": "f"}}]}},
    ]
    found = references(job_of(make_job(container=container, volumes=volumes)))
    assert [str(one) for one in found] == ["secret e", "config map f", "secret a"]


@pytest.mark.parametrize("name", ["..", ".", ""])
def test_a_name_that_would_be_another_path_is_not_requested(name, make_job):
    assert references(job_of(make_job(priorityClassName=name))) == []


def test_a_name_cannot_leave_its_place():
    assert ObjectReference("secret", "a/../b?c").path("team").endswith("/secrets/a%2F..%2Fb%3Fc")


def test_all_there(facts, job):
    answers = {path: {"metadata": {"name": "x"}} for path in paths(job).values()}
    [check] = named_objects(facts(answers, job=job))
    assert check.severity is Severity.OK


@pytest.mark.parametrize("named", sorted(NAMED))
def test_one_missing(named, facts, job):
    kind, name = named
    where = paths(job)
    answers = {path: {"metadata": {"name": "x"}} for path in where.values()}
    answers[where[f"{kind} {name}"]] = None
    missing, _ = named_objects(facts(answers, job=job))
    expected = Severity.WARNING if kind == "pull secret" else Severity.ERROR
    assert missing.severity is expected
    assert missing.message.startswith(f"there is no {kind} {name}")
    made = {"claim", "secret", "pull secret", "config map", "service account"}
    assert ("-n team" in missing.next_step) is (kind in made)
    assert "{" not in missing.next_step


def test_what_may_not_be_read_is_named(facts, job, refused):
    answers = dict.fromkeys(paths(job).values(), refused)
    [check] = named_objects(facts(answers, job=job))
    assert check.severity is Severity.UNKNOWN
    assert "secret hf-token" in check.message


@pytest.mark.parametrize(
    ("modes", "phase", "verdict"),
    [
        (["ReadWriteMany"], "Bound", None),
        (["ReadWriteOnce", "ReadWriteMany"], "Bound", None),
        (["ReadWriteOnce"], "Bound", Severity.WARNING),
        (["ReadWriteOncePod"], "Bound", Severity.ERROR),
        (["ReadWriteMany"], "Lost", Severity.ERROR),
    ],
)
def test_a_claim_and_many_replicas(modes, phase, verdict, facts, make_job):
    job = make_job(workers=1, volumes=[{"persistentVolumeClaim": {"claimName": "data"}}])
    claim = {"spec": {"accessModes": modes}, "status": {"phase": phase}}
    answers = {f"{TEAM}/persistentvolumeclaims/data": claim}
    *found, there = named_objects(facts(answers, job=job))
    assert [check.severity for check in found] == ([verdict] if verdict else [])
    assert there.message == "found: claim data"


GROUPS = {"kind": "APIGroupList", "groups": [{"name": "kueue.x-k8s.io"}, {"name": "apps"}]}


def of_kueue(job, **changes):
    """A job of a queue, as Kueue's webhook would give it back."""
    return lambda body: {**body, "spec": {**body["spec"], "runPolicy": changes}}


KUEUE = "/apis/kueue.x-k8s.io/v1beta2"


def local_queue(**active):
    conditions = [{"type": "Active", "status": "False", **active}] if active else []
    return {
        "metadata": {"name": "team-queue"},
        "spec": {"clusterQueue": "all"},
        "status": {"conditions": conditions},
    }


def cluster_queue(gpus=((8, None),), *, inactive="", **spec):
    def flavor(nominal, borrowing):
        more = {} if borrowing is None else {"borrowingLimit": borrowing}
        quota = {"name": "example.com/gpu", "nominalQuota": nominal, **more}
        return {"name": "f", "resources": [quota, {"name": "cpu", "nominalQuota": "100"}]}

    condition = {"type": "Active", "status": "False", "reason": inactive, "message": "Can't admit"}
    flavors = [flavor(*one) for one in gpus]
    return {
        "metadata": {"name": "all"},
        "spec": {"namespaceSelector": {}, "resourceGroups": [{"flavors": flavors}], **spec},
        "status": {"conditions": [condition] if inactive else []},
    }


ELSEWHERE = {"matchExpressions": [{"key": "team", "operator": "In", "values": ["a"]}]}
NOT_OURS = "accepts no jobs from namespace team"
STOPPED, INACTIVE = (local_queue(reason=why) for why in ("Stopped", "ClusterQueueIsInactive"))
OF_GPUS = "requests 6 of example.com/gpu, and ClusterQueue all has at most"


@pytest.mark.parametrize(
    ("answers", "verdict", "detail"),
    [
        ({}, "ok", "ClusterQueue all admits those from LocalQueue team-queue"),
        ({"suspend": False}, "error", "Kueue does not manage PyTorchJobs in namespace team"),
        ({"suspend": None}, "error", "Kueue does not manage PyTorchJobs in namespace team"),
        ({"suspend": "refused"}, "unknown", "it is unknown whether Kueue"),
        ({"queue": "refused"}, "unknown", "it is unknown whether Kueue"),
        ({"cluster": "refused"}, "unknown", "you cannot read ClusterQueue all"),
        ({"cluster": None}, "error", "ClusterQueue all, which does not exist"),
        ({"queue": STOPPED, "cluster": "refused"}, "error", "LocalQueue team-queue is stopped"),
        ({"queue": INACTIVE, "cluster": "refused"}, "error", "all, which is inactive"),
        ({"cluster": cluster_queue(inactive="NoFlavor")}, "error", "inactive: NoFlavor: Can't"),
        ({"cluster": cluster_queue(namespaceSelector=None)}, "error", NOT_OURS),
        ({"cluster": cluster_queue(namespaceSelector=ELSEWHERE)}, "error", NOT_OURS),
        ({"cluster": cluster_queue([(4, None)])}, "error", f"{OF_GPUS} 4"),
        ({"cluster": cluster_queue([(4, None), (2, None)])}, "ok", "admits"),
        # The Workers need 4 of one flavor.
        ({"cluster": cluster_queue([(3, None), (3, None)])}, "error", f"{OF_GPUS} 3 or 3"),
        ({"cluster": cluster_queue([(4, None)], cohortName="c")}, "ok", "admits"),
        ({"cluster": cluster_queue([(4, 1)], cohortName="c")}, "error", f"{OF_GPUS} 5"),
        ({"cluster": cluster_queue([])}, "warning", "ClusterQueue all has no quota for cpu"),
    ],
)
def test_whether_a_queue_will_start_a_job(cluster, job, refused, answers, *, verdict, detail):
    given = {"queue": local_queue(), "cluster": cluster_queue(), "suspend": True, **answers}
    given = {key: refused if answer == "refused" else answer for key, answer in given.items()}
    suspend = given["suspend"]
    changes = {} if suspend is None else {"suspend": suspend}
    cluster.answers |= {
        "/apis": GROUPS,
        f"{KUEUE}/namespaces/team/localqueues/team-queue": given["queue"],
        f"{KUEUE}/clusterqueues/all": given["cluster"],
        "pytorchjobs": suspend if suspend is refused else of_kueue(job, **changes),
    }
    for look in (gather_needs, gather):
        first, *_ = queue(look(cluster, "team", job_of(job)))
        assert first.severity == verdict
        assert detail in first.message
    posted = [body for method, _, query, body in cluster.asked if method == "POST"]
    assert posted[0]["spec"]["runPolicy"]["suspend"] is False
    assert posted[0]["metadata"]["name"] != "digits"


MISSED = "specified trainingRuntime must be created before the TrainJob is created"
DOUBLE = 'spec.runtimePatches[1]: Duplicate value: {"manager":"kueue.x-k8s.io/manager"}'


@pytest.mark.parametrize(
    ("detail", "verdict"), [(MISSED, "error"), (DOUBLE, "ok"), ("no: a policy", "unknown")]
)
def test_whether_kueue_manages_trainjobs_is_known_before_the_runtime_is_there(
    detail, verdict, cluster
):
    """Its webhook adds a patch; the apiserver refuses two of one manager before it asks others."""
    spec = JobSpec(
        name="digits",
        image="i",
        run={"script": "main.py"},
        target="trainjob",
        kueue_queue="team-queue",
    )
    cluster.answers |= {
        "/apis": GROUPS,
        f"{KUEUE}/namespaces/team/localqueues/team-queue": local_queue(),
        f"{KUEUE}/clusterqueues/all": cluster_queue(),
        "trainjobs": ApiError(detail, code=422, detail=detail),
    }
    (found,) = queue(gather_needs(cluster, "team", manifest(spec)))
    assert found.severity == verdict
    (asked,) = [body for _, path, _, body in cluster.asked if path.endswith("/trainjobs")]
    assert asked["spec"]["runtimePatches"] == [{"manager": "kueue.x-k8s.io/manager"}]
    assert asked["spec"]["suspend"] is False


def test_without_kueue_no_job_of_a_queue_starts(cluster, job):
    cluster.answers["/apis"] = {"kind": "APIGroupList", "groups": []}
    (found,) = queue(gather_needs(cluster, "team", job_of(job)))
    assert found.message == "Kueue is not installed in this cluster"
    assert "the job never starts" in found.next_step


@pytest.mark.parametrize(
    ("elastic", "quotas", "verdict"),
    [
        ({"min": 2, "max": 3}, [4], Severity.OK),
        ({"min": 2, "max": 3}, [3], Severity.ERROR),
        (None, [6], Severity.OK),
        (None, [4, 2], Severity.ERROR),  # the Pods of one template get one flavor
    ],
)
def test_the_pods_of_an_indexed_job_need_quota_of_one_flavor(elastic, quotas, verdict, cluster):
    spec = JobSpec(
        name="digits",
        image="i",
        run={"script": "main.py"},
        target="job",
        kueue_queue="team-queue",
        resources={"extended": {"example.com/gpu": 2}},
        replicas={"workers": 2, "elastic": elastic},
    )
    made = manifest(spec)
    answers = {"/apis": GROUPS, f"{KUEUE}/namespaces/team/localqueues/team-queue": local_queue()}
    answers[f"{KUEUE}/clusterqueues/all"] = cluster_queue([(quota, None) for quota in quotas])
    cluster.answers |= {**answers, "jobs": lambda _body: made.raw}
    assert [one.severity for one in queue(gather_needs(cluster, "team", made))] == [verdict]


def test_where_there_is_no_kueue_its_queue_is_not_missed(cluster, job):
    cluster.answers["/apis"] = {"kind": "APIGroupList", "groups": []}
    detail = [one.message for one in examine_needs(gather_needs(cluster, "team", job_of(job)))]
    assert not any("team-queue" in text for text in detail)
    cluster.answers["/apis"] = GROUPS
    detail = [one.message for one in examine_needs(gather_needs(cluster, "team", job_of(job)))]
    assert "there is no queue team-queue in team" in detail
    assert "there is no claim data in team" in detail


OPERATOR_WITHOUT = {"spec": {"template": {"spec": {"containers": [{"args": ["--v=1"]}]}}}}
VOLCANO_QUEUE = next(p for p in RECORDED["gang-queue"]["related"] if p["kind"] == "Queue")
NOT_READ = ApiError("forbidden", code=403, reason="Forbidden")


@pytest.mark.parametrize(
    ("group", "scheduler", "gpus", "queue", "verdict", "words"),
    [
        ("apps", "volcano", 1, None, "error", "its gang scheduler is not installed"),
        ("scheduling.x-k8s.io", "volcano", 1, None, "error", "its gang scheduler is not installed"),
        ("scheduling.x-k8s.io", "other", 1, None, None, ""),
        ("scheduling.volcano.sh", "volcano", 1, None, "error", "there is no queue 'research'"),
        ("scheduling.volcano.sh", "volcano", 1, NOT_READ, "unknown", "you cannot read it"),
        ("scheduling.volcano.sh", "volcano", 3, VOLCANO_QUEUE, "error", "6 nvidia.com/gpu needed"),
        ("scheduling.volcano.sh", "volcano", 2, VOLCANO_QUEUE, "ok", "4 of 4 in use"),
    ],
)
def test_a_gang_and_its_queue(cluster, make_job, *, group, scheduler, gpus, queue, verdict, words):
    made = make_job(workers=3, requests={"nvidia.com/gpu": gpus}, schedulerName=scheduler)
    made["spec"]["runPolicy"] = {"schedulingPolicy": {"minAvailable": 2, "queue": "research"}}
    cluster.answers["/apis"] = {"kind": "APIGroupList", "groups": [{"name": group}]}
    if queue is not None:
        cluster.answers["/apis/scheduling.volcano.sh/v1beta1/queues/research"] = queue
    findings = list(gang(gather_needs(cluster, "team", job_of(made))))
    assert [one.severity for one in findings] == ([verdict] if verdict else [])
    assert all(words in one.message for one in findings)


def test_a_scheduler_of_volcano_s_that_does_not_run(cluster, make_job):
    made = make_job(schedulerName="volcano")
    made["spec"]["runPolicy"] = {"schedulingPolicy": {"queue": "research"}}
    groups = {"kind": "APIGroupList", "groups": [{"name": "scheduling.volcano.sh"}]}
    scheduler = {"items": [deployment(ready=0)]}
    cluster.answers |= {"/apis": groups, "/apis/apps/v1/deployments": scheduler}
    messages = [one.message for one in gang(gather_needs(cluster, "team", job_of(made)))]
    assert any("no pod of its Deployment is ready" in message for message in messages)


def test_an_operator_that_ignores_gangs(facts, make_job):
    made = make_job(schedulerName="other")
    made["spec"]["runPolicy"] = {"schedulingPolicy": {"minAvailable": 2}}
    answers = {"/apis": {"kind": "APIGroupList", "groups": [{"name": "scheduling.x-k8s.io"}]}}
    seen = facts(answers, job=made)
    seen = replace(seen, answers={**seen.answers, "operator": {"items": [OPERATOR_WITHOUT]}})
    [finding] = gang(seen)
    assert "the training operator runs without --gang-scheduler-name" in finding.message


def test_what_may_not_be_read_is_no_warning(cluster, job, refused):
    cluster.answers = dict.fromkeys([*paths(job).values(), "/apis", "pytorchjobs"], refused)
    assert examine_needs(gather_needs(cluster, "team", job_of(job))) == []


def test_a_job_that_names_nothing_costs_one_request(cluster, make_job):
    assert examine_needs(gather_needs(cluster, "team", job_of(make_job()))) == []
    assert [path for _, path, *_ in cluster.asked] == ["/api/v1/namespaces/team"]


OPENSHIFT = {
    "openshift.io/sa.scc.uid-range": "1000750000/10000",
    "openshift.io/sa.scc.supplemental-groups": "2000-2999,5000/10",
}


@pytest.mark.parametrize(
    ("context", "refused_ids"),
    [
        ({}, ""),
        ({"fsGroup": 2000, "runAsUser": 1000759999}, ""),
        ({"fsGroup": 2001}, "fsGroup 2001"),
        ({"fsGroup": 1000, "runAsUser": 1000}, "fsGroup 1000, runAsUser 1000"),
        ({"runAsUser": 1000760000}, "runAsUser 1000760000"),
        ({"runAsUser": ["1000750000"]}, "runAsUser ['1000750000']"),
    ],
)
def test_ids_that_a_namespace_of_openshift_refuses(cluster, make_job, context, refused_ids):
    metadata = {"name": "team", "annotations": OPENSHIFT}
    cluster.answers["/api/v1/namespaces/team"] = {"metadata": metadata}
    job = job_of(make_job(securityContext=context))
    findings = examine_needs(gather_needs(cluster, "team", job))
    assert [finding.id for finding in findings] == ["pod-security"] * bool(refused_ids)
    assert all(finding.message.endswith(f" asks for {refused_ids}") for finding in findings)


def test_a_user_that_is_no_number_is_not_looked_for_among_billions():
    annotations = {"openshift.io/sa.scc.uid-range": "0/9999999999"}
    ids = AllowedIds.of({"metadata": {"annotations": annotations}})
    assert list(ids.refused({"securityContext": {"runAsUser": "5"}})) == ["runAsUser 5"]


@pytest.mark.parametrize(
    ("level", "annotations", "security"),
    [
        ("restricted", {}, "restricted"),
        ("restricted", OPENSHIFT, "openshift"),
        ("baseline", {}, ""),
    ],
)
def test_a_namespace_that_refuses_the_jobs_pods(cluster, make_job, level, annotations, security):
    metadata = {"labels": {"pod-security.kubernetes.io/enforce": level}, "annotations": annotations}
    cluster.answers["/api/v1/namespaces/team"] = {"metadata": {"name": "team", **metadata}}
    job = job_of(make_job(securityContext={"fsGroup": 1000}))
    findings = examine_needs(gather_needs(cluster, "team", job))
    named = {
        step for finding in findings for step in re.findall(r"security: (\w+)", finding.next_step)
    }
    assert named == ({security} if security else set())
