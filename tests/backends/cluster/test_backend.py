"""The back end over a transport that answers as it was told to."""

import threading
import time

import pytest

from k8sjob.backends.api import JobRef
from k8sjob.backends.cluster.backend import ClusterBackend
from k8sjob.errors import BackendError, JobExists, JobNotFound
from k8sjob.jobs.plan import plan_job
from k8sjob.jobs.submit import submit_plan
from k8sjob.kube.objects import MANAGED_BY, MANIFEST_DIGEST
from k8sjob.observe.status import JobState, job_status
from k8sjob.spec import JobSpec
from k8sjob.targets.jobs import job_of

JOBS = "/apis/kubeflow.org/v1/namespaces/team/pytorchjobs"
ONE = f"{JOBS}/one"
BATCH = "/apis/batch/v1/namespaces/team/jobs"
SERVICES = "/api/v1/namespaces/team/services"
TRAINJOBS = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs"
RUNTIMES = TRAINJOBS.replace("trainjobs", "trainingruntimes")
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets"
PODS = "/api/v1/namespaces/team/pods"
EVENTS = "/api/v1/namespaces/team/events"
MADE = "2026-11-21T12:00:00Z"


def job(name="one", uid="uid-1", version=1, *, done=None, digest=None, namespace="team"):
    meta = {"name": name, "namespace": namespace, "uid": uid, "resourceVersion": str(version)}
    meta |= {"creationTimestamp": MADE, "managedFields": [{"manager": "x"}]}
    if digest:
        meta["annotations"] = {MANIFEST_DIGEST: digest}
    status = {"conditions": [{"type": done, "status": "True"}]} if done else {}
    return {"kind": "PyTorchJob", "metadata": meta, "spec": {}, "status": status}


def pod(role, index, owner="uid-1", version=1):
    name = f"one-{role}-{index}"
    labels = {"training.kubeflow.org/replica-type": role}
    labels["training.kubeflow.org/replica-index"] = str(index)
    meta = {"name": name, "uid": f"{name}-of-{owner}", "labels": labels}
    meta |= {"ownerReferences": [{"uid": owner, "controller": True}]}
    return {"metadata": {**meta, "resourceVersion": str(version)}, "spec": {}, "status": {}}


def happening(about, reason, kind="Pod", **times):
    meta = {"name": about, "uid": reason.replace(" ", "-"), "resourceVersion": "1"}
    of = {"kind": kind, "name": about}
    return {"metadata": meta, "involvedObject": of, "reason": reason, **times}


@pytest.fixture
def indexed():
    """The plan of a job whose pods need a Service."""
    spec = {"name": "one", "image": "i", "target": "job", "run": {"command": ["true"]}}
    return plan_job(JobSpec.model_validate(spec))


@pytest.fixture
def train(script, error):
    """The plan of a TrainJob, which webhooks refuse: its TrainingRuntime is not known."""
    note = "specified trainingRuntime must be created before the TrainJob is created"
    made = {"kind": "TrainJob", "metadata": {"name": "one", "namespace": "team", "uid": "uid-1"}}
    unknown = error(403, "Forbidden", note)
    denied = "admission webhook \"vtrainjob.kb.io\" denied the request: runtime 'one' not found"
    of_kueue = error(403, "Forbidden", denied)
    script.on("POST", TRAINJOBS, of_kueue, unknown, of_kueue, made).on(
        "PATCH", f"{RUNTIMES}/one", {}
    )
    stored = {"metadata": {"name": "one", "uid": "r", "resourceVersion": "1"}}
    script.on("POST", RUNTIMES, stored)
    spec = {"name": "one", "image": "i", "target": "trainjob", "run": {"command": ["true"]}}
    return plan_job(JobSpec.model_validate(spec))


@pytest.fixture
def backend(script):
    return ClusterBackend(script)


@pytest.fixture
def taken(error):
    return error(409, "AlreadyExists", '"one" already exists')


@pytest.fixture
def hurried(monkeypatch):
    """No pause between two requests."""
    monkeypatch.setattr("k8sjob.backends.cluster.backend.time.sleep", lambda _: None)


@pytest.fixture
def there(script, listed):
    """A cluster with the job, no pods and no events."""
    script.on("GET", ONE, job()).on("GET", JOBS, listed(1, job()))
    return script.on("GET", PODS, listed(1)).on("GET", EVENTS, listed(1))


# --- making


def test_a_manifests_own_namespace_counts(backend, script):
    other = JOBS.replace("team", "other")
    script.on("POST", other, job(namespace="other"))
    assert backend.create_manifest(job_of(job(namespace="other"))).namespace == "other"


def test_a_job_that_was_made_although_its_answer_was_lost_is_found(backend, script, error, taken):
    script.on("POST", JOBS, error(), taken).on("GET", ONE, job(digest="abc"))
    assert backend.create_manifest(job_of(job(digest="abc"))).uid == "uid-1"


def test_a_job_of_another_digest_was_not_made_by_the_request_that_was_lost(
    backend, script, error, taken
):
    script.on("POST", JOBS, error(), taken).on("GET", ONE, job(digest="other"))
    with pytest.raises(JobExists):
        backend.create_manifest(job_of(job(digest="abc")))


def test_a_request_that_did_not_arrive_is_made_again(backend, script, error):
    script.on("POST", JOBS, error(), error(503, "ServiceUnavailable"), job())
    assert backend.create_manifest(job_of(job())).uid == "uid-1"


def test_a_job_of_others_is_neither_replaced_nor_overlooked(
    backend, script, listed, taken, indexed
):
    script.on("POST", BATCH, taken)
    others = {"name": "one", "namespace": "team", "uid": "theirs"}
    script.on("GET", f"{BATCH}/one", {"kind": "Job", "metadata": others, "spec": {}})
    script.on("GET", PODS, listed(1)).on("GET", EVENTS, listed(1))
    for replace in (False, True):
        with pytest.raises(JobExists, match="it is a Job that k8sjob has not created"):
            submit_plan(indexed, backend, replace=replace)


