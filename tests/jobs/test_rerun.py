import pytest

from k8sjob.jobs.plan import plan_job
from k8sjob.jobs.rerun import plan_there
from k8sjob.spec import JobSpec

IMAGE = "registry.example/team/digits@sha256:" + "5" * 64


@pytest.mark.parametrize("target", ["pytorchjob", "job", "jobset", "trainjob"])
def test_a_job_of_a_cluster_once_more(target):
    spec = JobSpec(
        name="digits",
        namespace="team",
        target=target,
        image=IMAGE,
        security="default",
        run={"script": "main.py", "args": ["--seed", "7"]},
        replicas={"workers": 2},
        checkpoint={"dir": "/data/checkpoints"},
        policy={"restart_policy": "ExitCode"},
        volumes=[{"name": "data", "mount": "/data", "pvc": "data"}],
    )
    again = plan_there(plan_job(spec).job, ["n1"]).spec
    affinity = plan_there(plan_job(again).job, ["n2"]).spec.affinity
    assert [name in str(affinity) for name in ("n1", "n2")] == [True, False]  # that is a field
    assert again.name.startswith("digits-")
    folder = f"/data/checkpoints/{again.name}"
    policy = {"restart_policy": "ExitCode", "avoid_nodes": ["n1"]}
    assert again == spec.with_(name=again.name, checkpoint={"dir": folder}, policy=policy)
