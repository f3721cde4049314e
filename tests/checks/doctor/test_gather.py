from clusters import Cluster

from k8sjob.checks.doctor import gather
from k8sjob.checks.doctor.controller import webhook
from k8sjob.checks.doctor.gather import minimal_job
from k8sjob.checks.doctor.permissions import all_permissions
from k8sjob.kube.client.transport import ApiError
from k8sjob.kube.objects import at_path
from k8sjob.targets.jobs import DEFAULT, by_name, job_of
from k8sjob.targets.pytorchjob.operator import webhook_problems


def test_nothing_is_changed(cluster, make_job):
    gather(cluster, "team", job_of(make_job(volumes=[{"secret": {"secretName": "keys"}}])))
    for method, path, query, _ in cluster.asked:
        assert method in {"GET", "POST"}
        if method == "POST" and "selfsubject" not in path:
            assert query["dryRun"] == "All"
    assert sum(path.endswith("/namespaces/team") for _, path, *_ in cluster.asked) == 1


def test_every_permission_is_requested(cluster):
    facts = gather(cluster, "team")
    assert set(facts.allowed) == set(all_permissions())
    assert facts.user == "eve"


def test_where_reviews_are_refused_nothing_is_known(cluster, refused):
    cluster.answers |= {"selfsubjectaccessreviews": refused, "selfsubjectreviews": refused}
    facts = gather(cluster, "team")
    assert (facts.allowed, facts.user) == ({}, "")


def test_what_does_not_answer_is_not_requested_again(cluster):
    cluster.answers["/version"] = ApiError("connection refused")
    facts = gather(cluster, "team")
    assert facts.error("version").detail == "connection refused"
    assert len(cluster.asked) == 1


def test_of_secrets_and_config_maps_the_contents_stay_where_they_are(cluster, make_job):
    volumes = [{"secret": {"secretName": "keys"}}, {"configMap": {"name": "conf"}}]
    gather(cluster, "team", job_of(make_job(volumes=volumes)))
    asked = {path for _, path, *_ in cluster.asked if "/keys" in path or "/conf" in path}
    assert len(asked & cluster.bare) == len(asked) == 2


def test_pods_are_read_page_by_page(cluster):
    def pod(cpu):
        container = {"resources": {"requests": {"cpu": cpu}}}
        return {"spec": {"nodeName": "n", "containers": [container]}}

    def page(query):
        if query.get("continue") == "next":
            return {"metadata": {}, "items": [pod("2")]}
        return {"metadata": {"continue": "next"}, "items": [pod("1")]}

    cluster.answers["/api/v1/pods"] = page
    assert gather(cluster, "team").usage == {"n": {"cpu": 3, "pods": 2}}


def test_a_page_that_is_refused_makes_no_half_count(cluster):
    def page(query):
        gone = ApiError("too old", code=410, reason="Expired")
        return gone if "continue" in query else {"metadata": {"continue": "x"}, "items": []}

    cluster.answers["/api/v1/pods"] = page
    assert gather(cluster, "team").usage is None


def test_the_minimal_job_is_one_and_the_bad_one_is_bad_in_its_name_only():
    assert webhook_problems(minimal_job(DEFAULT).raw) == []
    bad = webhook_problems(minimal_job(DEFAULT, refused=True).raw)
    assert [problem.field for problem in bad] == ["metadata.name"]


def test_of_a_trainjob_the_runtime_is_bad_which_kueue_does_not_look_at():
    """Kueue's webhook refuses each TrainJob without a runtime, perhaps before Trainer's does."""
    own = "validator.trainingruntime.trainer.kubeflow.org"

    def answer(method, path, _query, body):
        if path.endswith("/trainjobs"):
            hook = 'admission webhook "vtrainjob.kb.io" denied the request: runtime not found'
            return ApiError(hook, code=403)
        jobs = (at_path(body or {}, "spec", "template", "spec", "replicatedJobs")) or ()
        if method == "POST" and any(one.get("replicas", 1) != 1 for one in jobs):
            return ApiError(f'admission webhook "{own}" denied the request: no', code=403)
        return {}

    found = gather(Cluster(answer), "team", target=by_name("trainjob"))
    (check,) = webhook(found)
    assert (str(check.severity), check.message) == ("ok", f"answers: {own} refused an invalid job")


def test_the_job_goes_into_the_namespace_that_is_meant(cluster, make_job):
    gather(cluster, "team", job_of({**make_job(), "metadata": {"name": "x", "namespace": "other"}}))
    posted = [body for _, path, _, body in cluster.asked if path.endswith("/pytorchjobs")]
    assert {body["metadata"]["namespace"] for body in posted} == {"team"}