def test_the_name_of_a_job_of_others_is_refused_to_every_kind(backend, script):
    plan = plan_job(JobSpec(name="one", image="i", run={"command": ["true"]}))
    meta = {"name": "one", "namespace": "team", "uid": "theirs"}
    theirs = {"kind": "Job", "metadata": meta, "spec": {"completionMode": "Indexed"}}
    script.on("GET", f"{BATCH}/one", theirs).on("POST", JOBS, job())
    for replace in (False, True):
        with pytest.raises(JobExists, match="it is a Job that k8sjob has not created"):
            submit_plan(plan, backend, replace=replace)
    assert not script.of("DELETE")
    assert all("dryRun" in query for query in script.of("POST"))


def test_what_does_not_depend_on_each_other_is_asked_for_at_once_and_once(backend, script):
    plan = plan_job(JobSpec(name="one", image="i", run={"command": ["true"]}))
    all_asked = threading.Barrier(5)

    def wait(_body, query):
        if query.keys() != {"fieldValidation"}:
            all_asked.wait(30)
        return job()

    def absent(_body, _query):
        all_asked.wait(30)

    for kind in (BATCH, JOBSETS, TRAINJOBS):
        script.on("GET", f"{kind}/one", absent)
    script.on("POST", JOBS, wait).on("GET", "/api/v1/namespaces/team", absent)
    backend.look_at_namespace_ahead()
    backend.look_ahead(plan.job)
    assert backend.own_namespace().code == 404
    assert submit_plan(plan, backend).ref.uid == "uid-1"
    assert [sorted(query) for query in script.of("POST")] == [
        ["dryRun", "fieldValidation"],
        ["fieldValidation"],
    ]


def test_of_two_jobs_of_a_name_k8sjobs_own_is_meant(backend, script):
    meta = {"name": "one", "namespace": "team"}
    theirs = {"metadata": {**meta, "uid": "theirs"}, "spec": {"completionMode": "Indexed"}}
    own = {"metadata": {**meta, "uid": "own", "labels": {MANAGED_BY: "k8sjob"}}, "spec": {}}
    own["spec"] = {"replicatedJobs": [{"template": {"spec": {"completionMode": "Indexed"}}}]}
    script.on("GET", f"{BATCH}/one", theirs)
    assert backend.find("one").uid == "theirs"
    script.on("GET", f"{JOBSETS}/one", own)
    assert backend.find("one") == JobRef("one", "team", "own", kind="JobSet")


@pytest.mark.parametrize("code", [403, 504, 0], ids=["refused", "late", "lost"])
def test_a_service_stays_where_its_job_may_have_been_created(code, backend, script, error, indexed):
    service = {"metadata": {"uid": "s", "resourceVersion": "1"}}
    script.on("POST", SERVICES, service).on("DELETE", f"{SERVICES}/one", {})
    script.on("POST", BATCH, {}, error(code, "Whatever"))
    with pytest.raises(BackendError):
        backend.create(indexed)
    assert bool(script.of("DELETE")) is (code == 403)


def test_of_two_who_submit_at_once_the_second_finds_the_job(backend, script, taken, indexed):
    owned = {"labels": {MANAGED_BY: "k8sjob"}, "ownerReferences": [{"uid": "of the first"}]}
    script.on("POST", SERVICES, taken).on("GET", f"{SERVICES}/one", {"metadata": owned})
    script.on("POST", BATCH, {}, taken)
    with pytest.raises(JobExists, match="team/one already exists; see `k8sjob status"):
        backend.create(indexed)


def test_a_trainjob_follows_its_runtime_and_the_end_of_an_earlier_jobset(
    backend, script, error, train
):
    earlier = {"metadata": {"ownerReferences": [{"kind": "TrainJob", "uid": "of the earlier"}]}}
    script.on("GET", f"{JOBSETS}/one", earlier, error(404, "NotFound"))
    assert backend.create(train).uid == "uid-1"
    made = [(method, path) for method, path, query, _ in script.asked if "dryRun" not in query]
    assert made == [
        ("GET", f"{TRAINJOBS}/one"),  # a name that is taken is not seen by the dry run
        *[("GET", f"{JOBSETS}/one")] * 2,
        ("POST", RUNTIMES),
        *[("POST", TRAINJOBS)] * 3,
        ("PATCH", f"{RUNTIMES}/one"),
        *[("GET", path) for path in (JOBS, BATCH, JOBSETS)],  # of the name, at its creation
    ]
    bodies = [body for method, path, _, body in script.asked if path == TRAINJOBS]
    assert all(body.keys() == {"apiVersion", "kind", "metadata", "spec"} for body in bodies)


def test_the_jobset_of_another_clients_trainjob_is_not_waited_for(backend, script):
    def of(uid):
        owners = [{"kind": "TrainJob", "uid": f"of {uid}"}]
        return {"metadata": {"uid": uid, "ownerReferences": owners}}

    script.on("GET", f"{JOBSETS}/one", of("earlier"), of("theirs"))
    backend.wait_for_leftovers(JobRef("one", "team", kind="TrainJob"))
    assert len(script.asked) == 2


def test_a_trainjob_whose_runtime_was_deleted_is_there_all_the_same(backend, script, listed, train):
    """Its webhook refuses the dry run before the apiserver looks at the name."""
    about = {"namespace": "team", "uid": "t", "resourceVersion": "1", "creationTimestamp": MADE}
    there = {**train.manifest, "metadata": {**train.manifest["metadata"], **about}}
    del there["runtime"]
    script.on("GET", f"{TRAINJOBS}/one", there).on("GET", PODS, listed(1))
    script.on("GET", EVENTS, listed(1))
    lines = []
    done = submit_plan(train, backend, report=lines.append)
    assert (done.outcome, done.ref.uid) == ("attached", "t")
    assert "has changed since it was created, in runtime" in lines[0]
    assert all("dryRun" in query for query in script.of("POST"))


