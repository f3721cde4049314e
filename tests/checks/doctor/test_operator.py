import pytest

from k8sjob.checks.doctor import gather
from k8sjob.checks.doctor.check import Verdict
from k8sjob.checks.doctor.operator import crd, dry_run, init_image, init_wait, operator, webhook
from k8sjob.kube.client.transport import ApiError
from k8sjob.targets.jobs import by_name

WEBHOOK = "validator.pytorchjob.training-operator.kubeflow.org"
API = "/apis/kubeflow.org/v1"
DEPLOYMENTS = "/apis/apps/v1/deployments"
WORKERS = "/api/v1/namespaces/team/pods"
WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
DOWN = ApiError(
    f'failed calling webhook "{WEBHOOK}": connect: connection refused',
    code=500,
    reason="InternalError",
)


def the(checks):
    [check] = checks
    return check


def jobs(good, bad):
    """What the apiserver answers to the two dry runs."""
    return {"pytorchjobs": lambda body: bad if body["metadata"]["name"][0] == "0" else good}


def deployment(*args, ready=1, command=()):
    container = {"image": "registry.example/operator:v1.9.4", "args": args, "command": command}
    return {
        "metadata": {"name": "training-operator", "namespace": "kubeflow"},
        "spec": {"replicas": 1, "template": {"spec": {"containers": [container]}}},
        "status": {"readyReplicas": ready} if ready else {},
    }


# --- the API --------------------------------------------------------------------------------------


def test_the_api_is_served(facts):
    assert the(crd(facts())).verdict is Verdict.OK
    both = the(crd(facts({"/apis/trainer.kubeflow.org": {"kind": "APIGroup"}})))
    assert both.verdict is Verdict.OK
    assert "Trainer 2 is there too" in both.seen


def test_no_operator_at_all(facts):
    check = the(crd(facts({API: None})))
    assert check.verdict is Verdict.PROBLEM
    assert "the CRD of the training operator is not installed" in check.seen


def test_a_group_without_pytorchjobs_is_no_operator(facts):
    assert the(crd(facts({API: {"resources": [{"name": "tfjobs"}]}}))).verdict is Verdict.PROBLEM


def test_trainer_2_alone_is_told(facts):
    check = the(crd(facts({API: None, "/apis/trainer.kubeflow.org": {"kind": "APIGroup"}})))
    assert check.verdict is Verdict.PROBLEM
    assert "Kubeflow Trainer 2 alone" in check.seen


def test_an_api_that_cannot_be_looked_at_is_not_a_missing_one(facts):
    check = the(crd(facts({API: ApiError("service unavailable", code=503)})))
    assert check.verdict is Verdict.PROBLEM
    assert "service unavailable" in check.seen


# --- the webhook ----------------------------------------------------------------------------------


def test_the_webhook_refuses_a_bad_job(facts):
    check = the(webhook(facts()))
    assert (check.verdict, check.seen) == (
        Verdict.OK,
        f"answers: {WEBHOOK} refused a bad job",
    )


def test_a_webhook_that_is_down(facts):
    check = the(webhook(facts(jobs(DOWN, DOWN))))
    assert check.verdict is Verdict.PROBLEM
    assert "connection refused" in check.seen


@pytest.mark.parametrize(
    ("configurations", "said"),
    [
        (None, "its version has none"),
        ([], "no ValidatingWebhookConfiguration"),
        ([{"webhooks": [{"name": "other"}]}], "no ValidatingWebhookConfiguration"),
        (
            [{"webhooks": [{"name": WEBHOOK, "failurePolicy": "Ignore"}]}],
            "registered (failurePolicy Ignore) and did not act",
        ),
    ],
)
def test_a_webhook_that_does_not_act(configurations, said, facts, refused):
    answers = jobs({"kind": "PyTorchJob"}, {"kind": "PyTorchJob"})
    answers[WEBHOOKS] = refused if configurations is None else {"items": configurations}
    check = the(webhook(facts(answers)))
    assert check.verdict is Verdict.WARNING
    assert said in check.seen


