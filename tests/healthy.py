"""A cluster in which all is well, for the doctor."""

from __future__ import annotations

from clusters import Cluster

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


class HealthyCluster(Cluster):
    """Answers from a table, in which a test changes what it wants to be ill.

    Attributes:
        answers: by path, for POST by its last part: an answer, or a function of the query or body.
    """

    context, namespace, server = "lab", "team", "https://lab.example:6443"

    def __init__(self):
        super().__init__()
        self.answers = healthy()

    def answer(self, method, path, query, body):
        answer = self.answers.get(path if method == "GET" else path.rpartition("/")[2])
        return answer(query if method == "GET" else body) if callable(answer) else answer