@pytest.mark.parametrize("first", [True, False])
def test_of_two_who_create_a_job_of_different_kinds_at_once_the_first_one_stays(
    backend, script, listed, error, *, indexed, first
):
    """Neither of them saw the other's name; each looks at the moment of its own creation."""
    made = {"kind": "Job", "metadata": job(version=7)["metadata"], "spec": {}}
    script.on("POST", BATCH, made).on("POST", SERVICES, {"metadata": {"uid": "s"}})

    def then(_, query):
        asked = {"resourceVersion": "7", "resourceVersionMatch": "Exact"}
        assert query == {"fieldSelector": "metadata.name=one", **asked}
        return listed(7, *([] if first else [job(uid="other")]))

    script.on("GET", JOBS, then).on("DELETE", f"{BATCH}/one", {})
    script.on("GET", ONE, error(404, "NotFound"), job(uid="other"))
    if first:
        assert submit_plan(indexed, backend).ref.uid == "uid-1"
        assert not script.of("DELETE")
        return
    with pytest.raises(JobExists, match=r"a PyTorchJob of that name .* the new Job was removed"):
        submit_plan(indexed, backend, replace=True)
    (removed,) = [body for method, _, _, body in script.asked if method == "DELETE"]
    assert removed["preconditions"] == {"uid": "uid-1"}


def test_a_jobset_of_others_is_not_made_a_trainjobs(backend, script, train):
    script.on("GET", f"{JOBSETS}/one", {"metadata": {"name": "one"}})
    with pytest.raises(BackendError, match="jobsets/one in namespace team is of another job"):
        backend.create(train)
    assert all("dryRun" in query for query in script.of("POST"))


def test_a_runtime_that_is_left_of_another_job_is_replaced(
    backend, script, taken, train, monkeypatch
):
    monkeypatch.setattr("k8sjob.backends.cluster.creation._CUT_OFF_SECONDS", 0.0)
    marks = {"labels": {MANAGED_BY: "k8sjob"}, "annotations": {MANIFEST_DIGEST: "of another"}}
    left = {"metadata": {"name": "one", "uid": "left", "resourceVersion": "7", **marks}}
    stored = {"metadata": {"name": "one", "uid": "r"}}
    script.on("POST", RUNTIMES, stored, taken, stored).on("GET", f"{RUNTIMES}/one", left)
    made = {"kind": "TrainJob", "metadata": {"name": "one", "namespace": "team", "uid": "uid-1"}}
    script.on("DELETE", f"{RUNTIMES}/one", {}).on("POST", TRAINJOBS, made)
    assert backend.create(train).uid == "uid-1"
    (options,) = [body for method, _, _, body in script.asked if method == "DELETE"]
    assert options["preconditions"] == {"uid": "left", "resourceVersion": "7"}


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("going", [{"deletionTimestamp": MADE}, {"ownerReferences": [{}]}])
@pytest.mark.parametrize("labels", [{MANAGED_BY: "k8sjob"}, {}], ids=["own", "of a JobSet"])
def test_a_service_that_is_going_is_waited_for(going, labels, script, taken, indexed):
    made = {"metadata": {"name": "one", "uid": "s"}}
    script.on("POST", SERVICES, taken, made).on("PATCH", f"{SERVICES}/one", {})
    script.on("GET", f"{SERVICES}/one", {"metadata": {"uid": "old", "labels": labels, **going}})
    script.on("POST", BATCH, {"kind": "Job", "metadata": {"name": "one", "uid": "uid-1"}})
    ClusterBackend(script).create(indexed)
    (owned,) = [body["metadata"] for method, _, _, body in script.asked if method == "PATCH"]
    assert owned["uid"] == "s"


def test_who_replaces_a_trainjob_by_a_jobset_waits_for_the_jobset_of_that(
    backend, script, error, listed
):
    gone, of_train = error(404, "NotFound"), {"kind": "TrainJob", "uid": "t"}
    about = {"name": "one", "namespace": "team"}
    earlier = {"kind": "TrainJob", "metadata": {**about, "uid": "t"}, "spec": {"suspend": True}}
    script.on("GET", f"{TRAINJOBS}/one", earlier, gone).on("DELETE", f"{TRAINJOBS}/one", {})
    below = {"metadata": {**about, "uid": "s", "ownerReferences": [of_train]}}
    script.on("GET", f"{JOBSETS}/one", below, gone).on("GET", PODS, listed(1))
    script.on("POST", JOBSETS, {"kind": "JobSet", "metadata": {**about, "uid": "new"}})
    spec = {"name": "one", "image": "i", "target": "jobset", "run": {"command": ["true"]}}
    plan = plan_job(JobSpec.model_validate(spec))
    assert submit_plan(plan, backend, replace=True).ref.uid == "new"
    asked = [(method, path) for method, path, query, _ in script.asked if "dryRun" not in query]
    assert asked.index(("POST", JOBSETS)) > asked.index(("GET", f"{JOBSETS}/one"))
    assert asked.count(("GET", f"{JOBSETS}/one")) == 2


@pytest.mark.parametrize("reason", ["Untrusted", "Unusable", ""])
def test_what_no_waiting_mends_is_raised_at_once(reason, backend, script, error):
    script.on("POST", JOBS, error(reason=reason), job())
    with pytest.raises(BackendError, match="connection reset"):
        backend.create_manifest(job_of(job()))
    assert len(script.asked) == 1


