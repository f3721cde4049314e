"""Adopt: what becomes a field, what stays in the overlay, what is said, what is refused."""

import copy

import pytest
from pytorchjobs import pytorchjob as job

from k8sjob import yamldoc
from k8sjob.adopt import adopt, same_meaning
from k8sjob.contract import AGENT
from k8sjob.errors import SpecError
from k8sjob.kube.objects import IMAGE_ORIGIN
from k8sjob.provenance import Provenance
from k8sjob.rendering.manifest import manifest, render
from k8sjob.spec import JobSpec
from k8sjob.targets.jobs import TARGETS
from k8sjob.yamldoc import dump

FIRST = [{"name": "a", "image": "i"}, {"name": "b", "image": "i"}]


def adopted(text):
    """The spec of a manifest, after the proof that it means the same."""
    made = adopt(text if isinstance(text, str) else dump(text)).spec
    if not isinstance(text, str):
        assert same_meaning(manifest(made).document, text)
    return made


GPU_JOB = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: fashion, namespace: vision}
spec:
  nprocPerNode: "2"
  runPolicy: {backoffLimit: 9, cleanPodPolicy: Running, ttlSecondsAfterFinished: 86400}
  pytorchReplicaSpecs:
    Master: &replica
      replicas: 1
      restartPolicy: ExitCode
      template:
        metadata:
          annotations: {sidecar.istio.io/inject: "false"}
          labels: {team: vision}
        spec:
          automountServiceAccountToken: false
          terminationGracePeriodSeconds: 60
          nodeSelector: {pool: gpu}
          imagePullSecrets: [{name: login}]
          containers:
            - name: pytorch
              image: registry/team/fashion:1
              command: [torchrun, main.py]
              args: [--epochs, "5"]
              env: [{name: NCCL_DEBUG, value: INFO}]
              envFrom: [{secretRef: {name: wandb}}]
              resources:
                limits: {cpu: 4, memory: 32Gi, nvidia.com/gpu: 2, rdma/hca: 1}
                requests: {cpu: 2, memory: 32Gi, nvidia.com/gpu: 2, rdma/hca: 1}
              volumeMounts:
                - {name: shared-memory, mountPath: /dev/shm}
                - {name: data, mountPath: /data, readOnly: true}
          volumes:
            - {name: shared-memory, emptyDir: {medium: Memory, sizeLimit: 8192Mi}}
            - {name: data, persistentVolumeClaim: {claimName: datasets}}
    Worker: {<<: *replica, replicas: 3}
