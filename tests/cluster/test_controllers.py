"""The controllers that a bed is given for some tests, by what they alone do."""

import pytest

POD = {
    "restartPolicy": "Never",
    "terminationGracePeriodSeconds": 0,
    "containers": [{"name": "node", "command": ["sleep", "infinity"]}],
}


def job(image, cpu="10m"):
    """The template of a Job of one pod, which runs until it is deleted."""
    (container,) = POD["containers"]
    container = {**container, "image": image, "resources": {"requests": {"cpu": cpu}}}
    return {"spec": {"template": {"spec": {**POD, "containers": [container]}}, "backoffLimit": 0}}


def replicated(image):
    return {"replicatedJobs": [{"name": "node", "replicas": 1, "template": job(image)}]}


def running(get):
    """Names of the pods that run."""
    return [pod["metadata"]["name"] for pod in get("pods") if pod["status"]["phase"] == "Running"]


@pytest.mark.usefixtures("jobset")
def test_jobset_makes_jobs_and_their_service(cluster, namespace, get, eventually):
    jobset = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
    jobset |= {"metadata": {"name": "one"}, "spec": replicated(cluster.base_image)}
    cluster.create(jobset, namespace)
    eventually(lambda: running(get), "the pod")
    assert running(get)[0].startswith("one-node-0-0-")
    assert get("services", "one")["spec"]["clusterIP"] == "None"


@pytest.mark.usefixtures("trainer")
def test_trainer_makes_a_jobset_of_a_runtime(cluster, namespace, get, eventually):
    version = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "metadata": {"name": "one"}}
    spec = replicated(cluster.base_image)
    label = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    spec["replicatedJobs"][0]["template"]["metadata"] = {"labels": label}
    runtime = {"mlPolicy": {"numNodes": 1, "torch": {}}, "template": {"spec": spec}}
    cluster.create({**version, "kind": "TrainingRuntime", "spec": runtime}, namespace)
    reference = {"name": "one", "kind": "TrainingRuntime"}
    cluster.create({**version, "kind": "TrainJob", "spec": {"runtimeRef": reference}}, namespace)
    eventually(lambda: running(get), "the pod")
    assert get("jobsets", "one")["metadata"]["ownerReferences"][0]["kind"] == "TrainJob"


def test_kueue_keeps_a_job_waiting_while_the_quota_is_used(
    cluster, namespace, get, eventually, kueue
):
    kueue("team", cpu="1")
    for name in ("first", "second"):
        labels = {"kueue.x-k8s.io/queue-name": "team"}
        document = {"apiVersion": "batch/v1", "kind": "Job", **job(cluster.base_image, "600m")}
        cluster.create({**document, "metadata": {"name": name, "labels": labels}}, namespace)
        if name == "first":
            eventually(lambda: running(get), "the first job's pod")

    def waits():
        conditions = [
            condition
            for workload in get("workloads")
            if workload["metadata"]["ownerReferences"][0]["name"] == "second"
            for condition in workload.get("status", {}).get("conditions", ())
        ]
        return [found for found in conditions if found["type"] == "QuotaReserved"]

    (condition,) = eventually(waits, "Kueue's answer")
    assert "insufficient unused quota for cpu" in condition["message"]
    assert get("jobs", "second")["spec"]["suspend"] is True
    cluster.delete("jobs", "first", namespace)
    eventually(lambda: not get("jobs", "second")["spec"]["suspend"], "the second job's admission")