def test_what_the_server_would_store(backend, script):
    script.on("POST", JOBS, lambda body, _: {**body, "spec": {"defaulted": True}})
    assert backend.dry_run(job_of(job())).spec == {"defaulted": True}
    assert script.asked[0][2] == {"fieldValidation": "Strict", "dryRun": "All"}
    assert "managedFields" not in backend.dry_run(job_of(job())).metadata


@pytest.mark.parametrize("length", [1, 6, 7, 63])
def test_as_if_the_name_were_free(length, backend, script):
    name = "n" * length

    def stored(body, _query):
        meta = body["metadata"]
        assert len(meta["generateName"]) + 5 <= max(length, 7)  # a JobSet's may have 48
        return {**body, "metadata": {**meta, "name": meta["generateName"] + "x7k2p"}}

    script.on("POST", JOBS, stored)
    answer = backend.dry_run(job_of(job(name)), name_free=True)
    assert answer.name == name
    assert "generateName" not in answer.metadata


# --- reading


def test_a_job_by_its_name(backend, there):
    assert backend.find("one") == JobRef("one", "team", "uid-1")
    with pytest.raises(JobNotFound, match="no job 'two' in namespace team"):
        backend.find("two")
    with pytest.raises(JobNotFound, match="namespace other"):
        backend.find("one", "other")


def test_a_cluster_without_the_operator_is_not_one_without_the_job(backend, script, error):
    script.on("GET", ONE, error(404, "", "404 page not found"))
    with pytest.raises(BackendError, match="training operator is not installed") as told:
        backend.find("one")
    assert not isinstance(told.value, JobNotFound)


def test_who_may_read_no_other_kind_of_job_misses_nothing(backend, script, listed, error):
    denied = error(403, "Forbidden", "no")
    script.on("GET", JOBS, listed(1)).on("GET", BATCH, denied).on("GET", f"{BATCH}/one", denied)
    assert backend.jobs() == []
    with pytest.raises(JobNotFound):
        backend.find("one")


def test_without_the_operator_there_are_only_jobs_of_the_other_kind(backend, script, listed, error):
    script.on("GET", JOBS, error(404, "", "404 page not found")).on("GET", BATCH, listed(1))
    assert backend.jobs() == []
    script.on("GET", BATCH, error(403, "Forbidden", "no"))
    with pytest.raises(BackendError, match="training operator is not installed"):
        backend.jobs()


def test_who_may_read_only_another_kind_of_job_has_none_yet(backend, script, listed, error):
    denied = error(403, "Forbidden", "no")
    script.on("GET", JOBS, denied).on("GET", ONE, denied).on("GET", BATCH, listed(1))
    assert backend.jobs() == []
    with pytest.raises(JobNotFound, match=r"no job 'one'.*you cannot read PyTorchJobs there"):
        backend.find("one")


def test_all_jobs_the_newest_first_and_page_by_page(backend, script, listed):
    old, new = job("old", "1"), job("new", "2")
    new["metadata"]["creationTimestamp"] = "2026-11-21T13:00:00Z"
    more = listed(9, old, more="more", kind="PyTorchJobList")
    script.on("GET", JOBS, more, listed(9, new, kind="PyTorchJobList"))
    found = [snapshot.job for snapshot in backend.jobs(selector="a=b")]
    assert [j.name for j in found] == ["new", "old"]
    assert {j.raw["kind"] for j in found} == {"PyTorchJob"}
    assert all("managedFields" not in j.metadata for j in found)
    assert [(q["labelSelector"], q.get("continue")) for q in script.of("GET")[:2]] == [
        ("a=b", None),
        ("a=b", "more"),
    ]


def test_pages_that_are_too_old_are_read_at_once(backend, script, listed, error):
    first = listed(9, job("a", "1"), more="more")
    script.on("GET", JOBS, first, error(410, "Expired"), listed(12, job("a", "1"), job("b", "2")))
    assert len(backend.jobs()) == 2
    assert "limit" not in script.of("GET")[2]


def test_a_snapshot_in_its_order_and_without_what_belongs_to_others(backend, there, listed):
    mine = [pod("worker", 10), pod("worker", 2), pod("master", 0)]
    there.on("GET", PODS, listed(1, *mine, pod("worker", 1, owner="uid-before")))
    own = [happening("one", "own", firstTimestamp="2026-11-21T12:00:04Z")]
    theirs = [
        happening("one-worker-2", "second", lastTimestamp="2026-11-21T12:00:05Z"),
        happening("one-master-0", "first", eventTime="2026-11-21T12:00:03.123456Z"),
        happening("one-worker-2", "of-one-before", lastTimestamp="2026-11-21T11:00:00Z"),
        happening("one-worker-2-x", "of another", lastTimestamp="2026-11-21T12:00:05Z"),
        happening("another-worker-2", "of another", lastTimestamp="2026-11-21T12:00:05Z"),
    ]
    by_selector = {"involvedObject.uid=uid-1": own, "involvedObject.kind=Pod": theirs}
    there.on("GET", EVENTS, lambda _, query: listed(1, *by_selector[query["fieldSelector"]]))
    snapshot = backend.snapshot(JobRef("one", "team"))
    names = [p["metadata"]["name"] for p in snapshot.pods]
    assert names == ["one-master-0", "one-worker-2", "one-worker-10"]
    assert [event["reason"] for event in snapshot.events] == ["first", "own", "second"]


