"""Manifest checks beyond the reference's examples: where they must speak, and where be silent."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, job_specs

from k8sjob.checks.lint import lint, lint_manifest, manifest_pods
from k8sjob.rendering.manifest import render
from k8sjob.spec import JobSpec
from k8sjob.targets.jobs import DEFAULT, TARGETS
from k8sjob.targets.manifest_facts import ManifestJob
from k8sjob.yamldoc import dump, parse


def ids(manifest):
    return [finding.id for finding in lint_manifest(dump(manifest), "job.yaml")]


def test_a_sound_job_gives_nothing(pytorchjob):
    assert ids(pytorchjob()) == []
    assert ids(pytorchjob(workers=0)) == []


@pytest.mark.timeout(60)
def test_many_containers_take_linear_time(pytorchjob):
    job = pytorchjob()
    pod = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    pod["containers"] += [{"name": f"c{i}", "image": "tensorboard"} for i in range(20_000)]
    found = list(manifest_pods.RULES.hits(ManifestJob(DEFAULT, job, lambda _path: (1, 1))))
    assert len(found) == 20_000


@given(job_specs())
@examples(40)
def test_what_k8sjob_renders_is_found_sound(spec):
    found = {f.id for f in lint_manifest(render(spec.with_(overlay={})))}
    # What a user may ask for, and is warned of all the same.
    assert found <= {
        "gpus-kept-after-success",
        "latest-image-kept",
        "no-shared-memory",
        "nproc-without-launcher",
        "variable-not-expanded",
    }


@pytest.mark.parametrize(
    ("command", "nproc", "expected"),
    [
        (["python", "main.py"], "1", []),
        (["python3.12", "-u", "main.py"], "2", ["nproc-without-launcher"]),
        (["/usr/bin/python3", "main.py"], "2", ["nproc-without-launcher"]),
        (["bash", "-c", "cd /app && python main.py"], "2", ["nproc-without-launcher"]),
        (["bash", "-c", "for i in 0 1; do python main.py & done; wait"], "2", []),
        (["bash", "-c", "torchrun main.py"], "2", []),
        (["python", "-m", "torch.distributed.run", "main.py"], "2", []),
        (["python", "-P", "-m", "k8sjob.runtime"], "2", []),
        (["accelerate", "launch", "main.py"], "2", []),
        (["./start.sh"], "2", []),
        (["python", "main.py"], "auto", []),
        (["python", "main.py"], "two", ["nproc-value"]),
        (["torchrun", "main.py"], "0", ["nproc-value"]),
    ],
)
def test_processes_and_who_starts_them(pytorchjob, command, nproc, expected):
    job = pytorchjob({"command": command}, workers=0, nprocPerNode=nproc)
    assert ids(job) == expected


def test_without_a_command_nobody_knows_the_entrypoint(pytorchjob):
    job = pytorchjob({"command": None, "args": ["main.py"]}, nprocPerNode="2")
    assert ids(job) == []


@pytest.mark.parametrize(
    ("flags", "workers", "expected"),
    [
        (["--nnodes=4", "--nproc-per-node=1"], 3, 0),
        (["--nnodes", "5"], 3, 2),
        (["--nnodes=2"], 3, 2),
        (["--nnodes=$(PET_NNODES)", "--node_rank=$(RANK)"], 3, 0),
        (["--node-rank=0"], 3, 1),
        (["--master_addr=localhost"], 3, 2),
        (["--master_addr", "digits-master-0"], 3, 0),
        (["--rdzv-endpoint=127.0.0.1:29400"], 3, 2),
        (["--standalone"], 3, 2),
        (["--standalone"], 0, 0),
        (["--nnodes=1:4"], 3, 0),
    ],
)
def test_the_options_of_torchrun(pytorchjob, flags, workers, expected):
    job = pytorchjob({"command": ["torchrun", *flags, "main.py", "--nnodes=9"]}, workers=workers)
    shell = pytorchjob(
        {"command": ["sh", "-c", " ".join(["torchrun", *flags, "main.py"])]}, workers=workers
    )
    assert ids(job) == ["launcher-hard-coded"] * expected
    assert ids(shell) == ["launcher-hard-coded"] * expected


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ({"name": "WORLD_SIZE", "value": "4"}, 0),
        ({"name": "WORLD_SIZE", "value": "8"}, 2),
        ({"name": "RANK", "value": "0"}, 1),
        ({"name": "PET_NNODES", "valueFrom": {"fieldRef": {"fieldPath": "a"}}}, 2),
        ({"name": "PYTHONUNBUFFERED", "value": "1"}, 0),
        ({"name": "LOCAL_RANK", "value": "0"}, 0),
        ({"name": "PET_RDZV_BACKEND", "value": "static"}, 0),
    ],
)
def test_variables_that_never_arrive(pytorchjob, variable, expected):
    assert ids(pytorchjob({"env": [variable]})) == ["env-overridden"] * expected


@pytest.mark.parametrize(
    ("resources", "found"),
    [
        (
            {"limits": {"cpu": "4", "memory": "1Gi"}, "requests": {"cpu": 4, "memory": "1024Mi"}},
            False,
        ),
        ({"limits": {"cpu": 1}, "requests": {"cpu": "1500m"}}, True),
        ({"requests": {"cpu": 2}}, False),
        ({"requests": {"rdma/hca": 1}}, True),
        ({"limits": {"rdma/hca": 1}}, False),
        ({"limits": {"rdma/hca": 2}, "requests": {"rdma/hca": 1}}, True),
        ({"limits": {"rdma/hca": "0.5"}}, True),
    ],
)
def test_amounts_that_no_pod_can_have(pytorchjob, resources, found):
    expected = ["resources-rejected"] if found else []
    assert ids(pytorchjob({"resources": resources}, workers=0)) == expected


def test_an_amount_that_is_no_quantity(pytorchjob):
    memory = {"resources": {"limits": {"memory": "32gb"}}}
    assert ids(pytorchjob(memory, workers=0)) == ["wrong-type"]


@pytest.mark.parametrize("field", ["args", "env", "ports", "volumeMounts"])
def test_an_empty_item_of_a_list(pytorchjob, field):
    assert ids(pytorchjob({field: [None]})) == ["wrong-type"] * 2


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"backoffLimit": 13, "cleanPodPolicy": "Running"}, []),
        ({}, ["restarts-for-ever"]),
        ({"activeDeadlineSeconds": 60}, ["deadline-not-noticed"]),
        ({"backoffLimit": 0}, []),
        ({"backoffLimit": 3}, ["backoff-limit-too-small"]),
        ({"backoffLimit": 4}, []),
        ({"backoffLimit": 4, "cleanPodPolicy": "running"}, ["clean-pod-policy-typo"]),
    ],
)
def test_how_it_restarts_and_ends(pytorchjob, policy, expected):
    assert ids(pytorchjob(runPolicy=policy)) == expected
    job = pytorchjob(runPolicy=policy)
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        replica["restartPolicy"] = "Never"
    ends = ("clean-pod-policy-typo", "deadline-not-noticed")
    assert ids(job) == [name for name in expected if name in ends]


@pytest.mark.parametrize(
    ("elastic", "expected"),
    [
        ({"minReplicas": 1, "maxReplicas": 9}, []),
        ({"maxReplicas": 9}, ["elastic-bounds"]),
        ({"maxReplicas": 3}, []),
        ({"minReplicas": 4}, ["elastic-bounds"]),
        ({"minReplicas": 4, "maxReplicas": 9, "metrics": [{"type": "Resource"}]}, []),
        ({"minReplicas": 3, "maxReplicas": 2}, ["elastic-bounds"]),
        ({}, []),
    ],
)
def test_elastic_bounds(pytorchjob, elastic, expected):
    command = {"command": ["torchrun", "main.py"]}
    assert ids(pytorchjob(command, master=False, workers=3, elasticPolicy=elastic)) == expected


def test_gpus_that_are_kept_and_memory_that_is_not_there(pytorchjob):
    gpu = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    kept = {"backoffLimit": 13}
    assert ids(pytorchjob(gpu, {"hostIPC": True}, runPolicy=kept)) == ["gpus-kept-after-success"]
    for answer in ({"ttlSecondsAfterFinished": 60}, {"cleanPodPolicy": "All"}):
        assert ids(pytorchjob(gpu, {"hostIPC": True}, runPolicy={**kept, **answer})) == []
    assert ids(pytorchjob(gpu)) == ["no-shared-memory"] * 2
    assert ids(pytorchjob(runPolicy=kept)) == []


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (["python", "main.py", "--lr=$LR"], True),
        (["python", "main.py", "${LR}"], True),
        (["python", "main.py", "$(LR)"], False),
        (["python", "main.py", "^price$", "$5", "$$LR"], False),
        (["sh", "-c", "python main.py --lr=$LR"], False),
        (["env", "A=1", "bash", "-c", "python main.py $LR"], False),
    ],
)
def test_variables_that_nobody_expands(pytorchjob, command, found):
    expected = ["variable-not-expanded"] if found else []
    assert ids(pytorchjob({"command": command}, workers=0)) == expected


def test_places_are_those_of_the_file(pytorchjob):
    items = [{"apiVersion": "v1", "kind": "Service"}, pytorchjob(nprocPerNode=2)]
    text = "# first\n" + dump({"apiVersion": "v1", "kind": "List", "items": items})
    (finding,) = (f for f in lint_manifest(text, "list.yaml") if f.id == "nproc-value")
    assert text.splitlines()[finding.line - 1].strip() == "nprocPerNode: 2"
    assert finding.source == "list.yaml"
    # JSON is YAML
    assert "nproc-value" in [f.id for f in lint_manifest(json.dumps(items[1]))]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 99) | st.sampled_from(["", "x", "1", "$(A)"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=4,
)


@st.composite
def distorted(draw, value):
    """The value with some parts replaced by anything."""
    if draw(st.integers(0, 9)) == 0:
        return draw(JSON)
    if isinstance(value, dict):
        return {key: draw(distorted(item)) for key, item in value.items()}
    if isinstance(value, list):
        return [draw(distorted(item)) for item in value]
    return value


FULL = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: x, annotations: {sidecar.istio.io/inject: "false"}}
spec:
  nprocPerNode: "2"
  runPolicy: {backoffLimit: 1, cleanPodPolicy: None, schedulingPolicy: {}}
  elasticPolicy: {minReplicas: 1, maxReplicas: 2, rdzvConf: [{key: a}]}
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      template:
        metadata: {annotations: {}}
        spec:
          volumes: [{name: a, emptyDir: {}}]
          containers:
          - name: pytorch
            image: a:latest
            command: [torchrun, --nnodes, "2", main.py]
            args: [$A]
            env: [{name: RANK, value: "1"}]
            ports: [{name: pytorchjob-port, containerPort: 1}]
            resources: {limits: {nvidia.com/gpu: 1}, requests: {}}
            volumeMounts: [{name: a, mountPath: /dev/shm}]
            readinessProbe: {}
"""


