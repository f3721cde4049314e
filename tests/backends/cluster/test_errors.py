"""The server's refusals and their explanations."""

import pytest

from k8sjob.errors import BackendError
from k8sjob.kube.api_resources import ResourcePath, path
from k8sjob.kube.client.answers import CheckedAnswers
from k8sjob.kube.client.errors import ExplainedErrors, explained
from k8sjob.kube.client.transport import ApiError
from k8sjob.targets.jobs import TARGETS, job_path
from k8sjob.targets.object_types import typed_object

CONTROLLERS = {ResourcePath.of(job_path(t)).plural: t.controller for t in TARGETS}
JOBS = "/apis/kubeflow.org/v1/namespaces/team/pytorchjobs"

WEBHOOK = (
    'admission webhook "validator.pytorchjob.training-operator.kubeflow.org" denied the request: '
)
DOWN = (
    "Internal error occurred: failed calling webhook"
    ' "validator.pytorchjob.training-operator.kubeflow.org": failed to call webhook: Post'
    ' "https://training-operator.kubeflow.svc:443/validate?timeout=10s": dial tcp 10.96.0.20:443:'
    " connect: connection refused"
)
RIGHT = (
    'pytorchjobs.kubeflow.org is forbidden: User "ada" cannot create resource "pytorchjobs" in API'
    ' group "kubeflow.org" in the namespace "team"'
)
EVERYWHERE = (
    'pytorchjobs.kubeflow.org is forbidden: User "ada" cannot list resource "pytorchjobs" in API'
    ' group "kubeflow.org" at the cluster scope'
)
STRICT = (
    'PyTorchJob in version "v1" cannot be handled as a PyTorchJob: strict decoding error: '
    'unknown field "spec.runPolcy", unknown field "spec.x"'
)
QUOTA = (
    'pods "j" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=8, used: 4,'
    " limited: 8"
)


@pytest.mark.parametrize(
    ("code", "reason", "detail", "words"),
    [
        (404, "NotFound", "the server could not find the requested resource", "is not installed"),
        (404, "", "404 page not found", "is not installed"),
        (404, "NotFound", 'namespaces "team" not found', "kubectl create namespace team"),
        (404, "NotFound", 'namespaces "a;b" not found', "kubectl create namespace 'a;b'"),
        (
            403,
            "Forbidden",
            RIGHT,
            "ada cannot create pytorchjobs in namespace team; `k8sjob doctor -n team`",
        ),
        (403, "Forbidden", RIGHT, "manifests/rbac"),
        (403, "Forbidden", RIGHT.replace("ada", "system:anonymous"), "has no credentials"),
        (403, "Forbidden", WEBHOOK + "spec.x: Forbidden: no", "refuses the job: spec.x: Forbidden"),
        (
            403,
            "Forbidden",
            WEBHOOK + "[spec.x: no, spec.y: a, b]",
            "\n  spec.x: no\n  spec.y: a, b",
        ),
        (403, "Forbidden", WEBHOOK + "a, unknown field b", "refuses the job: a, unknown field b"),
        (403, "Forbidden", WEBHOOK.replace("training-", "x"), "the webhook validator.pytorchjob.x"),
        (403, "Forbidden", QUOTA, "quota of namespace team is used up: gpus, requested"),
        (403, "Forbidden", "x because it is being terminated", "team is being deleted"),
        (403, "Forbidden", "for reasons", "cannot create pytorchjobs in namespace team: forbidden"),
        (400, "BadRequest", STRICT, '\n  unknown field "spec.runPolcy"\n  unknown field "spec.x"'),
        (400, "BadRequest", "no", "the server returned 400: no"),
        (
            409,
            "AlreadyExists",
            'a "one" already exists',
            "a job 'one' already exists in namespace team",
        ),
        (409, "Conflict", "the object has been modified", "try again"),
        (410, "Expired", "too old", "too old; try again"),
        (422, "Invalid", "it is invalid", "the server returned 422: it is invalid"),
        (429, "TooManyRequests", "later", "is busy"),
        (500, "InternalError", DOWN, "the training operator does not respond (connection refused)"),
        (500, "InternalError", "oops", "the server returned 500: oops"),
        (503, "ServiceUnavailable", "starting", "not ready: starting"),
        (418, "", "teapot", "the server returned 418: teapot"),
    ],
)
def test_what_the_server_refuses_is_explained_with_the_next_step(code, reason, detail, words):
    error = ApiError(detail, code=code, reason=reason, detail=detail)
    found = explained(error, "POST", ResourcePath.of(JOBS), "here", CONTROLLERS)
    assert words in str(found)
    assert (found.code, found.reason, found.detail) == (code, reason, detail)


def test_a_right_that_is_missing_everywhere():
    error = ApiError(EVERYWHERE, code=403, reason="Forbidden", detail=EVERYWHERE)
    found = explained(
        error, "GET", ResourcePath.of("/apis/kubeflow.org/v1/pytorchjobs"), "here", CONTROLLERS
    )
    assert "ada cannot list pytorchjobs in all namespaces; specify one with -n" in str(found)
    assert "doctor" not in str(found), "no role of one namespace would be enough"


