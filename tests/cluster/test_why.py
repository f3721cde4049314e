"""Every cause is caused: jobs that cannot work, all side by side, and what `why` says of each.

The jobs are plain PyTorchJobs, as others make them, too.
"""

import copy
import functools
import json
import time
import uuid

import pytest

from k8sjob.backends.api import JobRef
from k8sjob.backends.cluster import connect
from k8sjob.observe.diagnose import Cause, diagnose
from k8sjob.observe.logs import last_lines
from k8sjob.observe.status import JobState, job_status
from k8sjob.targets.jobs import job_of

pytestmark = pytest.mark.cluster

SECONDS = 900  # until a cause must have shown itself: all of them share one node
FOR_EVER = "sleep 3000"
GHOST = "k8sjob-tests/ghost"  # taint of nodes without a machine: only these jobs tolerate it
HERE, THERE = "{base}", "127.0.0.1:1/train:1"  # an image that is there, one behind no registry


def container(script="true", *, image=HERE, **more):
    return {"name": "pytorch", "image": image, "command": ["sh", "-c", script], **more}


def python(code, **env):
    pairs = [{"name": name, "value": value} for name, value in {"USE_LIBUV": "0", **env}.items()]
    return container(command=["python3", "-c", code], env=pairs)


def replicas(trainer=None, *, restart="OnFailure", count=1, **pod):
    spec = {"containers": [trainer or container()], "terminationGracePeriodSeconds": 1, **pod}
    return {"replicas": count, "restartPolicy": restart, "template": {"spec": spec}}


def job(name, master, worker=None, *, labels=None, **spec):
    roles = {"Master": master, **({"Worker": worker} if worker else {})}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {"pytorchReplicaSpecs": roles, **spec},
    }


def asking(**resources):
    return {"resources": {"limits": resources}}


def variable(**source):
    return {"env": [{"name": "X", "valueFrom": source}]}


def volume(**source):
    mounts = [{"name": "v", "mountPath": "/v"}]
    return replicas(container(volumeMounts=mounts), volumes=[{"name": "v", **source}])


def on(node):
    return {
        "nodeSelector": {"kubernetes.io/hostname": node},
        "tolerations": [{"operator": "Exists"}],
        "terminationGracePeriodSeconds": 600,
    }


RUNS = replicas(container(FOR_EVER))
MEET = """
import datetime, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds={}))
"""
PEERS = """
import os, traceback, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(10000):
    if dist.get_rank() == 1 and step == 3:
        try:
            raise ValueError("the loss is no number")
        finally:
            traceback.print_exc()
            os._exit(1)
    dist.all_reduce(torch.ones(1))
"""
TWICE = """
import socket
one, two = socket.socket(), socket.socket()
one.bind(("127.0.0.1", 0))
one.listen()
two.bind(one.getsockname())
"""
HANDLES = """
import sys, traceback
try:
    import flash_attn
except ImportError:
    traceback.print_exc()
print("Address already in use, trying the next port", file=sys.stderr)
print("epoch 1 loss 0.5", file=sys.stderr, flush=True)
{}["lr"]
"""
LEAVES = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(10000):
    if dist.get_rank() == 1 and step == 3:
        os._exit(0)
    dist.all_reduce(torch.ones(1))
"""
BREAKS = """
import os, socket, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    for fd in range(3, 200):
        try:
            one = socket.socket(fileno=os.dup(fd))
            one.getpeername()
            one.shutdown(socket.SHUT_RDWR)
        except OSError:  # no socket, or none that is connected
            pass
    time.sleep(1000)