def test_what_was_refused_for_another_reason_tells_nothing(facts, refused):
    check = the(webhook(facts(jobs(refused, refused))))
    assert check.verdict is Verdict.UNKNOWN
    other = ApiError('admission webhook "policy.example" denied the request: no', code=403)
    assert the(webhook(facts(jobs(other, other)))).verdict is Verdict.UNKNOWN


def test_without_the_api_there_is_no_webhook_to_speak_of(facts):
    assert list(webhook(facts({"pytorchjobs": None}))) == []


def test_the_controller_of_another_kind(cluster):
    def asked(**answers):
        cluster.answers |= answers
        found = gather(cluster, "team", target=by_name("jobset"))
        return [one for check in (crd, webhook, operator) for one in check(found)]

    assert (
        asked()[0].seen == "JobSet is not served: the CRD of the JobSet controller is not installed"
    )
    said = 'admission webhook "vjobset.kb.io" denied the request: no'
    served = {"/apis/jobset.x-k8s.io/v1alpha2": {"resources": [{"name": "jobsets"}]}}
    found = asked(**served, jobsets=ApiError(said, code=422), **{DEPLOYMENTS: {"items": []}})
    assert [check.verdict for check in found] == [Verdict.OK] * 3
    assert found[1].seen == "answers: vjobset.kb.io refused a bad job"
    assert list(init_image(gather(cluster, "team", target=by_name("jobset")))) == []


# --- the dry run ----------------------------------------------------------------------------------


def test_a_job_that_is_accepted(facts, make_job):
    assert the(dry_run(facts())).seen == "a minimal job is accepted in team; nothing was made"
    assert the(dry_run(facts(job=make_job()))).seen.startswith("the job is accepted")


def test_a_job_that_is_there_already(facts, make_job):
    error = ApiError('pytorchjobs "digits" already exists', code=409, reason="AlreadyExists")
    check = the(dry_run(facts({"pytorchjobs": error}, job=make_job())))
    assert check.verdict is Verdict.WARNING


@pytest.mark.parametrize(
    ("error", "seen", "step"),
    [
        (DOWN, "connection refused", "the check of the webhook"),
        (
            ApiError('admission webhook "p.example" denied the request: no', code=403),
            "p.example",
            "owner of that policy",
        ),
        (
            ApiError(f'admission webhook "{WEBHOOK}" denied the request: no', code=403),
            "no",
            "correct the job",
        ),
        (ApiError("User cannot create", code=403), "cannot create", "the permissions"),
        (
            ApiError("is invalid", code=422, causes=[("spec.nprocPerNode", "must be a string")]),
            "spec.nprocPerNode: must be a string",
            "correct the job",
        ),
    ],
)
def test_a_job_that_is_refused(error, seen, step, facts, make_job):
    check = the(dry_run(facts({"pytorchjobs": error}, job=make_job())))
    assert check.verdict is Verdict.PROBLEM
    assert seen in check.seen
    assert step in check.next_step


# --- the operator itself --------------------------------------------------------------------------


def test_the_deployment_and_its_image(facts):
    check = the(operator(facts({DEPLOYMENTS: {"items": [deployment()]}})))
    assert check.verdict is Verdict.OK
    assert "1 of 1 ready, image registry.example/operator:v1.9.4" in check.seen


def test_a_deployment_that_is_not_ready(facts):
    check = the(operator(facts({DEPLOYMENTS: {"items": [deployment(ready=0)]}})))
    assert check.verdict is Verdict.PROBLEM
    assert "0 of 1 ready" in check.seen
    assert "kubectl -n kubeflow describe pods" in check.next_step


def test_where_not_all_may_be_read_its_usual_namespace_is_enough(facts, refused):
    own = "/apis/apps/v1/namespaces/kubeflow/deployments"
    check = the(operator(facts({DEPLOYMENTS: refused, own: {"items": [deployment()]}})))
    assert check.verdict is Verdict.OK