@given(distorted(parse(FULL).data))
def test_no_shape_makes_it_fail(manifest):
    for finding in lint_manifest(dump(manifest)):
        assert finding.message
        assert finding.line >= 1


@pytest.mark.parametrize("target", [target.name for target in TARGETS])
def test_every_kind_of_job_is_read(target):
    """What does not depend on the training operator is found in each, with its line."""
    resources = {"gpus": 1, "shm": "0"}
    spec = JobSpec(
        name="digits",
        image="nvcr.oi/team/train:1",
        run={"command": ["python", "$HOME/main.py"], "env": {"SEED": "1"}},
        replicas={"workers": 1},
        resources=resources,
        target=target,
    )
    text = render(spec).replace('value: "1"', "value: 1", 1)
    found = lint_manifest(text, "job.yaml")
    in_two_objects = {"no-shared-memory"} if target == "trainjob" else set()  # GPU and mounts
    expected = {"image-host", "no-shared-memory", "variable-not-expanded", "wrong-type"}
    assert {one.id for one in found} == expected - in_two_objects
    lines = [text.splitlines()[one.line - 1] for one in found if one.id == "image-host"]
    assert all("nvcr.oi" in line for line in lines)


def test_all_pods_of_a_jobset_are_read():
    def part(name):
        container = {"name": "node", "image": "train:latest", "imagePullPolicy": "IfNotPresent"}
        template = {"spec": {"containers": [container]}}
        return {"name": name, "template": {"spec": {"template": template}}}

    job = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "digits"},
        "spec": {"replicatedJobs": [part("leader"), part("workers")]},
    }
    assert ids(job) == ["latest-image-kept"] * 2


