"""submit(): what becomes of a job.yaml in a cluster, over a transport to one in memory."""

import copy

import pytest
from apiserver import Apiserver
from clusters import status

from k8sjob.backends.cluster.backend import ClusterBackend
from k8sjob.backends.record import RecordBackend, Records
from k8sjob.contract import Role
from k8sjob.errors import BackendError, ImageError, JobExists, SpecError
from k8sjob.jobs.plan import plan_submission, warnings
from k8sjob.jobs.submit import (
    Outcome,
    _check_architecture,
    for_namespace,
    push_code,
    submit_plan,
)
from k8sjob.kube.objects import MANIFEST_DIGEST
from k8sjob.python_api import submit
from k8sjob.spec import JobSpec

DIGEST = "team/tiny@sha256:" + "a" * 64
SPEC = JobSpec(name="tiny", image=DIGEST, run={"script": "main.py"}, replicas={"workers": 1})
OTHER = SPEC.with_(run={"script": "other.py"})
BUILT = {"repository": "registry.example/team/x", "base": "pytorch/pytorch:2"}


@pytest.fixture
def api():
    return Apiserver()


@pytest.fixture
def backend(api):
    return ClusterBackend(api)


def sent(spec, backend, **options):
    return submit_plan(plan_submission(spec), backend, **options)


def stored(api, name="tiny"):
    return api.jobs["blue", name]


def test_a_job_is_made_by_one_post_after_a_strict_look(api, backend):
    done = sent(SPEC, backend)
    assert (str(done.ref), done.ref.uid, done.outcome) == ("blue/tiny", "uid-2", Outcome.CREATED)
    assert [word for word in api.words if word != "GET"] == ["POST dry", "POST"]
    assert stored(api)["spec"]["pytorchReplicaSpecs"].keys() == set(Role)


IDS = {"openshift.io/sa.scc.uid-range": "1000750000/10000"}


@pytest.mark.parametrize(
    ("annotations", "security", "group"),
    [(IDS, None, None), (IDS, "default", 1000), ({}, None, 1000), (IDS, "restricted", 1000)],
)
def test_a_namespace_of_openshift_chooses_the_ids(api, backend, annotations, security, group):
    api.annotations = annotations
    spec = SPEC.with_(image=BUILT, security=security)
    submit(spec, image=DIGEST, backend=backend)
    pod = stored(api)["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    assert pod["securityContext"].get("fsGroup") == group


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"host_network": True}, "host_network"),
        ({"pod_template": {"spec": {"hostPID": True}}}, "pod_template.spec.hostPID"),
    ],
)
def test_a_job_that_no_namespace_of_openshift_admits(api, backend, change, field):
    api.annotations = IDS
    with pytest.raises(SpecError, match="security: openshift") as raised:
        submit(SPEC.with_(**change), backend=backend)
    assert {finding.field for finding in raised.value.findings} == {field}
    assert not api.words


def test_a_namespace_that_may_not_be_read_changes_nothing_and_one_that_fails_does(api, backend):
    api.refusals[""] = 403
    assert for_namespace(plan_submission(SPEC), backend).spec == SPEC
    api.refusals[""] = 503
    later = ClusterBackend(api)
    with pytest.raises(BackendError):
        for_namespace(plan_submission(SPEC), later)
    del api.refusals[""]
    assert for_namespace(plan_submission(SPEC), later).spec == SPEC


def test_the_same_job_is_another_one_with_another_image(api, backend):
    sent(SPEC, backend)
    with pytest.raises(JobExists) as raised:
        submit_plan(plan_submission(SPEC, image=DIGEST.replace("aaaa", "bbbb")), backend)
    assert any(line.lstrip("+ ").startswith("image: ") for line in raised.value.difference)


@pytest.mark.parametrize("condition", ["Succeeded", "Failed"])
def test_a_job_that_has_ended_is_not_attached_to(condition, api, backend):
    sent(SPEC, backend)
    api.end("blue", "tiny", condition)
    with pytest.raises(JobExists, match=rf"this job, ended \({condition}\); replace it") as raised:
        sent(SPEC, backend)
    assert raised.value.difference == ()