@pytest.mark.parametrize("deployments", [None, {"items": []}])
def test_an_operator_that_is_not_seen_is_known_by_its_webhook(deployments, facts, refused):
    answers = {DEPLOYMENTS: deployments or refused}
    assert the(operator(facts(answers))).verdict is Verdict.OK
    answers |= jobs({"kind": "PyTorchJob"}, {"kind": "PyTorchJob"})
    assert the(operator(facts(answers))).verdict is Verdict.UNKNOWN


# --- the init container ---------------------------------------------------------------------------


def worker(image="mirror.example/alpine:3.10", *, node="n1", **status):
    return {
        "spec": {"nodeName": node, "initContainers": [{"name": "init-pytorch", "image": image}]},
        "status": {"initContainerStatuses": [{"name": "init-pytorch", **status}]},
    }


def test_the_default_is_told_with_its_step(facts):
    check = the(init_image(facts()))
    assert check.verdict is Verdict.OK
    assert "alpine:3.10 (the operator's default, if it was given no other), which" in check.seen
    assert "--pytorch-init-container-image=IMAGE" in check.next_step


@pytest.mark.parametrize(
    "words",
    [
        {"args": ["--pytorch-init-container-image=mirror.example/busybox:1"]},
        {"args": ["--pytorch-init-container-image", "mirror.example/busybox:1"]},
        {"command": ["/manager", "--pytorch-init-container-image=mirror.example/busybox:1"]},
    ],
)
def test_the_operators_flag_names_it(words, facts):
    found = deployment(*words.get("args", ()), command=words.get("command", ()))
    check = the(init_image(facts({DEPLOYMENTS: {"items": [found]}})))
    assert "a container of mirror.example/busybox:1, which" in check.seen


def test_pods_that_were_seen_show_it(facts):
    pods = [worker(node=f"n{i}", imageID="sha256:1") for i in (2, 1)]
    check = the(init_image(facts({WORKERS: {"items": pods}})))
    assert (check.verdict, check.next_step) == (Verdict.OK, "")
    assert check.seen.endswith("mirror.example/alpine:3.10; pulled on 2 nodes, as n1")


def test_an_image_that_a_node_cannot_pull(facts):
    pods = [worker(imageID=""), worker(state={"waiting": {"reason": "ImagePullBackOff"}})]
    check = the(init_image(facts({WORKERS: {"items": pods}})))
    assert check.verdict is Verdict.PROBLEM
    assert check.seen == "mirror.example/alpine:3.10: ImagePullBackOff on node n1"


OPERATORS_OWN = "for i in $(seq 100); do if nslookup m; then err=0 && break; fi; sleep 2; done"


@pytest.mark.parametrize("command", [["sh", "-c", OPERATORS_OWN], ["sh", "-c", "sleep 1.5"]])
def test_seconds_that_workers_sleep_in_vain_are_told(command, facts):
    pod = worker(imageID="sha256:1")
    pod["spec"]["initContainers"][0]["command"] = command
    check = the(init_wait(facts({WORKERS: {"items": [worker(), pod]}})))
    assert check.verdict is Verdict.OK
    assert check.seen.startswith(f"workers sleep {'2' if 'err' in command[-1] else '1.5'} s after")
    assert "asks more often" in check.next_step


@pytest.mark.parametrize("command", [None, [], ["sh", "-c", "sleep 0.2; sleep $s"], [2]])
def test_an_init_container_that_is_quick_is_not_told(command, facts):
    pod = worker()
    pod["spec"]["initContainers"][0]["command"] = command
    assert list(init_wait(facts({WORKERS: {"items": [pod]}}))) == []
    assert list(init_wait(facts())) == []


def test_without_an_operator_there_is_no_init_container(facts):
    assert list(init_image(facts({API: None}))) == []