def test_a_runtime_by_itself_is_typed_as_one():
    container = {"name": "node", "image": "train:1", "env": None, "args": [3]}
    job = {"template": {"spec": {"containers": [container, None], "initContainers": None}}}
    part = {"name": "node", "template": {"spec": job}}
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": "torch"},
        "spec": {"template": {"spec": {"replicatedJobs": [part]}}},
    }
    assert ids(runtime) == ["wrong-type"] * 2


def test_a_label_of_a_wrong_type_is_one_finding(pytorchjob):
    job = pytorchjob({"env": [{"name": "WORLD_SIZE", "value": "9"}]})
    job["metadata"]["labels"] = {"example.com/run": 5}
    assert sorted(ids(job)) == ["env-overridden", "env-overridden", "wrong-type"]


def test_the_container_that_trains_is_no_sidecar():
    container = {"name": "trainer", "image": "train:1", "command": ["torchrun", "main.py"]}
    container["args"] = ["--report_to", "tensorboard", "log_dir=${output_dir}/logs"]
    template = {"spec": {"containers": [container]}}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "digits"}}
    assert ids({**job, "spec": {"template": template}}) == []


def test_the_overlay_of_another_kind_is_read(tmp_path):
    overlay = {
        "spec": {"template": {"spec": {"initContainers": [{"name": "a", "image": "nvcr.oi/a:1"}]}}}
    }
    spec = {"name": "digits", "image": "train:1", "run": {"command": ["python", "main.py"]}}
    file = tmp_path / "job.yaml"
    file.write_text(dump({**spec, "target": "job", "overlay": overlay}))
    assert "image-host" in [one.id for one in lint(file)]