@pytest.fixture
def jobset(script, listed, error):
    """A cluster with a JobSet, its Job, a Pod and Events, and without the training operator."""
    script.on("GET", JOBS, error(404, "", "404 page not found")).on("GET", BATCH, listed(1))
    uid = {"jobset.sigs.k8s.io/jobset-uid": "uid-1"}
    labels = {"batch.kubernetes.io/job-name": "one-node-0", **uid}
    labels |= {"jobset.sigs.k8s.io/jobset-name": "one"}
    labels |= {"batch.kubernetes.io/job-completion-index": "0"}
    meta = {"name": "one-node-0-0-abcde", "uid": "p", "labels": labels, "namespace": "team"}
    meta |= {"ownerReferences": [{"uid": "its-job", "controller": True}], "resourceVersion": "1"}
    script.on("GET", PODS, listed(1, {"metadata": meta, "spec": {}, "status": {}}))
    at = "one-node-0"
    theirs = {
        "involvedObject.uid=uid-1": [happening("one", "own", firstTimestamp=MADE)],
        "involvedObject.kind=Job": [
            happening(at, "SuccessfulCreate", kind="Job", lastTimestamp="2026-11-21T12:00:01Z"),
            happening(at, "of-one-before", kind="Job", lastTimestamp="2026-11-21T11:00:00Z"),
            happening("one-leader-0", "of another", kind="Job", lastTimestamp=MADE),
        ],
    }
    script.on("GET", EVENTS, lambda _, query: listed(1, *theirs.get(query["fieldSelector"], ())))
    child = job("one-node-0")
    child["metadata"]["labels"] = uid
    child["metadata"]["ownerReferences"] = [{"kind": "JobSet", "uid": "uid-1", "controller": True}]
    child |= {"kind": "Job", "status": {"ready": 1}}
    child["spec"] = {"completionMode": "Indexed", "completions": 1}
    spec = {"replicatedJobs": [{"name": "node", "template": {"spec": child["spec"]}}]}
    made = {**job(), "kind": "JobSet", "spec": spec}
    jobsets = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets"
    script.on("GET", f"{jobsets}/one", made).on("GET", jobsets, listed(1, made, kind="JobSetList"))
    script.on("GET", f"{BATCH}/one-node-0", child)
    return script.on("GET", BATCH, listed(1, child, kind="JobList"))


def read(backend, ref, how):
    if how == "jobs":
        return backend.jobs(pods=True)[0]
    return backend.snapshot(ref) if how == "snapshot" else next(iter(backend.watch(ref)))


@pytest.mark.parametrize("how", ["snapshot", "jobs", "watch"])
def test_a_job_is_read_with_the_job_below_it(how, backend, jobset):
    found = read(backend, JobRef("one", "team", "uid-1", "JobSet"), how)
    if how != "jobs":
        assert [event["reason"] for event in found.events] == ["own", "SuccessfulCreate"]
    assert found.job.child["metadata"]["name"] == "one-node-0"
    assert [pod["metadata"]["name"] for pod in found.pods] == ["one-node-0-0-abcde"]
    assert job_status(found).state is JobState.RUNNING


@pytest.mark.parametrize("how", ["snapshot", "watch"])
def test_the_events_of_all_jobs_of_others_jobset_are_read(how, backend, script, listed, jobset):
    made = script.request("GET", f"{JOBSETS}/one")
    (node,) = made["spec"]["replicatedJobs"]
    parts = [{**node, "name": "leader"}, {**node, "name": "actors", "replicas": 2}]
    made = {**made, "spec": {"replicatedJobs": parts}}
    script.on("GET", f"{JOBSETS}/one", made).on("GET", JOBSETS, listed(1, made, kind="JobSetList"))
    names = ["one-leader-0", "one-actors-1", "one-actors-2"]
    jobs = [happening(name, f"of {name}", kind="Job", lastTimestamp=MADE) for name in names]
    pods = [happening("one-actors-0-0-abcde", "of-its-pod", lastTimestamp=MADE)]
    theirs = {"involvedObject.kind=Job": jobs, "involvedObject.kind=Pod": pods}
    theirs["involvedObject.kind=Pod,type=Warning"] = pods
    script.on("GET", EVENTS, lambda _, query: listed(1, *theirs.get(query["fieldSelector"], ())))
    found = read(backend, JobRef("one", "team", "uid-1", "JobSet"), how)
    reasons = {event["reason"] for event in found.events}
    assert reasons == {"of one-leader-0", "of one-actors-1", "of-its-pod"}


@pytest.mark.parametrize("how", ["snapshot", "jobs", "watch"])
def test_a_trainjob_is_read_with_what_is_made_of_it(how, backend, script, listed, jobset):
    def of(owner, item):
        owners = [{"uid": owner, "controller": True}]
        item["metadata"] |= {"ownerReferences": owners, "creationTimestamp": MADE}
        return item

    train = {**job(uid="t"), "kind": "TrainJob", "spec": {"runtimeRef": {"name": "any"}}}
    below, its_job = of("t", job()), of("uid-1", job("one-node-0", "its-job"))
    below["kind"], its_job["kind"] = "JobSet", "Job"
    script.on("GET", f"{TRAINJOBS}/one", train).on("GET", TRAINJOBS, listed(1, train))
    script.on("GET", f"{JOBSETS}/one", below).on("GET", JOBSETS, listed(1, below))
    script.on("GET", f"{BATCH}/one-node-0", its_job).on("GET", BATCH, listed(1, its_job))
    (own,) = script.request("GET", PODS)["items"]
    own["metadata"]["creationTimestamp"] = MADE
    labels = {**own["metadata"]["labels"], "jobset.sigs.k8s.io/jobset-uid": "of another"}
    earlier = {**own, "metadata": {**own["metadata"], "uid": "q", "labels": labels}}
    script.on("GET", PODS, listed(1, earlier, own))
    refused = happening("one", "HeadlessServiceCreationFailed", "JobSet", lastTimestamp=MADE)
    theirs = {"involvedObject.kind=JobSet,involvedObject.name=one": [refused]}
    script.on("GET", EVENTS, lambda _, query: listed(1, *theirs.get(query["fieldSelector"], ())))
    found = read(backend, JobRef("one", "team", "t", "TrainJob"), how)
    if how != "jobs":
        assert [event["reason"] for event in found.events] == ["HeadlessServiceCreationFailed"]
    assert [pod["metadata"]["uid"] for pod in found.pods] == ["p"]
    assert found.job.child["metadata"]["uid"] == "its-job"