metadata_of_nobody: null
"""


def test_what_has_a_field_goes_there_and_nothing_else_is_written():
    spec = adopt(GPU_JOB).spec
    assert spec.model_dump(exclude_defaults=True) == {
        "name": "fashion",
        "namespace": "vision",
        "image": {"repository": "registry/team/fashion:1", "pull_secrets": ("login",)},
        "run": {
            "command": ("torchrun", "main.py"),
            "args": ("--epochs", "5"),
            "env": {"NCCL_DEBUG": "INFO"},
            "env_from": ({"secret": "wandb"},),
        },
        "replicas": {"workers": 3, "nproc_per_node": 2},
        "resources": {
            "gpus": 2,
            "cpu": "4",
            "memory": "32Gi",
            "shm": "8Gi",
            "extended": {"rdma/hca": "1"},
            "requests": {"cpu": "2"},
        },
        "volumes": ({"name": "data", "mount": "/data", "pvc": "datasets", "read_only": True},),
        "node_selector": {"pool": "gpu"},
        "security": "default",
        "policy": {"restart_policy": "ExitCode", "max_restarts": 2, "ttl_after_finished": "1d"},
        "pod_template": {"metadata": {"labels": {"team": "vision"}}},
    }


def test_what_has_no_field_is_kept():
    made = adopted(
        job(
            {"lifecycle": {"preStop": {"exec": {"command": ["sleep", "5"]}}}, "tty": True},
            {"initContainers": [{"name": "wait", "image": "busybox"}], "hostIPC": True},
            runPolicy={"backoffLimit": 5, "managedBy": "kubeflow.org/training-operator"},
        )
    )
    overlay = made.overlay["spec"]
    assert overlay["runPolicy"] == {"managedBy": "kubeflow.org/training-operator"}
    pod = made.pod_template["spec"]
    assert pod["hostIPC"] is True
    assert pod["initContainers"][0]["name"] == "wait"
    assert pod["containers"][0]["tty"] is True


def test_what_counts_a_gpus_memory_is_not_taken_for_gpus():
    limits = {"nvidia.com/gpumem": 3000, "volcano.sh/vgpu-number": 2}
    resources = adopted(job({"resources": {"limits": limits}})).resources
    assert (resources.gpus, resources.gpu_resource) == (2, "volcano.sh/vgpu-number")
    assert list(resources.extended) == ["nvidia.com/gpumem"]


@pytest.mark.parametrize(
    ("limit", "restarts", "overlay"),
    [(0, 0, False), (5, 1, False), (13, 3, False), (4, 1, True), (None, 3, True)],
)
def test_restarts_come_from_the_limit_that_they_lead_to(limit, restarts, overlay):
    policy = {} if limit is None else {"backoffLimit": limit}
    made = adopted(job(runPolicy=policy, nprocPerNode="1"))
    assert made.policy.max_restarts == restarts
    expected = {"spec": {"runPolicy": {"backoffLimit": limit}}} if overlay else {}
    assert made.overlay == expected


def test_replicas_that_differ():
    manifest_ = job(nprocPerNode="1", runPolicy={"backoffLimit": 13})
    worker = manifest_["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    worker |= {"args": ["--role", "worker"], "resources": {"limits": {"cpu": 8}}}
    master = manifest_["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    master |= {"resources": {"limits": {"cpu": 2}}, "image": "registry/other:1"}
    made = adopt(dump(manifest_))
    assert same_meaning(manifest(made.spec).document, manifest_)
    assert made.spec.resources.cpu == "8"
    master = made.spec.overlay["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    assert master["containers"][0]["resources"]["limits"] == {"cpu": "2"}
    assert made.spec.image == "registry/other:1"
    assert "Worker runs another image, registry/train:1" in " ".join(made.notes)


def test_an_entrypoint_that_only_the_image_knows():
    made = adopt(dump(job({"command": None, "args": ["--epochs", "5"]})))
    assert made.spec.run.command[0] == "sh"
    assert made.spec.run.args == ("--epochs", "5")
    rendered = manifest(made.spec).document["spec"]["pytorchReplicaSpecs"]["Worker"]["template"][
        "spec"
    ]
    assert "command" not in rendered["containers"][0]
    assert any("entrypoint" in note for note in made.notes)


@pytest.mark.parametrize("flags", [["-P"], []], ids=["now", "before"])
def test_k8sjobs_own_commands_become_scripts_and_modules_again(flags):
    agent = ["python", *flags, "-m", "k8sjob.runtime"]
    made = adopted(job({"command": agent, "args": ["main.py", "-v"]}))
    assert (made.run.script, made.run.args) == ("main.py", ("-v",))
    assert "command" not in str(made.overlay)
    made = adopted(job({"command": agent, "args": ["-m", "pkg.train", "-v"]}))
    assert (made.run.module, made.run.args) == ("pkg.train", ("-v",))
    assert adopted(job({"command": agent})).run.command == AGENT


@pytest.mark.parametrize("target", [target.name for target in TARGETS])
def test_what_only_the_agents_settings_say_comes_back(target):
    trackers = {"mlflow": {"uri": "http://mlflow.team:5000"}, "wandb": {"offline": True}}
    job = {"name": "a", "image": "a", "run": {"script": "main.py"}, "tracking": trackers}
    preflight = {"max_slowdown": 2.5, "min_bandwidth": "1Gi"}
    more = {"target": target, "checkpoint": {"dir": "/data"}, "preflight": preflight}
    spec = JobSpec.model_validate({**job, **more})
    again = adopt(render(spec)).spec
    assert (again.tracking, again.checkpoint) == (spec.tracking, spec.checkpoint)
    assert again.runtime_config == spec.runtime_config
    assert "spec.nodeName" in render(spec)
    assert (again.overlay, again.pod_template) == ({}, {})


@pytest.mark.parametrize("target", [target.name for target in TARGETS])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_topology_of_kueue_is_that_of_every_kind(target, workers):
    kueue = {"kueue_queue": "q", "kueue_topology": {"required": "rack"}}
    job = {"name": "a", "image": "a", "run": {"script": "main.py"}, "target": target}
    spec = JobSpec.model_validate({**job, "replicas": {"workers": workers}, **kueue})
    again = adopt(render(spec)).spec
    assert (again.kueue_topology, again.annotations) == (spec.kueue_topology, spec.annotations)
    for other in TARGETS[1:]:  # Kueue refuses a group of one template
        assert "podset-group-name" not in render(again.with_(target=other.name))


@pytest.mark.parametrize(
    ("queue", "annotations"),
    [
        (None, {"podset-required-topology": "rack"}),
        ("q", {"podset-required-topology": "rack", "podset-group-name": "other"}),
        ("q", {"podset-required-topology": "rack", "podset-preferred-topology": "zone"}),
    ],
)
def test_what_kueues_topology_says_beyond_the_field_stays(queue, annotations):
    given = {f"kueue.x-k8s.io/{key}": value for key, value in annotations.items()}
    job = {"name": "a", "image": "a", "run": {"script": "main.py"}, "annotations": given}
    made = adopt(render(JobSpec.model_validate({**job, "kueue_queue": queue}))).spec
    assert (made.kueue_topology, made.annotations) == (None, given)


def test_variables_keep_their_meaning_and_their_order():
    env = [
        {"name": "HOST", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "LOGS", "value": "/logs/$(HOST)"},
        {"name": "PRICE", "value": "$$(5)"},
    ]
    made = adopted(job({"env": env}))
    assert made.run.env == {}
    rendered = manifest(made).document["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    names = [variable["name"] for variable in rendered["containers"][0]["env"]]
    assert names.index("HOST") < names.index("LOGS")
    assert adopted(job({"env": env[2:]})).run.env == {"PRICE": "$(5)"}
    assert adopted(job({"env": [{"name": "RANK", "value": "0"}]})).run.env == {}


def test_of_a_variable_that_is_there_twice_the_last_counts():
    twice = [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]
    assert adopted(job({"env": twice})).run.env == {"A": "2"}
    used = [twice[0], {"name": "B", "value": "$(A)"}, twice[1]]
    with pytest.raises(SpecError, match="is duplicated"):
        adopt(dump(job({"env": used})))


def test_workers_alone_and_elastic_ones():
    alone = job(workers=3)
    del alone["spec"]["pytorchReplicaSpecs"]["Master"]
    made = adopted(alone)
    assert made.replicas.workers == 2
    assert made.overlay["spec"]["pytorchReplicaSpecs"]["Master"] is None
    elastic = copy.deepcopy(alone)
    elastic["spec"]["elasticPolicy"] = {"minReplicas": 2, "maxReplicas": 4, "maxRestarts": 7}
    made = adopted(elastic)
    bounds = made.replicas.elastic
    assert (made.replicas.workers, bounds.min, bounds.max) == (2, 2, 4)
    assert made.policy.max_restarts == 7
    assert "pytorchReplicaSpecs" not in made.overlay["spec"]


def test_what_servers_wrote_is_left_out_and_reported():
    live = job(
        metadata={
            "uid": "1",
            "resourceVersion": "7",
            "managedFields": [],
            "creationTimestamp": "now",
            "labels": {"a": "b"},
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", "c": "d"},
        }
    )
    made = adopt(dump({**live, "status": {"conditions": []}}))
    note = made.notes[0]
    for name in ("metadata.uid", "metadata.managedFields", "last-applied", "status"):
        assert name in note
    assert made.spec.overlay["metadata"] == {"labels": {"a": "b"}, "annotations": {"c": "d"}}


def test_what_submit_has_noted_about_the_image_is_left_out():
    origin = Provenance("registry/train@sha256:1", "b", "b", "linux/amd64", ())
    spec = adopted(job())
    noted = yamldoc.parse(yamldoc.dump(manifest(spec, provenance=origin).document)).data
    assert IMAGE_ORIGIN in noted["metadata"]["annotations"]
    assert adopted(noted) == spec


def test_the_job_among_other_documents_and_in_a_list():
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}}
    several = "---\n".join([dump(config), dump(job())])
    made = adopt(several)
    assert made.spec.name == "digits"
    assert "ConfigMap settings is not part of the job; keep it in another file" in made.notes
    assert adopt(dump({"kind": "List", "items": [job()]})).spec == adopted(job())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found nothing; specify a file with one of PyTorchJob of kubeflow.org/v1, "),
        ("[1]", "found a document without a kind; specify"),
        ("kind: [x]", "found ['x']; specify"),
        (dump({"kind": "Service", "metadata": {"name": "x"}}), "found Service x; specify"),
        (f"{dump(job())}---\n{dump(job())}", "digits, PyTorchJob digits are several jobs"),
        ("a: [", "a bracket is never closed"),
        (dump({**job(), "apiVersion": "kubeflow.org/v2"}), "is not what the training operator"),
        (dump(job({"name": "main"})), "name the one that trains 'pytorch'"),
        (dump(job({"image": "UPPER"})), "image: 'UPPER' is not an image reference"),
        (dump(job(metadata={"name": "x" * 60})), "name: "),
        (dump(job(workers=0, master=False)), "spec.pytorchReplicaSpecs: "),
        (dump(job(elasticPolicy="x")), "spec.elasticPolicy: "),
        (dump(job({"env": [None]})), "env[0]: None is not a mapping"),
        (dump(job({"args": ["--epochs", None]})), "args[1]: None is not text"),
        (dump(job(pod={"volumes": [None]})), "volumes[0]: None is not a mapping"),
    ],
)
def test_what_cannot_be_adopted(text, message):
    with pytest.raises(SpecError) as error:
        adopt(text, "old.yaml")
    assert message in str(error.value)
    assert str(error.value).startswith("old.yaml")


def test_a_launcher_is_kept_and_reported():
    notes = adopt(dump(job({"command": ["torchrun", "x"]}))).notes
    assert any("launcher" in note for note in notes)
    assert any("without k8sjob's agent" in note for note in adopt(dump(job())).notes)


def env(*pairs):
    return {"env": [{"name": name, "value": value} for name, value in pairs]}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"resources": {"limits": {"cpu": 1}}}, {"resources": {"limits": {"cpu": "1000m"}}}, True),
        ({"resources": {"limits": {"cpu": 1}}}, {"resources": {"limits": {"cpu": "100m"}}}, False),
        ({"env": []}, {}, True),
        ({"imagePullPolicy": "IfNotPresent"}, {}, True),
        ({"imagePullPolicy": "Always"}, {}, False),
        ({"ports": [{"name": "pytorchjob-port", "containerPort": 23456}]}, {}, True),
        ({"ports": [{"name": "pytorchjob-port", "containerPort": 1}]}, {}, False),
        ({"command": ["a", "b"]}, {"command": ["b", "a"]}, False),
        ({"terminationMessagePolicy": "File"}, {}, False),
        (env(("A", "1"), ("B", "2")), env(("B", "2"), ("A", "1")), True),
        (env(("A", "1"), ("B", "$(A)")), env(("B", "$(A)"), ("A", "1")), False),
    ],
)
def test_containers_that_mean_the_same(one, other, same):
    assert same_meaning(job(one), job(other)) is same
    assert same_meaning(job(other), job(one)) is same


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"serviceAccount": "a"}, {"serviceAccountName": "a"}, True),
        ({"terminationGracePeriodSeconds": 30}, {}, True),
        ({"automountServiceAccountToken": False}, {}, False),
        ({"initContainers": FIRST}, {"initContainers": FIRST[::-1]}, False),
        ({"hostNetwork": False}, {}, True),
        ({"hostNetwork": True}, {"hostNetwork": 1}, False),
        ({"volumes": [{"name": "a", "emptyDir": {}}]}, {"volumes": [{"name": "a"}]}, False),
    ],
)
def test_pods_that_mean_the_same(one, other, same):
    assert same_meaning(job(pod=one), job(pod=other)) is same


def test_an_empty_elastic_policy_is_filled_in():
    empty, bounds = job(workers=2), {"minReplicas": 2, "maxReplicas": 2, "rdzvBackend": "c10d"}
    del empty["spec"]["pytorchReplicaSpecs"]["Master"]
    filled = copy.deepcopy(empty)
    empty["spec"]["elasticPolicy"], filled["spec"]["elasticPolicy"] = {}, bounds
    assert same_meaning(empty, filled)
    elastic = adopted(empty).replicas.elastic
    assert (elastic.min, elastic.max) == (2, 2)