def test_a_job_of_others_is_never_taken_for_ones_own(api, backend):
    sent(OTHER, backend)
    del stored(api)["metadata"]["annotations"]
    del stored(api)["metadata"]["labels"]
    with pytest.raises(JobExists, match="a different job, not created by k8sjob, Cre"):
        sent(SPEC, backend)
    assert sent(SPEC, backend, replace=True).outcome is Outcome.REPLACED


def test_a_manifest_without_a_hash_is_compared_by_what_it_says(api, backend):
    bare = SPEC.with_(overlay={"metadata": {"annotations": {MANIFEST_DIGEST: None}}})
    sent(bare, backend)
    assert MANIFEST_DIGEST not in (stored(api)["metadata"].get("annotations") or {})
    assert sent(bare, backend).outcome is Outcome.ATTACHED
    with pytest.raises(JobExists):
        sent(bare.with_(run={"script": "other.py"}), backend)


def test_replace_deletes_that_job_waits_and_recreates_it(api, backend):
    first = sent(SPEC, backend)
    owner = {"uid": first.ref.uid}
    api.pods = [{"metadata": {"name": "tiny-master-0", "uid": "p", "ownerReferences": [owner]}}]
    api.lingers, messages = 4, []
    done = sent(OTHER, backend, replace=True, report=messages.append)
    assert api.pods == [], "the new job is made when the old one's pods are gone"
    assert (done.ref.name, done.outcome) == ("tiny", Outcome.REPLACED)
    assert done.ref.uid == stored(api)["metadata"]["uid"] != first.ref.uid
    assert messages[0].startswith("waiting until blue/tiny and its pods are gone, at most 120 s")


@pytest.mark.parametrize("condition", ["Failed", "Running"])
def test_of_a_replaced_job_that_had_ended_a_record_is_kept(
    condition, api, backend, tmp_path, monkeypatch
):
    monkeypatch.setenv("K8SJOB_STATE", str(tmp_path))
    first = sent(SPEC, backend)
    api.end("blue", "tiny", condition)
    assert sent(OTHER, backend, replace=True).outcome is Outcome.REPLACED
    kept = Records().find("tiny", "blue")
    assert (kept is not None) == (condition == "Failed")
    if kept:
        assert RecordBackend(kept).find("tiny").uid == first.ref.uid


def test_nothing_is_made_or_deleted_where_the_new_job_would_be_refused(api, backend):
    wrong = SPEC.with_(overlay={"spec": {"runPolicy": {"wrong": 1}}})
    with pytest.raises(BackendError, match="unknown field"):
        sent(wrong, backend)
    assert "POST" not in api.words
    first = sent(SPEC, backend, replace=True)
    assert first.outcome is Outcome.CREATED
    with pytest.raises(BackendError, match="unknown field"):
        sent(wrong, backend, replace=True)
    assert stored(api)["metadata"]["uid"] == first.ref.uid