@pytest.mark.parametrize("how", ["snapshot", "watch"])
@pytest.mark.parametrize("ref", [JobRef("one", "team", "uid-0"), JobRef("two", "team")])
def test_a_recreated_job_is_another_one(how, ref, backend, there):
    with pytest.raises(JobNotFound):
        read(backend, ref, how)


def test_events_that_may_not_be_read_are_missed_and_no_more(backend, there, error):
    there.on("GET", EVENTS, error(403, "Forbidden", "no"))
    assert backend.snapshot(JobRef("one", "team")).events == ()


# --- watching


def change(kind, item):
    return {"type": kind, "object": item}


def test_each_change_is_reported_until_the_job_is_gone(backend, there):
    seen, gone = threading.Event(), threading.Event()
    there.watched(
        JOBS,
        [
            seen,
            change("MODIFIED", job(version=2, done="Succeeded")),
            gone,
            change("DELETED", job(version=3)),
        ],
    )
    states = []
    for snapshot in backend.watch(JobRef("one", "team")):
        states.append(snapshot.job.raw["status"])
        (seen if len(states) == 1 else gone).set()
    assert states == [{}, {"conditions": [{"type": "Succeeded", "status": "True"}]}]


def test_what_happens_at_once_is_reported_at_once(backend, there):
    seen, rest = threading.Event(), threading.Event()
    added = [change("ADDED", pod("worker", index, version=index + 2)) for index in range(200)]
    there.watched(PODS, [seen, *added])
    there.watched(JOBS, [rest, change("DELETED", job(version=3))])
    counts = []
    for snapshot in backend.watch(JobRef("one", "team", "uid-1", "PyTorchJob")):
        counts.append(len(snapshot.pods))
        seen.set()
        if counts[-1] == 200:
            rest.set()
    assert counts[-1] == 200
    assert len(counts) < 20
    assert ONE not in {path for _, path, *_ in there.asked}  # its list has it


def test_a_connection_that_is_lost_and_is_back_is_reported_by_events(backend, there, listed, error):
    there.on("GET", JOBS, listed(1, job()), error(), error(), listed(5, job(version=5)), listed(6))
    there.watched(JOBS, [error()], [{"type": "ERROR", "object": {"code": 410}}])
    last = None
    for snapshot in backend.watch(JobRef("one", "team")):
        last = snapshot
    lost, back = last.events
    assert (lost["reason"], back["reason"]) == ("ConnectionLost", "ConnectionRestored")
    assert (lost["type"], back["type"]) == ("Warning", "Warning")
    assert "(connection reset); trying again" in lost["message"]
    assert lost["involvedObject"] == {"kind": "PyTorchJob", "name": "one", "uid": "uid-1"}
    assert lost["metadata"]["uid"] != back["metadata"]["uid"]


def test_a_job_that_was_recreated_while_nobody_watched_is_gone(backend, there, listed, error):
    there.on("GET", JOBS, listed(1, job()), listed(5, job(uid="uid-2", version=5)))
    there.watched(JOBS, [error()])
    snapshots = list(backend.watch(JobRef("one", "team")))
    assert {s.job.raw["metadata"]["uid"] for s in snapshots} == {"uid-1"}


def test_a_watch_without_the_right_to_read_events_says_so(backend, there, error, listed):
    there.on("GET", EVENTS, error(403, "Forbidden", "no"))
    first = next(backend.watch(JobRef("one", "team")))
    (notice,) = first.events
    assert notice["reason"] == "NotReadable"
    assert "events cannot be read" in notice["message"]


def test_a_watch_without_the_right_to_read_pods_is_an_error(backend, there, error):
    there.on("GET", PODS, error(403, "Forbidden", "no"))
    with pytest.raises(BackendError, match="cannot get pods in namespace team"):
        next(backend.watch(JobRef("one", "team")))


def test_a_watch_ends_when_it_is_requested_to(backend, there):
    begun, stop, seen = threading.Event(), threading.Event(), []

    def watch():
        for snapshot in backend.watch(JobRef("one", "team"), stop=stop):
            seen.append(snapshot)
            begun.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert begun.wait(60)
    time.sleep(0.3)
    stop.set()
    watcher.join(60)
    assert not watcher.is_alive()
    assert len(seen) == 1


# --- changing


def test_suspend_and_resume(backend, there):
    there.on("PATCH", ONE, job())
    for value in (True, False):
        backend.suspend(JobRef("one", "team"), value=value)
        _, _, _, body = there.asked[-1]
        assert body == {
            "metadata": {"uid": "uid-1"},
            "spec": {"runPolicy": {"suspend": value}},
        }


def test_a_job_is_resumed_when_the_last_of_its_old_pods_is_gone(backend, there, listed):
    suspended = job()
    suspended["spec"] = {"runPolicy": {"suspend": True}}
    there.on("GET", ONE, suspended).on("PATCH", ONE, job())
    there.on("GET", PODS, listed(1, pod("master", 0)), listed(2, pod("master", 0)), listed(3))
    backend.suspend(JobRef("one", "team"), value=False)
    assert [method for method, *_ in there.asked] == ["GET", "GET", "GET", "GET", "PATCH"]


@pytest.mark.parametrize(("value", "verb"), [(True, "suspended"), (False, "resumed")])
def test_a_job_that_is_being_deleted_is_not_suspended(backend, there, value, verb):
    doomed = job()
    doomed["metadata"]["deletionTimestamp"] = MADE
    there.on("GET", ONE, doomed)
    with pytest.raises(BackendError, match=f"is being deleted and cannot be {verb}"):
        backend.suspend(JobRef("one", "team"), value=value)
    assert there.of("PATCH") == []


