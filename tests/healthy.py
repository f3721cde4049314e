"""A cluster in which all is well, for the doctor: as a Transport, or behind HTTP."""

from __future__ import annotations

import copy

from serving import served

from k8sjob.kube.client.transport import ApiError

WEBHOOK = "validator.pytorchjob.training-operator.kubeflow.org"
BAD_JOB = ApiError(
    f'admission webhook "{WEBHOOK}" denied the request: metadata.name: Invalid value: "0-x"',
    code=403,
    reason="Forbidden",
)
NAMESPACE = "/api/v1/namespaces/team"


def node(name="n1", *, gpus=0, labels=None, taints=(), ready=True, cordoned=False, **offers):
    offers = {"cpu": "8", "memory": "32Gi", "pods": "110", **offers}
    if gpus:
        offers["nvidia.com/gpu"] = str(gpus)
    return {
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {"taints": list(taints), **({"unschedulable": True} if cordoned else {})},
        "status": {
            "allocatable": offers,
            "conditions": [{"type": "Ready", "status": str(ready)}],
        },
    }


def pod(node="n1", *, phase="Running", **requests):
    resources = {"requests": requests}
    return {
        "metadata": {"name": "p"},
        "spec": {"nodeName": node, "containers": [{"name": "c", "resources": resources}]},
        "status": {"phase": phase},
    }


def healthy():
    """The answers of a cluster where all is well, by path; POSTs by their last part."""
    return {
        "/version": {"gitVersion": "v1.34.4"},
        "/apis/kubeflow.org/v1": {"resources": [{"name": "pytorchjobs"}]},
        "/apis/apps/v1/deployments": {"items": [deployment()]},
        "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations": {"items": []},
        "/api/v1/nodes": {"items": [node()]},
        "/api/v1/pods": {"items": [pod(cpu="1")]},
        "/apis/storage.k8s.io/v1/storageclasses": {
            "items": [
                {
                    "metadata": {
                        "name": "fast",
                        "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
                    }
                }
            ]
        },
        NAMESPACE: {"metadata": {"name": "team", "labels": {}}},
        f"{NAMESPACE}/serviceaccounts/default": {"metadata": {"name": "default"}},
        f"{NAMESPACE}/resourcequotas": {"items": []},
        f"{NAMESPACE}/limitranges": {"items": []},
        f"{NAMESPACE}/pods": {"items": []},
        "selfsubjectaccessreviews": {"status": {"allowed": True}},
        "selfsubjectreviews": {"status": {"userInfo": {"username": "eve"}}},
        "pytorchjobs": lambda body: BAD_JOB if body["metadata"]["name"][0] == "0" else body,
    }


def deployment(*args, ready=1, image="registry.example/training-operator:v1.9.4"):
    return {
        "metadata": {"name": "training-operator", "namespace": "kubeflow"},
        "spec": {
            "replicas": 1,
            "template": {"spec": {"containers": [{"image": image, "args": list(args)}]}},
        },
        "status": {"readyReplicas": ready},
    }


def the(checks):
    """The one check that was made."""
    [check] = checks
    return check


class HealthyCluster:
    """A Transport that answers from a table, in which a test changes what it wants to be ill.

    Attributes:
        answers: by path, for POST by its last part: an object, an ApiError, a function of the
            query or the body; what is not there is 404.
        asked: method, path, query, body and metadata_only of each request.
    """

    context, namespace, server = "lab", "team", "https://lab.example:6443"
    skew = 0.0

    def __init__(self):
        self.answers = healthy()
        self.asked = []

    def request(
        self,
        method,
        path,
        *,
        query=None,
        body=None,
        metadata_only=False,
        timeout=30.0,
    ):
        self.asked.append((method, path, dict(query or {}), body, metadata_only))
        answer = self.answers.get(path if method == "GET" else path.rpartition("/")[2])
        if callable(answer):
            answer = answer(query if method == "GET" else body)
        if answer is None:
            answer = ApiError(f"{path} not found", code=404, reason="NotFound")
        if isinstance(answer, ApiError):
            raise answer
        return copy.deepcopy(answer)

    def stream(self, path, *, query=None, idle=300.0, stop=None):
        raise AssertionError("the doctor follows nothing")

    def served(self):
        """Over HTTP on the loopback interface; its URL, as a context."""
        return served(self._answer)

    def _answer(self, method, path, query, body):
        try:
            return 200, self.request(method, path, query=query, body=body)
        except ApiError as error:
            detail = {"kind": "Status", "message": error.detail, "reason": error.reason}
            return error.code or 500, detail
