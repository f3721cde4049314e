import pytest

from k8sjob.backends.references import Reference, references
from k8sjob.doctor.check import Verdict
from k8sjob.doctor.needs import named_objects
from k8sjob.document import parse
from k8sjob.rendering import render
from k8sjob.spec import JobSpec

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
    assert there.seen == "there: claim data"
