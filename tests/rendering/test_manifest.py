"""What a field of the spec becomes in the PyTorchJob."""

import json

import pytest
import yaml

from k8sjob.adopt import adopt
from k8sjob.contract import RuntimeConfig
from k8sjob.kube.objects import IMAGE_ORIGIN, MANIFEST_DIGEST, NOTIFY
from k8sjob.provenance import Provenance
from k8sjob.rendering.manifest import container_argv, container_env, literal, manifest, render
from k8sjob.targets.pytorchjob.target import backoff_limit


def replica(rendered, role="Master"):
    return rendered["spec"]["pytorchReplicaSpecs"][role]


def pod(rendered, role="Master"):
    return replica(rendered, role)["template"]["spec"]


def container(rendered, role="Master"):
    (only,) = pod(rendered, role)["containers"]
    return only


def test_a_small_job(job, crd_problems):
    rendered = manifest(job(namespace="team", replicas={"workers": 3})).document
    assert (rendered["apiVersion"], rendered["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert (rendered["metadata"]["name"], rendered["metadata"]["namespace"]) == ("digits", "team")
    assert rendered["metadata"]["labels"] == {"app.kubernetes.io/managed-by": "k8sjob"}
    assert {r: replica(rendered, r)["replicas"] for r in ("Master", "Worker")} == {
        "Master": 1,
        "Worker": 3,
    }
    assert rendered["spec"]["nprocPerNode"] == "1"
    assert rendered["spec"]["runPolicy"] == {
        "cleanPodPolicy": "Running",
        "backoffLimit": 13,
        "suspend": False,
    }
    for role in ("Master", "Worker"):
        annotations = replica(rendered, role)["template"]["metadata"]["annotations"]
        assert annotations == {"sidecar.istio.io/inject": "false"}
        assert replica(rendered, role)["restartPolicy"] == "ExitCode"
        assert container(rendered, role)["name"] == "pytorch"
        assert container(rendered, role)["command"] == ["python", "-P", "-m", "k8sjob.runtime"]
        assert container(rendered, role)["args"] == ["main.py"]
        assert pod(rendered, role)["automountServiceAccountToken"] is False
        assert pod(rendered, role)["terminationGracePeriodSeconds"] == 60
    assert crd_problems(rendered) == []


def test_absent_fields_stay_absent(job):
    rendered = manifest(job(resources={"shm": 0})).document
    assert "namespace" not in rendered["metadata"]
    assert list(rendered["spec"]["pytorchReplicaSpecs"]) == ["Master"]
    fields = "automountServiceAccountToken containers terminationGracePeriodSeconds"
    assert set(pod(rendered)) == set(fields.split())
    fields = "args command env image name ports terminationMessagePolicy"
    assert set(container(rendered)) == set(fields.split())


def test_equal_specs_are_equal_text_and_the_hash_tells_others(job):
    one, two = (render(job(run={"script": "main.py", "env": {"A": v}})) for v in "12")
    assert one == render(job(run={"script": "main.py", "env": {"A": "1"}}))
    hashes = [yaml.safe_load(t)["metadata"]["annotations"][MANIFEST_DIGEST] for t in (one, two)]
    assert hashes[0] != hashes[1]
    assert all(len(text) == 64 and int(text, 16) for text in hashes)


def test_what_the_image_was_made_of_is_carried_and_makes_no_other_job(job):
    origin = Provenance("i@sha256:1", "b@sha256:2", "b@sha256:2", "linux/amd64", ())
    with_it, without = (
        manifest(job(), provenance=one).document["metadata"]["annotations"]
        for one in (origin, None)
    )
    assert Provenance.decode(with_it.pop(IMAGE_ORIGIN)) == origin
    assert with_it == without


def test_the_image_of_a_build(built):
    digest = "registry.example/team/digits@sha256:" + "0" * 64
    assert container(manifest(built(), digest).document)["image"] == digest
    assert container(manifest(built()).document)["image"] == "registry.example/team/digits"


BECOMES = """
the limits are the requests:
- resources: {gpus: 1, cpu: 4, memory: 32Gi, extended: {rdma/hca: 1}}
- Master.container.resources: &resources
    limits: &limits {cpu: "4", memory: 32Gi, nvidia.com/gpu: 1, rdma/hca: "1"}
    requests: *limits
  Worker.container.resources: *resources

requests may be less, and the Master different:
- resources:
    {cpu: 4, memory: 8Gi, requests: {cpu: 500m}, master: {memory: 16Gi, shm: 1Gi}}
- Worker.container.resources:
    {limits: {cpu: "4", memory: 8Gi}, requests: {cpu: 500m, memory: 8Gi}}
  Master.container.resources.limits: {cpu: "4", memory: 16Gi}
  Master.pod.volumes: [{name: dshm, emptyDir: {medium: Memory, sizeLimit: 1Gi}}]
  Worker.pod.volumes: [{name: dshm, emptyDir: {medium: Memory}}]

requests without limits:
- resources: {requests: {cpu: 2}}
- Master.container.resources: {requests: {cpu: "2"}}

shared memory:
- resources: {shm: 8Gi}
- Master.pod.volumes: [{name: dshm, emptyDir: {medium: Memory, sizeLimit: 8Gi}}]
  Master.container.volumeMounts: [{name: dshm, mountPath: /dev/shm}]

a type of GPU selects nodes beside the user's labels:
- {resources: {gpus: 2, gpu_type: NVIDIA-A100}, node_selector: {pool: gpu}}
- Master.pod.nodeSelector: {nvidia.com/gpu.product: NVIDIA-A100, pool: gpu}
  spec.nprocPerNode: "2"

volumes:
- resources: {shm: 0}
  volumes:
  - {name: claim, mount: /claim, pvc: datasets, sub_path: mnist}
  - {name: node, mount: /node, host_path: /mnt/x, read_only: true}
  - {name: settings, mount: /settings, config_map: settings}
  - {name: token, mount: /token, secret: token}
  - {name: scratch, mount: /scratch, empty_dir: {}}
  - {name: fast, mount: /fast, empty_dir: {medium: Memory, size_limit: 1Gi}}
- Master.pod.volumes:
  - {name: claim, persistentVolumeClaim: {claimName: datasets}}
  - {name: node, hostPath: {path: /mnt/x}}
  - {name: settings, configMap: {name: settings}}
  - {name: token, secret: {secretName: token}}
  - {name: scratch, emptyDir: {}}
  - {name: fast, emptyDir: {medium: Memory, sizeLimit: 1Gi}}
  Master.container.volumeMounts:
  - {name: claim, mountPath: /claim, subPath: mnist}
  - {name: node, mountPath: /node, readOnly: true}
  - {name: settings, mountPath: /settings}
  - {name: token, mountPath: /token}
  - {name: scratch, mountPath: /scratch}
  - {name: fast, mountPath: /fast}

secrets by reference:
- run: {script: main.py, env_from: [{secret: wandb}, {config_map: settings}]}
- Master.container.envFrom: [secretRef: {name: wandb}, configMapRef: {name: settings}]

labels of the job and its pods:
- labels: {team: vision}
- metadata.labels: &labels {team: vision, app.kubernetes.io/managed-by: k8sjob}
  Master.template.metadata.labels: *labels

run policy:
- policy:
    {clean_pod_policy: "None", restart_policy: ExitCode, suspend: true, ttl_after_finished: 1d,
     active_deadline: 2h, termination_grace: 90s}
- spec.runPolicy:
    {cleanPodPolicy: "None", backoffLimit: 7, suspend: true, ttlSecondsAfterFinished: 86400,
     activeDeadlineSeconds: 7200}
  Master.restartPolicy: ExitCode
  Master.pod.terminationGracePeriodSeconds: 90

elastic:
- replicas: {workers: 2, elastic: {min: 2, max: 4}}
- Master: null
  Worker.replicas: 3
  spec.elasticPolicy: {rdzvBackend: c10d, minReplicas: 2, maxReplicas: 4, maxRestarts: 3}

queues:
- gang: {scheduler: volcano, queue: research}
  priority_class: high
  kueue_queue: research
  kueue_priority_class: production
  kueue_topology: {preferred: rack}
- metadata.labels:
    app.kubernetes.io/managed-by: k8sjob
    kueue.x-k8s.io/queue-name: research
    kueue.x-k8s.io/priority-class: production
  spec.runPolicy.suspend: true
  spec.runPolicy.schedulingPolicy: {minAvailable: 2, queue: research, priorityClass: high}
  Worker.pod.schedulerName: volcano
  Worker.pod.priorityClassName: high
  Worker.template.metadata.annotations:
    sidecar.istio.io/inject: "false"
    kueue.x-k8s.io/podset-preferred-topology: rack
    kueue.x-k8s.io/podset-group-name: digits

a group of Pods has two parts:
- {replicas: {workers: 0}, kueue_queue: q, kueue_topology: {required: rack}}
- Master.template.metadata.annotations:
    {sidecar.istio.io/inject: "false", kueue.x-k8s.io/podset-required-topology: rack}

the Pods of an elastic job are one part:
- replicas: {workers: 1, elastic: {min: 1, max: 2}}
  kueue_queue: q
  kueue_topology: {required: rack}
- Worker.template.metadata.annotations:
    {sidecar.istio.io/inject: "false", kueue.x-k8s.io/podset-required-topology: rack}

a gang of some:
- {replicas: {workers: 3}, gang: {min_available: 2}}
- {spec.runPolicy.schedulingPolicy: {minAvailable: 2}, Master.pod.schedulerName: null}

fields of the pods:
- runtime_class: nvidia
  host_network: true
  service_account: trainer
  service_account_token: true
  tolerations: &tolerations [{key: gpu, operator: Exists}]
  topology_spread: &spread [{maxSkew: 1, topologyKey: zone, whenUnsatisfiable: DoNotSchedule}]
  affinity: &affinity {podAffinity: {requiredDuringSchedulingIgnoredDuringExecution: []}}
- Worker.pod.runtimeClassName: nvidia
  Worker.pod.hostNetwork: true
  Worker.pod.dnsPolicy: ClusterFirstWithHostNet
  Worker.pod.serviceAccountName: trainer
  Worker.pod.automountServiceAccountToken: true
  Worker.pod.tolerations: *tolerations
  Worker.pod.topologySpreadConstraints: *spread
  Worker.pod.affinity: *affinity

# The terms are alternatives, and an empty one matches no node.
nodes to avoid, beside an affinity:
- policy: {avoid_nodes: [n1, n2]}
  affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [
      {matchExpressions: [&zone {key: zone, operator: In, values: [a]}]}, {}]}}}
- Worker.pod.affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution:
    {nodeSelectorTerms: [{matchExpressions: [*zone], matchFields: [
      {key: metadata.name, operator: NotIn, values: [n1]},
      {key: metadata.name, operator: NotIn, values: [n2]}]}, {}]}}}

settings of an image:
- image: {repository: r/x, base: "python:3.12", platform: linux/arm64, pull_secrets: [a, b, a],
          pull_policy: Always}
- Master.container.imagePullPolicy: Always
  Master.pod.imagePullSecrets: [name: a, name: b]
  Master.pod.nodeSelector: {kubernetes.io/arch: arm64}

restricted, of a built image, is for the whole pod:
- {security: restricted, image: {repository: r/x, base: "python:3.12"}}
- Worker.pod.securityContext: {runAsNonRoot: true, runAsUser: 1000, runAsGroup: 1000,
    seccompProfile: {type: RuntimeDefault}, fsGroup: 1000, fsGroupChangePolicy: OnRootMismatch}
  Worker.container.securityContext:
    {runAsNonRoot: true, allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}

# The operator adds an init container of root's to Workers, which nothing may forbid.
restricted, of another image, leaves the init container its user:
- {security: restricted}
- Worker.pod.securityContext.runAsNonRoot: null
  Worker.pod.securityContext.runAsUser: null
  Worker.container.securityContext.runAsNonRoot: true

openshift names no ids, which the namespace chooses:
- {security: openshift, image: {repository: r/x, base: "python:3.12"}}
- Worker.pod.securityContext: {seccompProfile: {type: RuntimeDefault}}
  Worker.container.securityContext:
    {runAsNonRoot: true, allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}

a built image may write to its claims:
- image: {repository: r/x, base: "python:3.12"}
- Master.pod.securityContext: {fsGroup: 1000, fsGroupChangePolicy: OnRootMismatch}

another image decides by itself:
- {}
- Master.pod.securityContext: null
"""
BECOMES = yaml.safe_load(BECOMES)
"""For each: fields of a spec, and what is at some places of its manifest."""


def at(rendered, where):
    """The part of a manifest at a path; `Worker.pod` and `Worker.container` are short."""
    role, _, rest = where.partition(".")
    if role in {"Master", "Worker"}:
        found, rest = rendered["spec"]["pytorchReplicaSpecs"].get(role), rest.split(".")
        if rest[0] in {"pod", "container"}:
            found = {"pod": pod, "container": container}[rest.pop(0)](rendered, role)
    else:
        found, rest = rendered, where.split(".")
    for key in filter(None, rest):
        found = found.get(key)
    return found


@pytest.mark.parametrize("name", BECOMES)
def test_what_fields_become(job, crd_problems, name):
    fields, expected = BECOMES[name]
    rendered = manifest(job(**{"replicas": {"workers": 1}, **fields})).document
    assert {where: at(rendered, where) for where in expected} == expected
    assert crd_problems(rendered) == []


def test_the_runtime_reads_its_settings_from_one_variable(job):
    spec = job(run={"script": "main.py", "env": {"A": "x"}}, checkpoint={"dir": "/ckpt"})
    env = {item["name"]: item["value"] for item in container(manifest(spec).document)["env"]}
    assert env == container_env(spec) == {"A": "x", "K8SJOB_CONFIG": spec.runtime_config.encode()}
    settings = json.loads(env["K8SJOB_CONFIG"])
    assert settings.pop("version") == 1
    assert RuntimeConfig(**settings) == spec.runtime_config


@pytest.mark.parametrize(
    ("run", "command", "args"),
    [
        (
            {"script": "a b.py", "args": ["-x"]},
            ["python", "-P", "-m", "k8sjob.runtime"],
            ["a b.py", "-x"],
        ),
        ({"module": "pkg.train"}, ["python", "-P", "-m", "k8sjob.runtime"], ["-m", "pkg.train"]),
        ({"command": ["torchrun", "x.py"], "args": ["1"]}, ["torchrun", "x.py"], ["1"]),
        ({"command": ["sh", "-c", "echo $(date)"]}, ["sh", "-c", "echo $(date)"], []),
    ],
)
def test_what_is_started(job, run, command, args):
    assert container_argv(job(run=run)) == (command, args)
    rendered = container(manifest(job(run=run)).document)
    assert [expanded(word) for word in rendered["command"]] == command
    assert [expanded(word) for word in rendered.get("args", [])] == args


def expanded(text):
    """What the process sees: Kubernetes' expand.go, byte by byte, where every variable is 'VALUE'.

    A `$` that starts nothing is written together with the next *byte* as a code point of its own,
    so that in front of anything but ASCII the text is damaged.
    """
    made, data, at = bytearray(), text.encode(), 0
    while at < len(data):
        following = data[at + 1 : at + 2]
        if data[at : at + 1] != b"$" or not following:
            made, at = made + data[at : at + 1], at + 1
        elif following == b"$":
            made, at = made + b"$", at + 2
        elif following == b"(" and (end := data.find(b")", at)) > 0:
            made, at = made + b"VALUE", end + 1
        else:
            made, at = made + b"$" + chr(following[0]).encode(), at + 2
    return made.decode(errors="replace")


HOSTILE = ["$(X)", "$$(X)", "$$", "$", "a$", "$HOME", "$(", "$()", "$$$(A)$$", "$é", "$$é", "${X}"]


@pytest.mark.parametrize("text", HOSTILE)
def test_dollars_reach_the_process_as_they_are(job, text):
    assert expanded(literal(text)) == text
    spec = job(run={"script": "main.py", "args": [text], "env": {"A": text}})
    rendered = container(manifest(spec).document)
    assert expanded(rendered["args"][1]) == text
    assert expanded(rendered["env"][0]["value"]) == text


def test_the_expansion_of_this_test_is_that_of_kubernetes():
    assert expanded("$(X) $$(X) $x $ $( $$") == "VALUE $(X) $x $ $( $"
    assert expanded("$é") == "$Ã\ufffd"


def test_the_istio_annotation_can_be_changed_and_left_out(job):
    def annotations(**given):
        metadata = replica(manifest(job(annotations=given)).document)["template"]["metadata"]
        return metadata.get("annotations", {})

    key = "sidecar.istio.io/inject"
    assert annotations(**{key: "true"}) == {key: "true"}
    assert annotations(**{key: None}) == {}
    assert annotations(team="a") == {key: "false", "team": "a"}


@pytest.mark.parametrize("workers", [0, 1, 3, 64])
@pytest.mark.parametrize("restarts", [1, 3])
def test_peers_restarts_never_fail_a_job(job, workers, restarts):
    spec = job(replicas={"workers": workers}, policy={"max_restarts": restarts})
    limit = manifest(spec).document["spec"]["runPolicy"]["backoffLimit"]
    nodes = workers + 1
    # The operator's rule: the job fails once the sum of the restarts of all pods is >= the limit.
    assert restarts * nodes < limit <= restarts * nodes + 1


def test_backoff_limit_at_its_ends(job):
    assert backoff_limit(job(policy={"max_restarts": 0})) == 0
    elastic = {"workers": 1, "elastic": {"min": 1, "max": 8}}
    assert backoff_limit(job(replicas=elastic, policy={"max_restarts": 2})) == 17
    most = {"replicas": {"workers": 9999}, "policy": {"max_restarts": 1000}, "name": "j"}
    assert backoff_limit(job(**most)) < 2**31


@pytest.mark.parametrize("target", ["pytorchjob", "job", "jobset", "trainjob"])
def test_messages_that_a_job_chooses(job, target):
    """They are the job's own annotation, part of what is compared, and come back by adopt."""
    chosen = {notify: job(target=target, notify=notify) for notify in (None, (), ("failed",))}
    made = {
        notify: manifest(spec).document["metadata"]["annotations"]
        for notify, spec in chosen.items()
    }
    assert [one.get(NOTIFY) for one in made.values()] == [None, "", "failed"]
    assert len({one[MANIFEST_DIGEST] for one in made.values()}) == 3
    for notify, spec in chosen.items():
        again = adopt(render(spec)).spec
        assert (again.notify, dict(again.overlay)) == (notify, {})


@pytest.mark.parametrize(
    ("claim", "mounted"),
    [
        ({}, {"checkpoints": "/checkpoints"}),
        ({"name": "data", "mount": "/checkpoints"}, {"data": "/checkpoints"}),
        (
            {"name": "checkpoints", "mount": "/elsewhere"},
            {"checkpoints": "/elsewhere", "checkpoints-0": "/checkpoints"},
        ),
    ],
)
def test_checkpoints_on_no_volume_get_a_folder_of_the_pod(job, claim, mounted):
    volumes = [{**claim, "pvc": "claim"}] if claim else []
    made = manifest(job(checkpoint={"dir": "/checkpoints"}, volumes=volumes)).document
    mounts = {one["name"]: one["mountPath"] for one in container(made)["volumeMounts"]}
    assert mounts == {"dshm": "/dev/shm", **mounted}
    folders = {one["name"] for one in pod(made)["volumes"] if one.get("emptyDir") == {}}
    assert folders == mounted.keys() - {claim.get("name")}