dist.all_reduce(torch.ones(1))
"""
PROBED = container(FOR_EVER, readinessProbe={"exec": {"command": ["false"]}})
MINE = {"name": "mine", "image": HERE, "command": ["sh", "-c", "exit 6"]}

# (name, job, first cause, what its message says, replicas)
# fmt: off
FAULTS = [
    # images
    ("image-missing", {"master": replicas(container(image="{registry}/k8sjob-tests:no-such"))},
     Cause.IMAGE_MISSING, "there is no image {registry}/k8sjob-tests:no-such"),
    ("image-registry", {"master": replicas(container(image=THERE))},
     Cause.REGISTRY, f"the image {THERE} cannot be reached"),
    ("image-name", {"master": replicas(container(image="Train:1:2"))},
     Cause.IMAGE_NAME, "'Train:1:2' is not a valid image name"),
    ("image-access", {"master": replicas(container(image="127.0.0.1:{closed}/secret/train:1"))},
     Cause.IMAGE_ACCESS, "the registry refuses the image 127.0.0.1:{closed}/secret/train:1"),
    ("image-never", {"master": replicas(container(image=THERE, imagePullPolicy="Never"))},
     Cause.IMAGE_MISSING, "pull policy, Never"),
    ("image-junk", {"master": replicas(container(image="127.0.0.1:{closed}/junk/train:1"))},
     Cause.IMAGE, "the image 127.0.0.1:{closed}/junk/train:1"),
    ("image-init", {"master": replicas(initContainers=[{"name": "mine", "image": THERE}])},
     Cause.REGISTRY, THERE),
    # nodes
    ("gpus", {"master": replicas(container(**asking(**{"nvidia.com/gpu": "8"})),
                                 tolerations=[{"key": GHOST, "operator": "Exists"}])},
     Cause.UNSCHEDULABLE, "of A100 with 4, "),
    ("gpu-kind", {"master": replicas(container(**asking(**{"example.com/gpu": "1"})))},
     Cause.UNSCHEDULABLE, "no node offers any example.com/gpu"),
    ("cpus", {"master": replicas(container(resources={"requests": {"cpu": "1000"}}))},
     Cause.UNSCHEDULABLE, "too little cpu (it requests 1000, and the largest node has "),
    ("taint", {"master": replicas(nodeSelector={"kubernetes.io/hostname": "{mark}-gpus"})},
     Cause.UNSCHEDULABLE, f"a taint that it does not tolerate ({GHOST}"),
    ("selector", {"master": replicas(nodeSelector={"gpu": "a100"})},
     Cause.UNSCHEDULABLE, "lacks the labels that it requires (gpu=a100)"),
    ("scheduler", {"master": replicas(schedulerName="nobody")},
     Cause.WAITING, "the scheduler 'nobody' has not considered it"),
    ("lost", {"master": replicas(**on("{mark}-lost"))},
     Cause.NODE_LOST, "its node {mark}-lost is not ready"),
    ("evicted", {"master": replicas(container(f"head -c 99M /dev/zero > /tmp/x; {FOR_EVER}",
                                              **asking(**{"ephemeral-storage": "10Mi"})),
                                    restart="Never")},
     Cause.EVICTED, "evicted by its node"),
    ("drained", {"master": replicas(container(FOR_EVER), terminationGracePeriodSeconds=900)},
     Cause.EVICTED, "its node was drained, or it was evicted by request"),
    ("preempted", {"master": replicas(container(**asking(**{"nvidia.com/gpu": "4"})),
                                      **on("{mark}-gpus"))},
     Cause.PREEMPTED, "it was preempted by a pod with a higher priority"),
    # volumes, secrets, settings
    ("claim-missing", {"master": volume(persistentVolumeClaim={"claimName": "nowhere"})},
     Cause.VOLUME_CLAIM, "there is no claim 'nowhere'"),
    ("claim-pending", {"master": volume(persistentVolumeClaim={"claimName": "pending"})},
     Cause.VOLUME_CLAIM, "the claim 'pending' has no volume: no persistent volumes available"),
    ("secret", {"master": replicas(container(**variable(secretKeyRef={"name": "hf", "key": "t"})))},
     Cause.SECRET, "there is no secret 'hf'"),
    ("secret-key",
     {"master": replicas(container(**variable(secretKeyRef={"name": "known", "key": "t"})))},
     Cause.SECRET, "the secret 'known' has no key 't'"),
    ("config", {"master": volume(configMap={"name": "settings"})},
     Cause.CONFIG_MAP, "there is no config map 'settings'"),
    ("path", {"master": volume(hostPath={"path": "/no/such", "type": "Directory"})},
     Cause.VOLUME, "hostPath type check failed: /no/such is not a directory"),
    ("root", {"master": replicas(securityContext={"runAsNonRoot": True})},
     Cause.CONTAINER, "runAsNonRoot"),
    ("init", {"master": replicas(initContainers=[MINE])},
     Cause.INIT, "its init container 'mine' ended with exit code 6"),
    # pods that cannot be made
    ("account", {"master": replicas(serviceAccountName="trainer")},
     Cause.SERVICE_ACCOUNT, "there is no service account 'trainer'"),
    ("n" * 55, {"master": RUNS},
     Cause.JOB_NAME, "too long"),
    ("taken", {"master": RUNS},
     Cause.NAME_TAKEN, "taken-master-0 already exists and does not belong to this job"),
    ("again", {"master": replicas(container(FOR_EVER), terminationGracePeriodSeconds=900)},
     Cause.NAME_TAKEN, "a pod of this name, of an earlier job, is still being deleted"),
    ("priority", {"master": replicas(priorityClassName="nobody")},
     Cause.REFUSED, "no PriorityClass with name nobody"),
    ("misfit", {"master": replicas(container(resources={"requests": {"cpu": "1000"}}),
                                   nodeName="{node}", restart="Never")},
     Cause.NODE_REFUSED, "node {node} rejected it: OutOfcpu"),
    ("sandbox", {"master": replicas(runtimeClassName="{mark}")},
     Cause.SANDBOX, "its node {node} cannot set it up"),
    ("unmade", {"master": volume(persistentVolumeClaim={"claimName": "unmade"})},
     Cause.VOLUME_CLAIM, "the claim 'unmade' has no volume: Waiting for a volume to be created"),
    # how containers end
    ("command", {"master": replicas(container(command=["no-such-program"]))},
     Cause.START, 'exec: "no-such-program": executable file not found'),
    ("folder", {"master": replicas(container(workingDir="/proc/no/such"))},
     Cause.START, "its working directory does not exist: mkdir /proc/no"),
    ("crash", {"master": replicas(container("echo 'ValueError: no' >&2; exit 3"))},
     Cause.CRASH, "exit code 3: ValueError: no"),
    ("crash-once", {"master": replicas(container("echo it > /dev/termination-log; exit 4"),
                                       restart="Never")},
     Cause.CRASH, "exit code 4: it"),
    ("signal", {"master": replicas(python("import ctypes; ctypes.string_at(0)"), restart="Never")},
     Cause.KILLED, "ended by SIGSEGV"),
    ("memory", {"master": replicas({**python("x = 'x' * 2**30"), **asking(memory="64Mi")})},
     Cause.MEMORY, "out of memory"),
    ("module", {"master": replicas(python("import no_such_package"))},
     Cause.MISSING_MODULE, "no module named 'no_such_package'"),
    ("retried", {"master": replicas(container("sleep 3; exit 130"), restart="ExitCode")},
     Cause.KILLED, "master-0: ended by SIGINT"),
    ("sidecar", {"master": replicas(containers=[
        container(), {**container(FOR_EVER), "name": "istio-proxy"}])},
     Cause.SIDECAR, "but its container 'istio-proxy' keeps the pod running"),
    ("limit", {"master": replicas(container("exit 5")), "runPolicy": {"backoffLimit": 1}},
     Cause.CRASH, "exit code 5"),
    ("interface", {"master": replicas(python(MEET.format(60), GLOO_SOCKET_IFNAME="ib7"),
                                      restart="Never")},
     Cause.INTERFACE, "ib7"),
    ("meeting", {"master": replicas(python(MEET.format(5)), restart="Never"), "nprocPerNode": "4"},
     Cause.RENDEZVOUS, "1 of 4 processes joined"),
    ("port", {"master": replicas(python(TWICE), restart="Never")},
     Cause.ADDRESS_IN_USE, "a port that it tried to listen on is in use"),
    ("peers", {"master": replicas(python(PEERS), restart="Never"),
               "worker": replicas(python(PEERS), restart="Never")},
     Cause.CRASH, "worker-0: exit code 1: ValueError: the loss is no number"),
    ("leaves", {"master": replicas(python(LEAVES), restart="Never"),
                "worker": replicas(python(LEAVES), restart="Never")},
     Cause.LEFT_EARLY, "worker-0 (rank 1) had ended with exit code 0, and master-0 still waited"),
    ("left", {"master": RUNS, "worker": replicas(restart="Never")},
     Cause.LEFT_EARLY, "worker-0 (rank 1) ended with exit code 0"),
    ("deleted", {"master": RUNS},
     Cause.POD_DELETED, "master-0: its pod was deleted while it ran"),
    ("handled", {"master": replicas(python(HANDLES), restart="Never")},
     Cause.CRASH, "exit code 1: KeyError: 'lr'"),
    ("breaks", {"master": replicas(python(BREAKS), restart="Never"),
                "worker": replicas(python(BREAKS), restart="Never")},
     Cause.CONNECTION, "master-0: the connection to another rank broke"),
    # the job
    ("overdue", {"master": RUNS, "runPolicy": {"activeDeadlineSeconds": 3}},
     Cause.DEADLINE, " 3 s"),
    ("leftover", {"master": replicas(container("sleep 8")), "worker": RUNS},
     Cause.LEFTOVER, "worker-0: still running though the job ended (Succeeded)"),
    ("suspended", {"master": RUNS, "runPolicy": {"suspend": True}},
     Cause.SUSPENDED, "the job is suspended"),
    ("queued", {"master": RUNS, "runPolicy": {"suspend": True},
                "labels": {"kueue.x-k8s.io/queue-name": "research"}},
     Cause.NO_QUEUE, "the job cannot start: "),  # with Kueue and without
    ("managed", {"master": RUNS, "runPolicy": {"managedBy": "kueue.x-k8s.io/multikueue"}},
     Cause.OPERATOR_SILENT, "managed by kueue.x-k8s.io/multikueue"),
    ("probe", {"master": replicas(PROBED), "worker": RUNS},
     Cause.MASTER_AWAITED, "the Master runs but is not ready, according to its readinessProbe"),
]
# fmt: on
WORDS = {name: (cause, says) for name, _, cause, says in FAULTS}


# --- what else is needed


def named(kind, name, api="v1", **rest):
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name}, **rest}


def ghost(name, gpus):
    """A node without a machine: the scheduler takes it for real until its lease is missed."""
    size = {"cpu": "64", "memory": "256Gi", "pods": "100", "nvidia.com/gpu": str(gpus)}
    node = named("Node", name, spec={"taints": [{"key": GHOST, "effect": "NoSchedule"}]})
    node["metadata"]["labels"] = {
        "kubernetes.io/hostname": name,
        "nvidia.com/gpu.product": "A100",
    }
    ready = {"type": "Ready", "status": "True", "reason": "Test", "message": "it seems to be"}
    return {**node, "status": {"capacity": size, "allocatable": size, "conditions": [ready]}}


CLAIM = named(
    "PersistentVolumeClaim",
    "pending",
    spec={"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
)
UNMADE = named(
    "PersistentVolumeClaim",
    "unmade",
    spec={
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}},
    },
)
QUOTA = named("ResourceQuota", "small", spec={"hard": {"pods": "1"}})
MEMORY_QUOTA = named("ResourceQuota", "memory", spec={"hard": {"limits.memory": "9Gi"}})
RANGE = named(
    "LimitRange", "least", spec={"limits": [{"type": "Container", "max": {"memory": "1Mi"}}]}
)
REFUSES = """
import http.server
class Refuses(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if "junk" in self.path:
            self.send_response(200)
            self.end_headers()
            return self.wfile.write(b"junk")
        self.send_response(401)
        self.send_header("WWW-Authenticate", 'Basic realm="here"')
        self.end_headers()
    do_HEAD = do_GET
http.server.ThreadingHTTPServer(("127.0.0.1", {port}), Refuses).serve_forever()
"""


def webhook(namespace):
    """Nobody answers for the pods of one namespace."""
    service = {"namespace": namespace, "name": "nobody"}
    hook = {
        "name": "pods.k8sjob.test",
        "clientConfig": {"service": service},
        "rules": [
            {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"],
             "resources": ["pods"]}
        ],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
    }  # fmt: skip
    api = "admissionregistration.k8s.io/v1"
    return named("ValidatingWebhookConfiguration", namespace, api, webhooks=[hook])


REFUSALS = [
    ("quota", [QUOTA], Cause.QUOTA, "pods (1 requested, 1 of 1 used)"),
    ("unlimited", [MEMORY_QUOTA], Cause.QUOTA, "does not specify limits.memory for: pytorch"),
    ("limits", [RANGE], Cause.LIMIT_RANGE, "maximum memory usage per Container is 1Mi"),
    ("restricted", [], Cause.POD_SECURITY, "'restricted:latest'"),
    ("webhook", [], Cause.WEBHOOK, "'pods.k8sjob.test' does not respond"),
]
"""Namespaces that take no pods: what is in them, and what is said."""


def real_node(cluster):
    """A node with a machine."""
    return cluster.read("nodes")[0]["metadata"]["name"]


class Ward:
    """Namespaces with all the sick jobs; what `why` says of each.

    Args:
        cluster: from the fixture.
    """

    def __init__(self, cluster):
        self.cluster = cluster
        self.mark = f"why-{uuid.uuid4().hex[:6]}"
        self.words = {
            "mark": self.mark,
            "base": cluster.base_image,
            "registry": cluster.registry,
            "node": real_node(cluster),
            "closed": 30000 + int(self.mark[-4:], 16) % 2000,
        }
        self.until = time.monotonic() + SECONDS

    def namespace(self, kind=""):
        return f"{self.mark}-{kind}".rstrip("-")

    def wait_for_account(self, kind):
        """Pods are refused until their namespace has one."""
        where = self.namespace(kind)
        while not self.cluster.read("serviceaccounts", "default", where):
            assert time.monotonic() < self.until, f"{where} has no service account"
            time.sleep(0.2)

    def apply(self, *objects, namespace=""):
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        self.cluster.kubectl("apply", "-f", "-", "-n", self.namespace(namespace), stdin=text)

    @functools.cache  # noqa: B019 - there is one ward
    def backend(self, kind=""):
        return connect(kubeconfig=self.cluster.kubeconfig, namespace=self.namespace(kind))

    def submit(self, manifest, kind=""):
        text = json.dumps(manifest)
        for key, value in self.words.items():
            text = text.replace(f"{{{key}}}", str(value))
        return JobRef.of(self.backend(kind).create_manifest(job_of(json.loads(text))))

    def why(self, name, kind=""):
        backend = self.backend(kind)
        ref = backend.find(name)
        snapshot = backend.snapshot(ref)
        return diagnose(snapshot, last_lines(backend, snapshot), backend.related(snapshot))

    def delete(self, name, kind=""):
        """Take a job away, so that it needs nothing while others are looked at."""
        backend = self.backend(kind)
        backend.delete(backend.find(name))

    def first(self, name, cause, says, kind=""):
        """The first finding, as soon as it is of that cause and says that."""
        until = max(self.until, time.monotonic() + 60)  # one test leaves the next ones some time
        for key, value in self.words.items():
            says = says.replace(f"{{{key}}}", str(value))
        while True:
            found = self.why(name, kind)
            if found and found[0].id == cause and says in found[0].message:
                assert found[0].next_step
                return found
            assert time.monotonic() < until, f"{cause}: {says!r} is not in {found}"
            time.sleep(1)


@pytest.fixture(scope="module")
def ward(cluster):
    ward = Ward(cluster)
    kinds = ["", *(kind for kind, *_ in REFUSALS)]
    spaces = [named("Namespace", ward.namespace(kind)) for kind in kinds]
    spaces[kinds.index("restricted")]["metadata"]["labels"] = {
        "pod-security.kubernetes.io/enforce": "restricted"
    }
    higher = named("PriorityClass", ward.mark, "scheduling.k8s.io/v1", value=1000)
    shared = [
        higher,
        ghost(f"{ward.mark}-lost", 0),
        ghost(f"{ward.mark}-gpus", 4),
        webhook(ward.namespace("webhook")),
        named("RuntimeClass", ward.mark, "node.k8s.io/v1", handler="nobody"),
        named(
            "StorageClass",
            ward.mark,
            "storage.k8s.io/v1",
            provisioner="nobody.example",
            volumeBindingMode="WaitForFirstConsumer",
        ),
    ]
    try:
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(listed(spaces + shared)))
        for node in shared[1:3]:
            status = json.dumps({"status": node["status"]})
            name = node["metadata"]["name"]
            cluster.kubectl("patch", "node", name, "--subresource=status", "-p", status)
        for kind in kinds:
            ward.wait_for_account(kind)
        fill(ward)
        yield ward
    finally:
        names = [f"{one['kind']}/{one['metadata']['name']}" for one in [*spaces, *shared]]
        cluster.kubectl("delete", "--wait=false", "--ignore-not-found", *names)
        for kind in kinds:
            cluster.kubectl(
                "delete", "pods", "--all", "--force", "--grace-period=0",
                "-n", ward.namespace(kind), check=False,
            )  # fmt: skip


def listed(items):
    return {"apiVersion": "v1", "kind": "List", "items": items}


def fill(ward):
    known = named("Secret", "known", stringData={"other": "1"})
    port = ward.words["closed"]
    refuses = named("Pod", "refuses", spec={"hostNetwork": True, "containers": [{
        "name": "registry", "image": ward.cluster.base_image,
        "command": ["python3", "-c", REFUSES.replace("{port}", str(port))],
    }]})  # fmt: skip
    stranger = named("Pod", "taken-master-0", spec={"containers": [{
        "name": "other", "image": ward.cluster.base_image, "command": ["sleep", "999"],
    }]})  # fmt: skip
    ward.apply(CLAIM, known, refuses, stranger)
    unmade = copy.deepcopy(UNMADE)
    unmade["spec"]["storageClassName"] = ward.mark
    ward.apply(unmade)
    for kind, objects, *_ in REFUSALS:
        if objects:
            ward.apply(*objects, namespace=kind)
    for kind, *_ in REFUSALS:
        ward.submit(job("job", RUNS, RUNS), kind)
    for name, given, *_ in FAULTS:
        ward.submit(job(name, **copy.deepcopy(given)))


@pytest.mark.parametrize("name", [name for name, *_ in FAULTS])
def test_the_first_cause_is_named(ward, name):
    trouble = PROVOKED.get(name)
    if trouble:
        trouble(ward, name)
    found = ward.first(name, *WORDS[name])
    # Whether a pod outlives its job for long enough is a matter of the machine.
    assert {finding.id for finding in found[1:]} <= {Cause.LEFTOVER}
    ward.delete(name)


@pytest.mark.parametrize(("kind", "cause", "says"), [(k, c, s) for k, _, c, s in REFUSALS])
def test_what_keeps_pods_from_being_made(ward, kind, cause, says):
    finding = ward.first("job", cause, says, kind)[0]
    assert finding.replica in {"master-0", "worker-0"}
    ward.delete("job", kind)


# --- what has to be done to a job that runs


def drain(ward, name):
    wait_for_pod(ward, name)
    pod = f"{name}-master-0"
    body = named("Eviction", pod, "policy/v1")
    url = f"/api/v1/namespaces/{ward.namespace()}/pods/{pod}/eviction"
    ward.cluster.kubectl("create", "--raw", url, "-f", "-", stdin=json.dumps(body))


def preempt(ward, name):
    wait_for_pod(ward, name)
    master = replicas(
        container(**asking(**{"nvidia.com/gpu": "4"})),
        priorityClassName=ward.mark,
        **on("{mark}-gpus"),
    )
    ward.submit(job("important", master))


def wait_for_pod(ward, name):
    """Until its pod has a node, and its container runs where there is a machine."""

    def there():
        pod = ward.cluster.read("pods", f"{name}-master-0", ward.namespace()) or {}
        phase = pod.get("status", {}).get("phase")
        return pod.get("spec", {}).get("nodeName") if name == "preempted" else phase == "Running"

    while not there():
        assert time.monotonic() < ward.until
        time.sleep(0.5)


def submit_again(ward, name):
    """Delete the job and make it anew while its pod takes its time."""
    wait_for_pod(ward, name)
    backend = ward.backend()
    backend.delete(backend.find(name))
    given = next(given for other, given, *_ in FAULTS if other == name)
    ward.submit(job(name, **copy.deepcopy(given)))


def delete(ward, name):
    wait_for_pod(ward, name)
    ward.cluster.delete("pods", f"{name}-master-0", ward.namespace())


PROVOKED = {"again": submit_again, "deleted": delete, "drained": drain, "preempted": preempt}


# --- what needs an operator that is stopped, or the command itself


def test_an_operator_that_is_gone(bed, namespace, eventually):
    backend = connect(kubeconfig=bed.kubeconfig, namespace=namespace)
    text = json.dumps(job("orphan", RUNS)).replace("{base}", bed.base_image)
    ref = JobRef.of(backend.create_manifest(job_of(json.loads(text))))
    eventually(lambda: job_status(backend.snapshot(ref)).state == JobState.RUNNING, "the job")
    bed.stop("operator")
    bed.kubectl("delete", "pod", "orphan-master-0", "-n", namespace, "--now")

    def first():
        snapshot = backend.snapshot(ref)
        found = diagnose(snapshot, {}, backend.related(snapshot))
        return found and found[0].id == Cause.OPERATOR_SILENT and found[0]

    finding = eventually(first, "silence")
    assert finding.replica == "master-0"
    assert job_status(backend.snapshot(ref)).state == JobState.RUNNING  # what others would show
    bed.start("operator")
    eventually(lambda: not first() and backend.snapshot(ref).pods, "the recreated pod")


def test_a_registry_that_is_down_for_a_while(bed, namespace, eventually):
    backend = connect(kubeconfig=bed.kubeconfig, namespace=namespace)
    bed.stop("registry")
    asks = job("pulls", replicas(container(FOR_EVER, imagePullPolicy="Always")))
    asks = json.loads(json.dumps(asks).replace("{base}", bed.base_image))
    ref = JobRef.of(backend.create_manifest(job_of(asks)))

    def first():
        found = diagnose(backend.snapshot(ref), {})
        return found and found[0]

    finding = eventually(lambda: first() and first().id == Cause.REGISTRY and first(), "why")
    assert f"the image {bed.base_image} cannot be reached" in finding.message
    bed.start("registry")
    eventually(lambda: job_status(backend.snapshot(ref)).state == JobState.RUNNING, "its start")
    assert not first()


def test_the_command_and_hostile_words(desk, eventually):
    script = r"printf 'ValueError: \033]0;evil\007<b>no</b>\n' > /dev/termination-log; exit 3"
    text = json.dumps(job("hostile", replicas(container(script), restart="Never")))
    text = text.replace("{base}", desk.cluster.base_image)
    desk.backend.create_manifest(job_of(json.loads(text)))
    eventually(lambda: desk.status("hostile").state == JobState.FAILED, "its end")
    hostile = f"{desk.namespace}/hostile"
    detail = "why: master-0: exit code 3: ValueError: <b>no</b>\n"
    for client in ("python", "kubectl"):
        out, _ = desk.call("why", "--client", client, hostile)
        assert out.startswith(detail)
        assert f"next: correct the script; its output: k8sjob logs {hostile}" in out
    assert detail in desk.call("status", hostile)[0]
    (finding,) = json.loads(desk.call("why", "-o", "json", hostile)[0])
    assert (finding["cause"], finding["replicas"]) == ("crash", ["master-0"])