def test_a_job_is_deleted_with_its_pods_and_no_other_one_is(backend, there, error):
    there.on("DELETE", ONE, {"kind": "Status"})
    backend.delete(JobRef("one", "team", "uid-1"))
    _, _, _, body = there.asked[-1]
    assert body["propagationPolicy"] == "Background"
    assert body["preconditions"] == {"uid": "uid-1"}
    there.on("DELETE", ONE, error(409, "Conflict", "the UID in the precondition is another"))
    with pytest.raises(JobNotFound):
        backend.delete(JobRef("one", "team", "uid-0"))
    there.on("DELETE", ONE)
    with pytest.raises(JobNotFound):
        backend.delete(JobRef("one", "team"))


def test_to_wait_until_a_jobs_pods_are_gone(backend, there, listed):
    mine, before = pod("master", 0), pod("worker", 0, owner="uid-0")
    there.on("GET", PODS, listed(1, mine, before), listed(2, mine), listed(3, before))
    backend.wait_for_pods(JobRef("one", "team", "uid-1"), 60)
    assert [method for method, *_ in there.asked] == ["GET", "GET", "GET"]
    there.on("GET", PODS, listed(1, mine))
    with pytest.raises(BackendError, match="have not ended after 0 s: one-master-0"):
        backend.wait_for_pods(JobRef("one", "team", "uid-1"), 0.1)


def test_the_pods_of_a_trainjob_that_took_the_name_are_not_waited_for(
    backend, script, listed, error
):
    mine = pod("master", 0)
    script.on("GET", PODS, listed(1, mine))
    newer = {"metadata": {"name": "one", "namespace": "team", "uid": "uid-2"}}
    script.on("GET", f"{TRAINJOBS}/one", error(404, "NotFound"), newer)
    backend.wait_for_pods(JobRef("one", "team", "uid-1", "TrainJob"), 60)
    assert [path for _, path, *_ in script.asked] == [PODS, f"{TRAINJOBS}/one"] * 2


# --- related


def template(**spec):
    return {"pytorchReplicaSpecs": {"Master": {"template": {"spec": spec}}}}


def test_what_lies_beside_a_job(backend, there, listed, error):
    volumes = [
        {"persistentVolumeClaim": {"claimName": "data"}},
        {"secret": {"secretName": "s3"}},
        {"secret": {"secretName": "maybe", "optional": True}},
        {"configMap": {"name": "settings"}},
        {"emptyDir": {}},
    ]
    env = [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "k"}}}]
    containers = [{"env": env, "envFrom": [{"configMapRef": {"name": "more"}}]}]
    owner = job()
    owner["spec"] = template(
        volumes=volumes, containers=containers, imagePullSecrets=[{"name": "pull"}]
    )
    claim = {"kind": "PersistentVolumeClaim", "metadata": {"name": "data"}}
    there.on("GET", ONE, owner).on("GET", PODS, listed(1, pod("master", 0)))
    there.on("GET", "/api/v1/nodes", listed(1, {"metadata": {"name": "n1"}}, kind="NodeList"))
    there.on("GET", "/api/v1/namespaces/team/persistentvolumeclaims/data", claim)
    secret = {"kind": "PartialObjectMetadata", "metadata": {"name": "s3"}}
    there.on("GET", "/api/v1/namespaces/team/secrets/s3", secret)
    there.on("GET", "/api/v1/namespaces/team/secrets/pull", error(403, "Forbidden", "no"))
    there.on("GET", "/api/v1/namespaces/team/resourcequotas", error(500, "", "oops"))
    there.on("GET", "/api/v1/namespaces/team", {"kind": "Namespace", "metadata": {"name": "team"}})
    found = backend.related(backend.snapshot(JobRef("one", "team")))
    told = {(item["kind"], item["metadata"]["name"]) for item in found if "metadata" in item}
    assert told == {
        ("Node", "n1"),
        ("PersistentVolumeClaim", "data"),
        ("Secret", "s3"),
        ("Namespace", "team"),
    }
    missing = {tuple(item["details"].values()) for item in found if item["kind"] == "Status"}
    assert missing == {("secrets", "wandb"), ("configmaps", "settings"), ("configmaps", "more")}
    assert all(item["reason"] == "NotFound" for item in found if item["kind"] == "Status")
    paths = [path for _, path, _, _ in there.asked]
    assert "/api/v1/namespaces/team/secrets/maybe" not in paths


def test_nodes_are_looked_at_by_name_once_all_pods_have_one(backend, there, listed):
    placed = pod("master", 0)
    placed["spec"]["nodeName"] = "n1"
    there.on("GET", PODS, listed(1, placed))
    found = backend.related(backend.snapshot(JobRef("one", "team")))
    details = [item["details"] for item in found if item["kind"] == "Status"]
    assert details == [{"kind": "nodes", "name": "n1"}], "the node is gone"


def test_the_last_lines_of_an_init_container_that_fails(backend, there, listed):
    """Of one Pod: the others' say the same. While it runs again, what it wrote before counts."""
    failed, fine = ({"state": {"terminated": {"exitCode": code}}} for code in (1, 0))
    again = {"state": {"running": {}}, "lastState": failed["state"]}
    pods = [pod("master", 0), pod("worker", 0)]
    for one, fetch in zip(pods, (again, failed), strict=True):
        statuses = [{"name": "unpack", **fine}, {"name": "fetch", **fetch}]
        one["status"] = {"initContainerStatuses": statuses}
    there.on("GET", PODS, listed(1, *pods))
    there.watched(f"{PODS}/one-master-0/log", [b"cloning\n", b"fatal: \xff\n"])
    found = backend.related(backend.snapshot(JobRef("one", "team")))
    (output,) = [one for one in found if one["kind"] == "ContainerOutput"]
    assert (output["container"], output["lines"]) == ("fetch", ["cloning", "fatal: \ufffd"])
    (query,) = there.of("WATCH")
    assert (query["container"], query["previous"]) == ("fetch", "true")


