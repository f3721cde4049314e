"""The operator's environment, shape by shape; the numbers are those of its source."""

import pytest

from k8sjob.rendering import manifest, replica_env
from k8sjob.targets.pytorchjob.operator import operator_env


def test_master_and_workers(job):
    spec = job(replicas={"workers": 3, "nproc_per_node": 2})
    common = {
        "PYTHONUNBUFFERED": "1",
        "MASTER_PORT": "23456",
        "PET_MASTER_PORT": "23456",
        "MASTER_ADDR": "digits-master-0",
        "PET_MASTER_ADDR": "digits-master-0",
        "WORLD_SIZE": "8",
        "PET_NPROC_PER_NODE": "2",
        "PET_NNODES": "4",
    }
    assert replica_env(spec, "Master", 0) == {**common, "RANK": "0", "PET_NODE_RANK": "0"}
    assert replica_env(spec, "Worker", 0) == {**common, "RANK": "1", "PET_NODE_RANK": "1"}
    assert replica_env(spec, "Worker", 2) == {**common, "RANK": "3", "PET_NODE_RANK": "3"}
    assert list(replica_env(spec, "Worker", 2))[-5:] == [
        "WORLD_SIZE",
        "RANK",
        "PET_NODE_RANK",
        "PET_NPROC_PER_NODE",
        "PET_NNODES",
    ]


def test_a_master_alone(job):
    env = replica_env(job(), "Master", 0)
    assert (env["WORLD_SIZE"], env["RANK"], env["PET_NNODES"]) == ("1", "0", "1")


def test_gpus_are_processes(job):
    spec = job(replicas={"workers": 1}, resources={"gpus": 4})
    env = replica_env(spec, "Worker", 0)
    assert (env["WORLD_SIZE"], env["PET_NPROC_PER_NODE"]) == ("8", "4")


def test_elastic_jobs_have_no_master(job):
    spec = job(replicas={"workers": 2, "elastic": {"min": 2, "max": 5}})
    assert replica_env(spec, "Worker", 2) == {
        "PYTHONUNBUFFERED": "1",
        "PET_NPROC_PER_NODE": "1",
        "PET_RDZV_ENDPOINT": "digits-worker-0:23456",
        "PET_RDZV_BACKEND": "c10d",
        "PET_NNODES": "2:5",
        "PET_MAX_RESTARTS": "3",
    }
    with pytest.raises(ValueError, match="no Master-0"):
        replica_env(spec, "Master", 0)


@pytest.mark.parametrize(
    ("role", "index"), [("Master", 1), ("Worker", 3), ("Worker", -1), ("Launcher", 0)]
)
def test_replicas_that_are_not_there(job, role, index):
    with pytest.raises(ValueError, match=role):
        replica_env(job(replicas={"workers": 3}), role, index)


def test_an_overlay_counts(job):
    port = [{"name": "pytorchjob-port", "containerPort": 29500}]
    pod = {"template": {"spec": {"containers": [{"name": "pytorch", "ports": port}]}}}
    overlay = {"spec": {"pytorchReplicaSpecs": {"Master": pod, "Worker": {"replicas": 5}}}}
    env = replica_env(job(replicas={"workers": 1}, overlay=overlay), "Worker", 4)
    assert (env["MASTER_PORT"], env["WORLD_SIZE"], env["RANK"]) == ("29500", "6", "5")


@pytest.mark.parametrize(
    ("nproc", "world"), [("auto", "4"), ("gpu", "4"), ("2", "8"), ("+2", "8"), ("2.0", "4")]
)
def test_what_is_no_number_counts_as_one_process(job, nproc, world):
    foreign = manifest(job(replicas={"workers": 3}))
    foreign["spec"]["nprocPerNode"] = nproc
    env = operator_env(foreign, "Worker", 0)
    assert (env["WORLD_SIZE"], env["PET_NPROC_PER_NODE"]) == (world, nproc)


def test_a_manifest_that_leaves_all_to_the_defaults(job):
    foreign = manifest(job(replicas={"workers": 1}))
    del foreign["spec"]["nprocPerNode"]
    for replica in foreign["spec"]["pytorchReplicaSpecs"].values():
        del replica["template"]["spec"]["containers"][0]["ports"]
        replica.pop("replicas")
    env = operator_env(foreign, "Master", 0)
    assert (env["MASTER_PORT"], env["PET_NPROC_PER_NODE"], env["WORLD_SIZE"]) == (
        "23456",
        "auto",
        "2",
    )


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({}, {"PET_NNODES": "3:3", "PET_NPROC_PER_NODE": "1"}),
        ({"maxReplicas": 4}, {"PET_NNODES": "4:4"}),
        ({"minReplicas": 2}, {"PET_NNODES": "2:2"}),
        ({"rdzvHost": "etcd", "rdzvPort": 2379}, {"PET_RDZV_ENDPOINT": "etcd:2379"}),
        (
            {"rdzvBackend": "etcd-v2", "rdzvId": "x"},
            {"PET_RDZV_BACKEND": "etcd-v2", "PET_RDZV_ID": "x"},
        ),
        ({"rdzvConf": [{"key": "a", "value": "1"}, {"key": "b"}]}, {"PET_RDZV_CONF": "a=1,b="}),
        ({"standalone": True}, {"PET_STANDALONE": ""}),
        ({"maxRestarts": 0}, {"PET_MAX_RESTARTS": "0"}),
    ],
)
def test_elastic_policies_of_foreign_manifests(job, policy, expected):
    foreign = manifest(job(replicas={"workers": 2, "elastic": {"min": 3, "max": 3}}))
    foreign["spec"]["elasticPolicy"] = policy
    env = operator_env(foreign, "Worker", 0)
    assert expected.items() <= env.items()


def test_processes_of_an_elastic_policy_of_old(job):
    foreign = manifest(job(replicas={"workers": 1, "elastic": {"min": 2, "max": 2}}))
    del foreign["spec"]["nprocPerNode"]
    foreign["spec"]["elasticPolicy"] = {"nProcPerNode": 4}
    assert operator_env(foreign, "Worker", 0)["PET_NPROC_PER_NODE"] == "4"