def test_a_job_that_goes_is_waited_for(api, backend):
    sent(OTHER, backend)
    stored(api)["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    api.lingers = 8
    assert sent(SPEC, backend).outcome is Outcome.CREATED
    assert api.lingers < 0


def meanwhile(api, word, act):
    """Something happens just before the first such request."""

    def before(now):
        if now == word:
            api.before = lambda _: None
            act()

    api.before = before


def test_of_two_who_submit_the_same_at_once_one_attaches(api, backend):
    meanwhile(api, "POST", lambda: sent(SPEC, backend))
    assert sent(SPEC, backend).outcome is Outcome.ATTACHED
    assert len(api.jobs) == 1


def test_of_two_who_submit_different_jobs_at_once_one_is_refused(api, backend):
    meanwhile(api, "POST", lambda: sent(OTHER, backend))
    with pytest.raises(JobExists):
        sent(SPEC, backend)
    assert "other.py" in str(stored(api))


def test_a_job_that_comes_while_one_is_replaced_is_not_deleted(api, backend):
    sent(SPEC, backend)
    meanwhile(api, "DELETE", lambda: sent(OTHER, backend, replace=True))  # somebody was faster
    with pytest.raises(JobExists):
        sent(SPEC.with_(run={"script": "third.py"}), backend, replace=True)
    assert "other.py" in str(stored(api))


def test_a_job_that_goes_before_it_is_looked_at_makes_room(api, backend):
    sent(OTHER, backend)
    meanwhile(api, "GET", api.jobs.clear)
    assert sent(SPEC, backend).outcome is Outcome.CREATED


def test_names_that_come_and_go_end_in_an_error(api, backend):
    def before(now):
        if now == "GET":
            api.jobs.clear()
        if now == "POST dry":
            return status(409, "AlreadyExists", 'pytorchjobs.kubeflow.org "tiny" already exists')
        return None

    api.before = before
    with pytest.raises(BackendError, match="appear and disappear too fast"):
        sent(SPEC, backend)


def test_a_dry_run_says_what_would_happen_and_changes_nothing(api, backend):
    dry = sent(SPEC, backend, dry_run=True)
    assert (str(dry.ref), dry.ref.uid, dry.outcome) == ("blue/tiny", "", Outcome.CREATED)
    assert api.jobs == {}
    sent(SPEC, backend)
    before = copy.deepcopy(api.jobs)
    assert sent(SPEC, backend, dry_run=True).outcome is Outcome.ATTACHED
    with pytest.raises(JobExists):
        sent(OTHER, backend, dry_run=True)
    assert sent(OTHER, backend, dry_run=True, replace=True).outcome is Outcome.REPLACED
    assert api.jobs == before
    assert "DELETE" not in api.words


@pytest.mark.parametrize(
    ("fields", "options", "detail"),
    [
        ({"namespace": "a"}, {"namespace": "b"}, r"the spec says 'a', and 'b' is requested"),
        ({"namespace": "local"}, {}, r"'local' stands for this machine"),
        ({}, {"namespace": "local"}, r"'local' stands for this machine"),
        (
            {"name": "n" * 49},
            {"generate_name": True},
            rf"'{'n' * 49}' has 49 characters, and a generated .* adds 6; shorten it to at most 48",
        ),
        ({}, {"image": "a b"}, r"'a b' is not an image reference"),
        ({}, {"image": ""}, r"'' is not an image reference"),
    ],
)
def test_what_cannot_be_submitted_is_reported_before_a_request_to_the_cluster(
    fields, options, detail
):
    spec = JobSpec(**{"name": "tiny", "image": DIGEST, "run": {"script": "main.py"}} | fields)
    with pytest.raises(SpecError, match=detail):
        plan_submission(spec, **options)


def test_nothing_is_built_before_the_cluster_would_take_the_job(backend, api, tmp_path):
    there = {"repository": "127.0.0.1:9/x", "base": "127.0.0.1:9/base"}
    spec, built = SPEC.with_(image=there), []
    (tmp_path / "main.py").write_text("")
    made = plan_submission(spec, tmp_path)

    def push(**options):
        push_code(spec, made, backend, build=lambda *what: built.append(what), **options)

    api.before = lambda _word: status(403, "Forbidden", "no")
    with pytest.raises(BackendError, match="forbidden: no"):
        push()
    api.before = lambda _word: None
    with pytest.raises(ImageError, match=r"127\.0\.0\.1:9"):
        push(dry_run=True)
    assert built == []
    with pytest.raises(ImageError, match=r"127\.0\.0\.1:9"):
        push()
    assert built == [(spec, tmp_path)]


def nodes(*architectures):
    labels = [{"kubernetes.io/arch": architecture} for architecture in architectures]
    return [{"metadata": {"name": "n", "labels": each}} for each in labels]


@pytest.mark.parametrize(
    ("kinds", "changes"),
    [
        (None, {}),
        ((), {}),
        (("arm64",), {}),
        (("amd64", "arm64"), {}),
        # None is there yet that offers the device, or of the kind that pods are to be put on.
        (("amd64",), {"resources": {"gpus": 1}}),
        (("amd64",), {"image": {"repository": "a/b", "base": "c", "platform": "linux/arm64"}}),
    ],
)
def test_an_image_that_some_node_runs_or_may_run_later(api, backend, kinds, changes):
    api.nodes = kinds if kinds is None else nodes(*kinds)
    _check_architecture(SPEC.with_(**changes), "linux/arm64/v8", backend)


def test_an_image_that_no_node_runs_is_refused(api, backend):
    api.nodes = nodes("amd64", "amd64")
    spec = SPEC.with_(node_selector={"pool": "train", "zone": "a"})
    with pytest.raises(BackendError, match=r"is for linux/arm64, and the nodes .* are for amd64;"):
        _check_architecture(spec, "linux/arm64", backend)
    assert [query["labelSelector"] for *_, query, _ in api.asked] == ["pool=train,zone=a"]


def test_a_name_that_may_move_is_worth_a_remark():
    assert warnings(plan_submission(SPEC)) == []
    built = SPEC.with_(image=BUILT)
    assert warnings(plan_submission(built)) == [], "it gets its digest when it is made"
    assert len(warnings(plan_submission(built, image="team/tiny:1"))) == 1
    moves, lacks = warnings(plan_submission(SPEC.with_(image="team/tiny:1")))
    assert moves.startswith("the image team/tiny:1 has no digest")
    assert "must contain k8sjob's runtime" in lacks
    command = SPEC.with_(image="team/tiny:1", run={"script": None, "command": ["torchrun"]})
    assert len(warnings(plan_submission(command))) == 1


def test_one_call_from_a_file(tmp_path, backend, api):
    (tmp_path / "job.yaml").write_text(SPEC.to_yaml())
    ref = submit(tmp_path, backend=backend)
    assert submit(str(tmp_path / "job.yaml"), backend=backend) == ref
    assert submit(SPEC, backend=backend) == ref
    assert submit(OTHER, backend=backend, replace=True).uid != ref.uid
    assert submit(SPEC, backend=backend, generate_name=True).name.startswith("tiny-")
    assert submit(SPEC.with_(name="dry"), backend=backend, dry_run="server").uid == ""
    assert ("blue", "dry") not in api.jobs
    with pytest.raises(SpecError, match="the spec says 'red', and 'blue' is requested"):
        submit(SPEC.with_(namespace="red"), backend=backend)


@pytest.mark.parametrize(
    ("word", "going", "detail"),
    [
        ("DELETE", False, "may be deleted by now"),
        ("GET", False, "is being deleted"),
        ("GET", True, "was already being deleted"),
    ],
)
def test_an_interrupt_while_a_job_is_replaced_says_what_was_done(word, going, detail, api, backend):
    sent(SPEC, backend)
    if going:
        stored(api)["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        api.lingers = 99

    def before(now):
        if now == word and (word == "DELETE" or "DELETE" in api.words):
            raise KeyboardInterrupt

    api.before, messages = before, []
    with pytest.raises(KeyboardInterrupt):
        sent(OTHER, backend, replace=True, report=messages.append)
    assert messages[-1] == f"blue/tiny {detail}, and the new one was not created; submit it again"


def test_of_two_who_replace_at_once_the_one_that_deleted_says_so(api, backend):
    sent(OTHER, backend)
    meanwhile(api, "DELETE", lambda: meanwhile(api, "POST dry", lambda: sent(SPEC, backend)))
    assert sent(SPEC, backend, replace=True).outcome is Outcome.REPLACED
    assert len(api.jobs) == 1


def test_who_replaces_what_somebody_else_has_replaced_has_changed_nothing(api, backend):
    sent(OTHER, backend)
    meanwhile(api, "DELETE", lambda: sent(SPEC, backend, replace=True))
    assert sent(SPEC, backend, replace=True).outcome is Outcome.ATTACHED


def test_the_same_job_that_somebody_has_changed_is_attached_to_and_reported(api, backend):
    sent(SPEC, backend)
    stored(api)["spec"]["runPolicy"]["backoffLimit"] = 77
    lines = []
    assert sent(SPEC, backend, report=lines.append).outcome is Outcome.ATTACHED
    assert lines == ["blue/tiny has changed since it was created, in spec.runPolicy.backoffLimit"]


def test_a_dry_run_beside_a_job_that_goes_says_that_it_would_wait(api, backend):
    sent(OTHER, backend)
    stored(api)["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    api.lingers, messages = 99, []
    dry = sent(SPEC, backend, dry_run=True, report=messages.append)
    assert (dry.ref.uid, dry.outcome) == ("", Outcome.CREATED)
    assert messages == ["blue/tiny is being deleted; submit would wait until it is gone"]
    assert "DELETE" not in api.words