def asked_of_kueue(backend, there):
    there.asked.clear()
    backend.related(backend.snapshot(JobRef("one", "team")))
    return [(path, query) for _, path, query, _ in there.asked if "kueue.x-k8s.io" in path]


def test_what_is_read_of_a_queue(backend, there, listed, error):
    owner = job()
    owner["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "research"}
    there.on("GET", ONE, owner).on("GET", PODS, listed(1))
    owner["spec"]["runPolicy"] = {"suspend": False}
    (workload,) = asked_of_kueue(backend, there)  # which tells of runs before a suspension
    assert workload[1]["labelSelector"] == "kueue.x-k8s.io/job-uid=uid-1"
    owner["spec"]["runPolicy"] = {"suspend": True}
    own, other = ({"metadata": {"name": name, "uid": name}} for name in ("own", "other"))
    queues = [
        {"metadata": {"name": name, "uid": name}, "spec": {"cohortName": cohort}}
        for name, cohort in (("all", "c"), ("more", "c"), ("else", "d"))
    ]
    everywhere = "/apis/kueue.x-k8s.io/v1beta2"
    here, all_queues = f"{everywhere}/namespaces/team", f"{everywhere}/clusterqueues"
    place = "/apis/visibility.kueue.x-k8s.io/v1beta2/namespaces/team/localqueues/research"
    place += "/pendingworkloads"
    local = {"kind": "LocalQueue", "metadata": {}, "spec": {"clusterQueue": "all"}}
    there.on("GET", f"{here}/localqueues/research", local)
    there.on("GET", f"{here}/workloads", listed(1, own, kind="WorkloadList"))
    there.on("GET", f"{all_queues}/all", {"kind": "ClusterQueue", **queues[0]})
    there.on("GET", all_queues, listed(1, *queues, kind="ClusterQueueList"))
    there.on("GET", f"{everywhere}/workloads", listed(1, other, kind="WorkloadList"))
    there.on("GET", place, {"metadata": {}, "items": [{"positionInClusterQueue": 4}]})
    asked = asked_of_kueue(backend, there)
    assert len(asked) == 6
    assert asked[4][1]["fieldSelector"] == "status.admission.clusterQueue!="
    found = backend.related(backend.snapshot(JobRef("one", "team")))
    names = {(one["kind"], one["metadata"].get("name")) for one in found if "metadata" in one}
    assert names - {("Namespace", "team")} >= {
        ("ClusterQueue", "all"),
        ("ClusterQueue", "more"),
        ("Workload", "own"),
        ("Workload", "other"),
        ("PendingWorkloadsSummary", None),
    }
    assert ("ClusterQueue", "else") not in names
    there.on("GET", f"{everywhere}/workloads", error(403, "Forbidden", "no"))
    there.on("GET", place, error(404, "NotFound", "no"))
    listings = [query for path, query in asked_of_kueue(backend, there) if path.startswith(here)]
    assert [query.get("fieldSelector") for query in listings] == [
        None,
        None,
        "status.admission.clusterQueue!=",
        "status.admission.clusterQueue=",
    ]


@pytest.mark.parametrize("note", ["the server could not find the requested resource", "not found"])
def test_what_is_not_there_of_kueue(backend, there, listed, error, note):
    owner = job()
    owner["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "research"}
    there.on("GET", ONE, owner).on("GET", PODS, listed(1))
    owner["spec"]["runPolicy"] = {"suspend": True}
    kueue = "/apis/kueue.x-k8s.io/v1beta2/namespaces/team"
    there.on("GET", f"{kueue}/localqueues/research", error(404, "NotFound", note))
    there.on("GET", f"{kueue}/workloads", listed(1))
    found = backend.related(backend.snapshot(JobRef("one", "team")))
    missing = {tuple(item["details"].values()) for item in found if item["kind"] == "Status"}
    queue = ("localqueues", "research" if note == "not found" else "")
    assert missing == {queue, ("workloads", "")}
    owner["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] = "urgent"
    classes = "/apis/kueue.x-k8s.io/v1beta2/workloadpriorityclasses"
    there.on("GET", f"{classes}/urgent", error(404, "NotFound", "not found"))
    found = backend.related(backend.snapshot(JobRef("one", "team")))
    missing = {tuple(item["details"].values()) for item in found if item["kind"] == "Status"}
    assert missing == {queue, ("workloads", ""), ("workloadpriorityclasses", "urgent")}
    there.on("GET", f"{kueue}/workloads", error(403, "Forbidden", "no"))
    found = backend.related(backend.snapshot(JobRef("one", "team")))
    missing = {tuple(item["details"].values()) for item in found if item["kind"] == "Status"}
    assert missing == {queue}


@pytest.mark.parametrize("owners", [[], [{"kind": "CronJob", "name": "c", "controller": True}]])
def test_an_object_that_is_no_training_job_is_named(backend, script, owners):
    """The name was said to be that of no job, and kubectl shows one."""
    meta = {"name": "plain", "namespace": "team", "uid": "p", "ownerReferences": owners}
    spec = {"completionMode": "Indexed"} if owners else {}
    script.on("GET", f"{BATCH}/plain", {"metadata": meta, "spec": spec, "status": {}})
    with pytest.raises(JobNotFound, match=r"team/plain is a Job, but no training job: .* indexes"):
        backend.find("plain")
    with pytest.raises(JobNotFound, match="no job 'other' in namespace team"):
        backend.find("other")