def test_fields_that_are_wrong_stand_one_a_line():
    causes = [("spec.a", "too long"), ("spec.b", "not a number"), ("<nil>", "not all was checked")]
    error = ApiError("invalid", code=422, reason="Invalid", detail="invalid", causes=causes)
    found = explained(error, "POST", ResourcePath.of(JOBS), "here", CONTROLLERS)
    assert str(found) == (
        "the cluster refuses the job: \n  spec.a: too long\n  spec.b: not a number"
    )


def test_a_kind_that_the_cluster_does_not_know():
    error = ApiError("404 page not found", code=404, reason="", detail="404 page not found")
    found = explained(error, "GET", ResourcePath.of(path("workloads", "team")), "here", CONTROLLERS)
    assert str(found) == "the cluster of context here has no workloads"


@pytest.mark.parametrize("code", [0, 401])
def test_what_the_transport_says_best_itself_stays(code):
    error = ApiError("log in again", code=code)
    assert (
        str(explained(error, "GET", ResourcePath.of("/api/v1/nodes"), "here", CONTROLLERS))
        == "log in again"
    )


def test_requests_and_streams_are_carried_and_their_errors_explained(script):
    refused = ApiError("busy", code=429, reason="TooManyRequests")
    script.on("GET", "/api/v1/nodes", {"kind": "NodeList"}, refused)
    script.watched("/api/v1/nodes", [{"a": 1}, refused])
    transport = checked(script)
    assert (transport.context, transport.namespace) == ("there", "team")
    assert transport.request("GET", "/api/v1/nodes") == {"kind": "NodeList", "items": []}
    with pytest.raises(ApiError, match="context there is busy"):
        transport.request("GET", "/api/v1/nodes")
    lines = transport.stream("/api/v1/nodes")
    assert next(lines) == b'{"a": 1}\n'
    with pytest.raises(ApiError, match="context there is busy"):
        next(lines)


def checked(script):
    return ExplainedErrors(CheckedAnswers(script, typed_object), CONTROLLERS)


@pytest.mark.parametrize("name", ["../../x", "..", "a;touch b", "-n", "a\nb", "x" * 300, 7, ["a"]])
def test_a_name_from_a_server_is_a_name_in_kubernetes(script, name):
    where = path("pods", "team", "a")
    for metadata in ({"name": name}, {"name": "a", "namespace": name}, {"name": "a", "uid": name}):
        transport = checked(script)
        script.on("GET", where, {"metadata": metadata})
        script.on("GET", path("pods", "team"), {"items": [{"metadata": metadata}]})
        with pytest.raises(ApiError, match="cannot be trusted"):
            transport.request("GET", where)
        assert transport.request("GET", path("pods", "team"))["items"] == []


def test_an_answer_is_the_object_that_was_asked_for(script):
    where = path("pods", "team", "a")
    others = ({"name": "b"}, {"name": "a", "namespace": "other"})
    answers = (*others, {"name": "a", "namespace": "team"})
    script.on("GET", where, *({"metadata": metadata} for metadata in answers))
    transport = checked(script)
    for _ in others:
        with pytest.raises(BackendError, match="cannot be trusted"):
            transport.request("GET", where)
    assert transport.request("GET", where)["metadata"]["namespace"] == "team"


def test_who_writes_a_pod_may_name_any_node(script):
    pods = [{"metadata": {"name": "a"}, "spec": {"nodeName": one}} for one in ("n;touch x", "n-1")]
    script.on("GET", path("pods", "team"), {"items": pods})
    answer = checked(script).request("GET", path("pods", "team"))
    assert [pod["spec"].get("nodeName") for pod in answer["items"]] == [None, "n-1"]


@pytest.mark.parametrize("name", [".17a6f0c1d2e3b4a5", "me@team.17a6", "a b;touch x.17a6"])
def test_an_event_may_have_any_name(script, name):
    event = {"metadata": {"name": name, "uid": "u-1"}, "involvedObject": {"kind": "Node"}}
    script.on("GET", path("events", "team"), {"kind": "EventList", "items": [event]})
    answer = checked(script).request("GET", path("events", "team"))
    assert [one["metadata"] for one in answer["items"]] == [{"uid": "u-1"}]


@pytest.mark.parametrize(
    ("group", "resource", "options"),
    [
        ("kubeflow.org", "pytorchjobs", "-n team`"),
        ("trainer.kubeflow.org", "trainjobs", "-n team --target trainjob`"),
        ("trainer.kubeflow.org", "trainingruntimes", "-n team --target trainjob`"),
        ("jobset.x-k8s.io", "jobsets", "-n team --target jobset`"),
        ("batch", "jobs", "-n team --target job`"),
        ("batch.volcano.sh", "jobs", "-n team`"),
        ("", "pods", "-n team`"),
    ],
)
def test_a_refusal_advises_doctor_for_the_kind_of_job(group, resource, options):
    detail = f'{resource} is forbidden: User "a" cannot create resource "{resource}"'
    error = ApiError("refused", code=403, detail=detail)
    target = ResourcePath(group, resource=resource, namespace="team")
    assert f"`k8sjob doctor {options}" in str(explained(error, "POST", target, "c", CONTROLLERS))
