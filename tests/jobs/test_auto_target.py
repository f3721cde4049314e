"""`--target auto`: which kind of job a cluster can take a spec as."""

from pathlib import Path

import pytest
import yaml
from clusters import Cluster

from k8sjob.backends.cluster.backend import ClusterBackend
from k8sjob.errors import BackendError
from k8sjob.jobs.auto_target import choose_target
from k8sjob.spec import JobSpec

SPEC = JobSpec(name="tiny", image="example/image:1", run={"script": "main.py"})
QUEUED = SPEC.with_(kueue_queue="research")
APIS = {
    "pytorchjob": "kubeflow.org/v1",
    "trainjob": "trainer.kubeflow.org/v1alpha1",
    "jobset": "jobset.x-k8s.io/v1alpha2",
    "job": "batch/v1",
}
STOCK = Path(__file__).parents[1] / "targets/stock_runtimes.yaml"
FIRST = "the first in the order, and it fits"


class Kinds(Cluster):
    """A cluster that serves some kinds.

    Args:
        served: their names.
        refused: resources that the user may not create.
        managed: the resource of the kind that Kueue suspends.
        existing: the path of the job that is there, and its kind.
    """

    def __init__(self, served, refused=(), managed="", existing=""):
        super().__init__()
        self.groups = {APIS[name] for name in served}
        self.refused, self.managed, self.existing = refused, managed, existing

    def answer(self, method, path, _query, body):
        if path.endswith("selfsubjectaccessreviews"):
            asked = body["spec"]["resourceAttributes"]
            return {"status": {"allowed": asked["resource"] not in self.refused}}
        resource = path.rpartition("/")[2]
        if resource == "clustertrainingruntimes":
            return {"items": list(yaml.safe_load_all(STOCK.read_text()))}
        if method == "POST":
            return {**body, "spec": {**body["spec"], "suspend": resource == self.managed}}
        if path.removeprefix("/apis/") in self.groups:
            served = ("pytorchjobs", "trainjobs", "jobsets", "jobs")
            return {"resources": [{"name": name} for name in served]}
        if self.existing and path.endswith(f"/{self.existing}/tiny"):
            labels = {"app.kubernetes.io/managed-by": "k8sjob"}
            metadata = {"name": "tiny", "uid": "1", "namespace": "blue", "labels": labels}
            node = {"template": {"spec": {"completionMode": "Indexed"}}}
            return {"metadata": metadata, "spec": {"replicatedJobs": [node]}}
        return None


@pytest.mark.parametrize(
    ("spec", "cluster", "target", "why"),
    [
        (SPEC, {"served": APIS}, "pytorchjob", FIRST),
        (SPEC, {"served": ["job"]}, "job", "not jobset: the cluster does not serve jobsets of j"),
        (SPEC, {"served": ["trainjob", "jobset"]}, "trainjob", "serve pytorchjobs of kubeflow"),
        (SPEC, {"served": ["trainjob", "job"]}, "job", "not trainjob: the cluster does not"),
        (
            SPEC,
            {"served": APIS, "refused": ["pytorchjobs", "trainingruntimes"]},
            "jobset",
            "trainingruntimes.trainer.kubeflow.org in namespace blue (namespace blue may use `runt",
        ),
        (
            SPEC.with_(runtime="torch-distributed"),
            {"served": APIS, "refused": ["trainingruntimes"]},
            "trainjob",
            "not pytorchjob: a PyTorchJob cannot have runtime",
        ),
        (
            SPEC.with_(policy={"ttl_after_finished": 60}),
            {"served": ["trainjob", "jobset"]},
            "jobset",
            "not trainjob: a TrainJob cannot have policy.ttl_after_finished",
        ),
        (QUEUED, {"served": APIS, "managed": "jobs"}, "job", "Kueue does not manage JobSets, and"),
        (SPEC, {"served": APIS, "existing": "jobsets"}, "jobset", "exists, and it is a JobSet"),
    ],
)
def test_the_first_kind_that_fits(spec, cluster, target, why):
    chosen, reason = choose_target(spec, ClusterBackend(Kinds(**cluster)))
    assert chosen.target == target
    assert why in reason


def test_none_fits():
    with pytest.raises(BackendError, match=r"not pytorchjob: .*not job: a Job cannot have gang"):
        choose_target(
            SPEC.with_(gang={"scheduler": "volcano"}), ClusterBackend(Kinds(["job", "jobset"]))
        )