@pytest.mark.parametrize(
    ("pod", "workers", "found"),
    [
        ({"hostNetwork": True}, 1, True),
        ({"hostNetwork": True, "dnsPolicy": "ClusterFirst"}, 1, True),
        ({"hostNetwork": True, "dnsPolicy": "Default"}, 1, True),
        ({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}, 1, False),
        ({"hostNetwork": True, "dnsPolicy": "None"}, 1, False),
        ({"hostNetwork": True}, 0, False),
        ({"hostNetwork": False}, 1, False),
    ],
)
def test_pods_on_the_network_of_their_node(pytorchjob, pod, workers, found):
    job = pytorchjob(workers=workers)
    replicas = job["spec"]["pytorchReplicaSpecs"]
    for replica in replicas.values():
        replica["template"]["spec"] |= pod
    assert ids(job) == ["host-network-dns"] * found * len(replicas)
    template = replicas["Master"]["template"]
    indexed = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}}
    indexed["spec"] = {"parallelism": workers + 1, "template": template}
    assert ("host-network-dns" in ids(indexed)) is found


OVERLAID = """\
name: digits
image: registry.example/digits:1
run: {run}
replicas: {{workers: 3, elastic: {{min: 2, max: 4}}}}
overlay:
  spec:
    elasticPolicy: {policy}
"""


@pytest.mark.parametrize(
    ("run", "policy", "field"),
    [
        ("{script: main.py}", "{rdzvBackend: etcd}", "rdzvBackend"),
        ("{module: train}", "{rdzvBackend: etcd-v2}", "rdzvBackend"),
        ("{script: main.py}", "{rdzvHost: etcd, rdzvPort: 2379}", "rdzvHost"),
        ("{script: main.py}", "{rdzvBackend: c10d, rdzvHost: digits-worker-0}", None),
        ("{script: main.py}", "{rdzvHost: digits-worker-0.team.svc}", None),
        ("{command: [torchrun, main.py]}", "{rdzvBackend: etcd, rdzvHost: etcd}", None),
    ],
)
def test_a_rendezvous_that_the_agent_does_not_join(tmp_path, run, policy, field):
    file = tmp_path / "job.yaml"
    file.write_text(OVERLAID.format(run=run, policy=policy))
    refused = [finding for finding in lint(file) if finding.id == "invalid-document"]
    assert [one.line for one in refused] == [7] * bool(field)
    assert all(f"overlay.spec.elasticPolicy.{field}" in one.message for one in refused)


@pytest.mark.parametrize(
    ("volume", "workers", "found"),
    [
        ("pvc: data", 1, False),
        ("empty_dir: {}", 1, True),
        ("host_path: /data", 1, True),
        ("host_path: /data", 0, False),
    ],
)
def test_checkpoints_on_a_folder_of_one_node(tmp_path, volume, workers, found):
    text = "name: a\nimage: registry.example/a:1\nrun: {script: a.py}\ncheckpoint: {dir: /c/d}\n"
    text += f"replicas: {{workers: {workers}}}\nvolumes: [{{name: c, mount: /c, {volume}}}]\n"
    (tmp_path / "job.yaml").write_text(text)
    assert [finding.id for finding in lint(tmp_path)] == ["checkpoint-not-shared"] * found
    # The same of a script that has checkpoints of its own.
    text = text.replace("checkpoint: {dir: /c/d}\n", "").replace("a.py}", "a.py, args: [-o=/c/d]}")
    (tmp_path / "job.yaml").write_text(text)
    (tmp_path / "a.py").write_text("import torch\ntorch.save(torch.load('last.pt'), 'last.pt')\n")
    assert [finding.id for finding in lint(tmp_path)] == ["checkpoint-not-shared"] * found
