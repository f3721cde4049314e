import pytest

from k8sjob.checks.doctor import examine_needs, gather, gather_needs
from k8sjob.checks.doctor.check import Verdict
from k8sjob.checks.doctor.needs import named_objects, queue
from k8sjob.kube.resources import Reference
from k8sjob.rendering import render
from k8sjob.spec import JobSpec
from k8sjob.targets.jobs import references
from k8sjob.yamldoc import parse

TEAM = "/api/v1/namespaces/team"


@pytest.fixture
def job():
    """A job that names one of each."""
    spec = JobSpec(
        name="digits",
        image={"repository": "team/digits", "pull_secrets": ["regcred"]},
        run={
            "script": "main.py",
            "env_from": [{"secret": "hf-token"}, {"config_map": "settings"}],
        },
        volumes=[
            {"name": "data", "mount": "/data", "pvc": "data"},
            {"name": "keys", "mount": "/keys", "secret": "keys"},
            {"name": "conf", "mount": "/conf", "config_map": "conf"},
        ],
        service_account="trainer",
        priority_class="high",
        runtime_class="nvidia",
        kueue_queue="team-queue",
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
}


def paths(job):
    return {str(one): one.path("team") for one in references(job)}


def test_everything_that_a_job_names_is_found_once(job):
    found = references(job)
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
    found = references(make_job(container=container, volumes=volumes))
    assert [str(one) for one in found] == ["secret e", "config map f", "secret a"]


@pytest.mark.parametrize("name", ["..", ".", ""])
def test_a_name_that_would_be_another_path_is_not_asked_for(name, make_job):
    assert references(make_job(priorityClassName=name)) == []


def test_a_name_cannot_leave_its_place():
    assert Reference("secret", "a/../b?c").path("team").endswith("/secrets/a%2F..%2Fb%3Fc")


def test_all_there(facts, job):
    answers = {path: {"metadata": {"name": "x"}} for path in paths(job).values()}
    [check] = named_objects(facts(answers, job=job))
    assert check.verdict is Verdict.OK


@pytest.mark.parametrize("named", sorted(NAMED))
def test_one_missing(named, facts, job):
    kind, name = named
    where = paths(job)
    answers = {path: {"metadata": {"name": "x"}} for path in where.values()}
    answers[where[f"{kind} {name}"]] = None
    missing, _ = named_objects(facts(answers, job=job))
    expected = Verdict.WARNING if kind == "pull secret" else Verdict.PROBLEM
    assert missing.verdict is expected
    assert missing.seen.startswith(f"there is no {kind} {name}")
    made = {"claim", "secret", "pull secret", "config map", "service account"}
    assert ("-n team" in missing.next_step) is (kind in made)
    assert "{" not in missing.next_step


def test_what_may_not_be_read_is_named(facts, job, refused):
    answers = dict.fromkeys(paths(job).values(), refused)
    [check] = named_objects(facts(answers, job=job))
    assert check.verdict is Verdict.UNKNOWN
    assert "secret hf-token" in check.seen


@pytest.mark.parametrize(
    ("modes", "phase", "verdict"),
    [
        (["ReadWriteMany"], "Bound", None),
        (["ReadWriteOnce", "ReadWriteMany"], "Bound", None),
        (["ReadWriteOnce"], "Bound", Verdict.WARNING),
        (["ReadWriteOncePod"], "Bound", Verdict.PROBLEM),
        (["ReadWriteMany"], "Lost", Verdict.PROBLEM),
    ],
)
def test_a_claim_and_many_replicas(modes, phase, verdict, facts, make_job):
    job = make_job(workers=1, volumes=[{"persistentVolumeClaim": {"claimName": "data"}}])
    claim = {"spec": {"accessModes": modes}, "status": {"phase": phase}}
    answers = {f"{TEAM}/persistentvolumeclaims/data": claim}
    *found, there = named_objects(facts(answers, job=job))
    assert [check.verdict for check in found] == ([verdict] if verdict else [])
    assert there.seen == "found: claim data"


GROUPS = {"kind": "APIGroupList", "groups": [{"name": "kueue.x-k8s.io"}, {"name": "apps"}]}


def of_kueue(job, **changes):
    """A job of a queue, as Kueue's webhook would give it back."""
    return lambda body: {**body, "spec": {**body["spec"], "runPolicy": changes}}


@pytest.mark.parametrize(
    ("groups", "answer", "said"),
    [
        ({"kind": "APIGroupList", "groups": []}, {}, "Kueue is not installed in this cluster"),
        (GROUPS, {"suspend": False}, "Kueue does not manage PyTorchJobs in this cluster"),
        (GROUPS, {}, "Kueue does not manage PyTorchJobs in this cluster"),
        (GROUPS, {"suspend": True}, ""),
        ({"kind": "List"}, {}, ""),
    ],
)
def test_a_queue_that_never_starts_a_job(cluster, job, groups, answer, said):
    cluster.answers |= {"/apis": groups, "pytorchjobs": of_kueue(job, **answer)}
    found = [
        one for one in examine_needs(gather_needs(cluster, "team", job)) if one.topic == "queue"
    ]
    assert [one.seen for one in found] == ([said] if said else [])
    posted = [body for method, _, query, body, _ in cluster.asked if method == "POST"]
    assert [body["spec"]["runPolicy"]["suspend"] for body in posted] == [False]
    assert posted[0]["metadata"]["name"] != "digits"
    facts = gather(cluster, "team", job)
    assert [one.seen for one in queue(facts)] == ([said] if said else [])


def test_where_there_is_no_kueue_its_queue_is_not_missed(cluster, job):
    cluster.answers["/apis"] = {"kind": "APIGroupList", "groups": []}
    said = [one.seen for one in examine_needs(gather_needs(cluster, "team", job))]
    assert not any("team-queue" in text for text in said)
    cluster.answers["/apis"] = GROUPS
    said = [one.seen for one in examine_needs(gather_needs(cluster, "team", job))]
    assert "there is no queue team-queue in team" in said
    assert "there is no claim data in team" in said


@pytest.mark.parametrize("group", ["scheduling.volcano.sh", "scheduling.x-k8s.io", "apps"])
def test_a_gang_scheduler_that_is_not_there(cluster, make_job, group):
    job = make_job()
    job["spec"]["runPolicy"] = {"schedulingPolicy": {"minAvailable": 2}}
    cluster.answers["/apis"] = {"kind": "APIGroupList", "groups": [{"name": group}]}
    found = examine_needs(gather_needs(cluster, "team", job))
    assert [one.topic for one in found] == (["gang"] if group == "apps" else [])


def test_what_may_not_be_read_is_no_warning(cluster, job, refused):
    cluster.answers = dict.fromkeys([*paths(job).values(), "/apis", "pytorchjobs"], refused)
    assert examine_needs(gather_needs(cluster, "team", job)) == []


def test_a_job_that_names_nothing_costs_no_request(cluster, make_job):
    assert examine_needs(gather_needs(cluster, "team", make_job())) == []
    assert cluster.asked == []
