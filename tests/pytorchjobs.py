"""PyTorchJobs: a plain one, and a Hypothesis strategy for what people write, and nobody would."""

import copy

from hypothesis import strategies as st

NAMES = st.from_regex(r"[a-z]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True)
KEYS = st.one_of(NAMES, NAMES.map(lambda name: f"example.com/{name}"))
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
WORDS = st.one_of(
    TEXT, st.sampled_from(["$(RANK)", "$$(X)", "$HOME", "a$$b", "on", "1e3", "ü$(A)"])
)
VARIABLES = st.sampled_from(["A", "B", "RANK", "PET_NNODES", "LOCAL_RANK", "PYTHONPATH", "my.env"])
PATHS = st.sampled_from(["/data", "/dev/shm", "/a/b", "/out"])
AMOUNTS = st.sampled_from(["1", 2, "500m", "1Gi", "1024Mi", "2e3", "0.5", 1.5])


def optional(**fields):
    return st.fixed_dictionaries({}, optional=fields)


def maps(values):
    return st.dictionaries(KEYS, values, max_size=2)


def named(items, key="name"):
    return st.lists(items, max_size=3, unique_by=lambda item: item[key])


VARIABLE = st.one_of(
    st.fixed_dictionaries({"name": VARIABLES}, optional={"value": WORDS}),
    st.fixed_dictionaries(
        {
            "name": VARIABLES,
            "valueFrom": st.sampled_from(
                [
                    {"fieldRef": {"fieldPath": "status.podIP"}},
                    {"secretKeyRef": {"name": "wandb", "key": "token"}},
                ]
            ),
        }
    ),
)
ENV_FROM = st.lists(
    st.sampled_from(
        [
            {"secretRef": {"name": "wandb"}},
            {"configMapRef": {"name": "settings"}},
            {"configMapRef": {"name": "maybe", "optional": True}},
            {"secretRef": {"name": "s3"}, "prefix": "S3_"},
        ]
    ),
    max_size=2,
)
PROBE = optional(
    tcpSocket=st.just({"port": 23456}),
    exec=st.just({"command": ["true"]}),
    periodSeconds=st.integers(1, 9),
)
RESOURCES = optional(
    limits=st.dictionaries(
        st.sampled_from(["cpu", "memory", "nvidia.com/gpu", "amd.com/gpu", "rdma/hca"]), AMOUNTS
    ),
    requests=st.dictionaries(
        st.sampled_from(["cpu", "memory", "ephemeral-storage", "hugepages-2Mi"]), AMOUNTS
    ),
)
MOUNT = st.fixed_dictionaries(
    {"name": st.sampled_from(["data", "shm", "dshm"]), "mountPath": PATHS},
    optional={"subPath": NAMES, "readOnly": st.booleans(), "mountPropagation": st.just("None")},
)
SOURCES = st.sampled_from(
    [
        {"persistentVolumeClaim": {"claimName": "data"}},
        {"persistentVolumeClaim": {"claimName": "data", "readOnly": True}},
        {"hostPath": {"path": "/mnt", "type": "Directory"}},
        {"hostPath": {"path": "/mnt"}},
        {"configMap": {"name": "settings", "items": [{"key": "a", "path": "b"}]}},
        {"secret": {"secretName": "token", "defaultMode": 256}},
        {"emptyDir": {}},
        {"emptyDir": {"medium": "Memory"}},
        {"emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}},
        {"nfs": {"server": "files", "path": "/"}},
    ]
)
VOLUME = st.builds(
    lambda name, source: {"name": name, **source}, st.sampled_from(["data", "shm", "dshm"]), SOURCES
)
PORT = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["pytorchjob-port", "metrics"]),
        "containerPort": st.sampled_from([23456, 8080]),
    },
    optional={"protocol": st.sampled_from(["TCP", "UDP"])},
)
CONTAINER_FIELDS = {
    "imagePullPolicy": st.sampled_from(["Always", "IfNotPresent", "Never"]),
    "command": st.lists(WORDS, max_size=3),
    "args": st.lists(WORDS, max_size=3),
    "env": named(VARIABLE),
    "envFrom": ENV_FROM,
    "resources": RESOURCES,
    "volumeMounts": named(MOUNT, "mountPath"),
    "ports": st.one_of(named(PORT), st.just([{"containerPort": 8080}])),
    "readinessProbe": PROBE,
    "lifecycle": st.just({"preStop": {"exec": {"command": ["sleep", "5"]}}}),
    "securityContext": st.sampled_from(
        [
            {},
            {"capabilities": {"add": ["IPC_LOCK"]}},
            {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        ]
    ),
    "terminationMessagePolicy": st.sampled_from(["File", "FallbackToLogsOnError"]),
    "workingDir": PATHS,
    "tty": st.booleans(),
}


def container(name, images):
    return st.fixed_dictionaries({"name": name, "image": images}, optional=CONTAINER_FIELDS)


@st.composite
def pods(draw, images):
    made = draw(
        optional(
            initContainers=named(container(st.sampled_from(["first", "a"]), images)),
            volumes=named(VOLUME),
            serviceAccountName=NAMES,
            serviceAccount=NAMES,
            automountServiceAccountToken=st.booleans(),
            nodeSelector=maps(st.just("gpu")),
            tolerations=st.lists(st.just({"key": "gpu", "operator": "Exists"}), max_size=1),
            affinity=st.just({"podAntiAffinity": {}}),
            topologySpreadConstraints=st.just([{"maxSkew": 1, "topologyKey": "zone"}]),
            hostNetwork=st.booleans(),
            hostIPC=st.sampled_from([True]),
            dnsPolicy=st.sampled_from(["ClusterFirst", "ClusterFirstWithHostNet"]),
            schedulerName=st.sampled_from(["default-scheduler", "volcano"]),
            priorityClassName=NAMES,
            runtimeClassName=NAMES,
            imagePullSecrets=named(st.fixed_dictionaries({"name": NAMES})),
            securityContext=st.sampled_from(
                [{}, {"fsGroup": 7}, {"runAsNonRoot": True, "fsGroup": 1000}]
            ),
            terminationGracePeriodSeconds=st.sampled_from([0, 1, 30, 600]),
            restartPolicy=st.just("Never"),
            hostAliases=st.just([{"ip": "10.0.0.1", "hostnames": ["a"]}]),
        )
    )
    sidecar = container(st.sampled_from(["sidecar", "tensorboard"]), images)
    trainer = draw(container(st.just("pytorch"), images))
    return {**made, "containers": draw(st.permutations([trainer, *draw(named(sidecar))]))}


@st.composite
def replicas(draw, pod, counts):
    metadata = optional(labels=maps(NAMES), annotations=maps(TEXT), creationTimestamp=st.none())
    restarts = st.sampled_from(["OnFailure", "Never", "ExitCode", "Always", "Onfailure"])
    made = draw(optional(restartPolicy=restarts))
    if counts is not None:
        made["replicas"] = draw(counts)
    template = {"spec": pod, **draw(optional(metadata=metadata))}
    return {**made, "template": template}


@st.composite
def manifests(draw):
    """A PyTorchJob that the operator's webhook accepts."""
    images = st.sampled_from(
        ["registry/team/train:1", "train", "train:latest", "a@sha256:" + "0" * 64]
    )
    first, second = draw(pods(images)), draw(pods(images))
    worker_pod = first if draw(st.booleans()) else second
    roles = {}
    shape = draw(st.sampled_from(["both", "both", "both", "master", "workers"]))
    if shape != "workers":
        roles["Master"] = draw(replicas(first, st.just(1)))
    if shape != "master":
        roles["Worker"] = draw(
            replicas(worker_pod, draw(st.sampled_from([st.integers(1, 5), None])))
        )
    spec = draw(
        optional(
            nprocPerNode=st.sampled_from(["auto", "1", "2", "gpu"]),
            runPolicy=optional(
                cleanPodPolicy=st.sampled_from(["None", "Running", "All", "none"]),
                backoffLimit=st.integers(0, 30),
                ttlSecondsAfterFinished=st.integers(0, 99),
                activeDeadlineSeconds=st.integers(1, 99),
                suspend=st.booleans(),
                managedBy=st.just("kubeflow.org/training-operator"),
                schedulingPolicy=optional(
                    minAvailable=st.integers(1, 9),
                    queue=NAMES,
                    minResources=st.just({"cpu": "1000m"}),
                    scheduleTimeoutSeconds=st.just(5),
                ),
            ),
        )
    )
    if shape != "master" and draw(st.booleans()):
        spec["elasticPolicy"] = draw(
            optional(
                minReplicas=st.integers(1, 3),
                maxReplicas=st.integers(1, 6),
                maxRestarts=st.integers(0, 3),
                rdzvId=NAMES,
                rdzvConf=st.just([{"key": "timeout", "value": "60"}]),
            )
        )
    labels = maps(NAMES)
    if draw(st.integers(0, 4)) == 0:
        labels = st.just({"kueue.x-k8s.io/queue-name": "research"})
    metadata = {"name": draw(NAMES), **draw(optional(labels=labels, annotations=maps(TEXT)))}
    if draw(st.booleans()):
        metadata["namespace"] = draw(NAMES)
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata,
        "spec": {**spec, "pytorchReplicaSpecs": roles},
    }


CONTAINER = {"name": "pytorch", "image": "registry/train:1", "command": ["python", "main.py"]}


def pytorchjob(container=None, pod=None, *, workers=3, master=True, metadata=None, **spec):
    """A job whose replicas are alike: fields of their containers, of their Pods, and its own."""

    def replica(count):
        made = {"containers": [CONTAINER | (container or {})], **(pod or {})}
        return {"replicas": count, "template": {"spec": copy.deepcopy(made)}}

    roles = {"Master": replica(1)} if master else {}
    if workers:
        roles["Worker"] = replica(workers)
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "digits", **(metadata or {})},
        "spec": {**spec, "pytorchReplicaSpecs": roles},
    }
