"""Jobs that k8sjob did not make, of five kinds, each with some faults: what `why` says of them.

The last kind is one of these tests' own, as an AppWrapper is: its object has the manifest of a Job
in it, and its controller, which is played here, has created that Job.
"""

import json

import pytest
from cluster.test_why import Ward, asking, container, listed, named, python, variable
from observed import OF_JOB_YAML

from k8sjob.observe.diagnose import Cause

pytestmark = pytest.mark.cluster

GROUP = "example.test"
ENDS = {"terminationGracePeriodSeconds": 1}
DENIED = {"quota": "quota", "security": "security"}
"""Faults of a namespace of their own, by its last word."""
# Debian's torch has no libuv, which torchrun's store uses whatever USE_LIBUV says.
LAUNCH = """
cat > /tmp/store.py << end
import functools, sys, torch.distributed as dist
store = functools.partial(dist.TCPStore, use_libuv=False)
dist.TCPStore = sys.modules["torch.distributed.rendezvous"].TCPStore = store
end
cat > /tmp/main.py << end
import store, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(10000):
    if dist.get_rank() == 1 and step == 3:
        raise ValueError("the loss is no number")
    dist.all_reduce(torch.ones(1))
end
cd /tmp
exec python3 -c "import store; from torch.distributed.run import main; main()" --nnodes 2 \
    --node-rank ${HOSTNAME##*-} --master-addr set-peers-0.set-peers --master-port 29500 main.py
"""


def pod(main=None, *, restart="Never", **fields):
    main = {**(main or container()), "name": "main"}
    return {"restartPolicy": restart, "containers": [main], **ENDS, **fields}


def mounting(**source):
    mounts = [{"name": "v", "mountPath": "/v"}]
    return pod(container(volumeMounts=mounts), volumes=[{"name": "v", **source}])


FAILS = {"name": "fetch", "image": "{base}", "command": ["sh", "-c", "echo no disk; exit 6"]}
DEAD = {"exec": {"command": ["false"]}, "periodSeconds": 1, "failureThreshold": 1}
HOARDS = container("head -c 99M /dev/zero > /tmp/x; sleep 3000",
                   **asking(**{"ephemeral-storage": "10Mi"}))  # fmt: skip

# fault: the spec of the Pod, the first cause, what its message says, what the next step says; {pod}
# is the path of the Pod's spec in the object
# fmt: off
FAULTS = {
    "image": (pod(container(image="{registry}/k8sjob-tests:no-such")),
              Cause.IMAGE_MISSING, "there is no image {registry}/k8sjob-tests:no-such", "push it"),
    "command": (pod(container(command=["trian"])),
                Cause.START, 'exec: "trian": executable file not found',
                "correct {pod}containers[0].command"),
    "exception": (pod(python("def f():\n  raise ValueError('negative rate')\nf()")),
                  Cause.CRASH, "exit code 1: ValueError: negative rate", "correct the script"),
    "memory": (pod(container(command=["tail", "/dev/zero"], **asking(memory="32Mi"))),
               Cause.MEMORY, "its limit is 32Mi",
               "raise {pod}containers[0].resources.limits.memory"),
    "secret": (pod(container(**variable(secretKeyRef={"name": "hf", "key": "t"}))),
               Cause.SECRET, "there is no secret 'hf'", "create it"),
    "config": (mounting(configMap={"name": "settings"}),
               Cause.CONFIG_MAP, "there is no config map 'settings'", "create it"),
    "claim": (mounting(persistentVolumeClaim={"claimName": "nowhere"}),
              Cause.VOLUME_CLAIM, "there is no claim 'nowhere'", "in {pod}volumes"),
    "gpus": (pod(container(**asking(**{"example.com/gpu": "8"}))),
             Cause.UNSCHEDULABLE, "no node offers any example.com/gpu",
             "its name in {pod}containers[0].resources.limits"),
    "selector": (pod(nodeSelector={"gpu": "a100"}),
                 Cause.UNSCHEDULABLE, "(gpu=a100)", "correct {pod}nodeSelector"),
    "init": (pod(initContainers=[FAILS]),
             Cause.INIT, "its init container 'fetch' ended with exit code 6", "-c fetch"),
    "probe": (pod(container("sleep 3000", livenessProbe=DEAD)),
              Cause.KILLED, "Liveness probe failed", "correct the probe"),
    "evicted": (pod(HOARDS), Cause.EVICTED, "ephemeral", "{pod}containers[0].resources.limits"),
    "account": (pod(serviceAccountName="trainer"),
                Cause.SERVICE_ACCOUNT, "there is no service account 'trainer'",
                "correct {pod}serviceAccountName"),
    "deadline": (pod(container("sleep 3000")), Cause.DEADLINE, "its deadline of 3 s",
                 "raise {beside}activeDeadlineSeconds"),
    "quota": (pod(), Cause.QUOTA, "pods (1 requested, 0 of 0 used)", "kubectl describe quota none"),
    "security": (pod(), Cause.POD_SECURITY, "'restricted:latest'", "{pod}containers[0].security"),
    "peers": (pod(container(LAUNCH)),
              Cause.CRASH, "set-peers-1: rank 1 ended with exit code 1: ValueError: the loss",
              "correct the script"),
}
# fmt: on


# --- what runs the Pods: objects, each of which owns the next one


def plain_job(name, spec):
    deadline = {"activeDeadlineSeconds": 3} if name.endswith("deadline") else {}
    template = {"backoffLimit": 0, "template": {"spec": spec}, **deadline}
    return [named("Job", name, "batch/v1", spec=template)]


def of_cron_job(name, spec):
    (job,) = plain_job(name, spec)
    template = {"jobTemplate": {"spec": job["spec"]}, "schedule": "0 0 1 1 *", "suspend": True}
    return [named("CronJob", name, "batch/v1", spec=template), job]


def stateful_set(name, spec):
    labels = {"app": name}
    spec = {**spec, "restartPolicy": "Always"}
    template = {"metadata": {"labels": labels}, "spec": spec}
    replicas = 2 if name.endswith("peers") else 1
    fields = {"replicas": replicas, "podManagementPolicy": "Parallel", "serviceName": name}
    more = {"selector": {"matchLabels": labels}, "template": template}
    return [named("StatefulSet", name, "apps/v1", spec=fields | more)]


def bare_pod(name, spec):
    deadline = {"activeDeadlineSeconds": 3} if name.endswith("deadline") else {}
    return [named("Pod", name, spec=spec | deadline)]


def wrapper(name, spec):
    (job,) = plain_job(name, spec)
    status = {"phase": "Running"}
    components = {"components": [{"template": job}]}
    return [named("Wrapper", name, f"{GROUP}/v1", spec=components, status=status), job]


OWNERS = {
    "job": (plain_job, "job/", "spec.template.spec.",
            "image memory gpus deadline quota"),
    "cron": (of_cron_job, "job/", "spec.template.spec.",
             "command config memory probe account"),
    "set": (stateful_set, "sts/", "spec.template.spec.",
            "secret claim init peers"),
    "pod": (bare_pod, "pod/", "spec.",
            "image command evicted"),
    "wrap": (wrapper, f"wrappers.{GROUP}/", "spec.components[0].template.spec.template.spec.",
             "exception gpus selector deadline security"),
}  # fmt: skip
"""What makes the objects, how `why` is asked, where the Pod's spec is, the faults."""
SITUATIONS = [(owner, fault) for owner, row in OWNERS.items() for fault in row[-1].split()]
KIND = named(
    "CustomResourceDefinition",
    f"wrappers.{GROUP}",
    "apiextensions.k8s.io/v1",
    spec={
        "group": GROUP,
        "scope": "Namespaced",
        "names": {"plural": "wrappers", "singular": "wrapper", "kind": "Wrapper"},
        "versions": [{"name": "v1", "served": True, "storage": True, "schema": {
            "openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        }}],
    },
)  # fmt: skip


def create(ward, situations):
    """All objects of the situations, those of a chain one after the other."""
    chains = {}
    for owner, fault in situations:
        make, *_ = OWNERS[owner]
        text = json.dumps(make(f"{owner}-{fault}", FAULTS[fault][0]))
        for key, word in ward.words.items():
            text = text.replace(f"{{{key}}}", str(word))
        for link in json.loads(text):
            link["metadata"]["namespace"] = ward.namespace(DENIED.get(fault, ""))
            chains.setdefault((owner, fault), []).append(link)
    above = {}
    for level in range(2):
        links = {key: chain[level] for key, chain in chains.items() if level < len(chain)}
        for key, link in links.items():
            link["metadata"]["ownerReferences"] = [above[key]] if key in above else []
        applied = ward.cluster.kubectl(
            "apply", "-f", "-", "-o", "json", stdin=json.dumps(listed(list(links.values())))
        )
        for key, raw in zip(links, json.loads(applied.stdout)["items"], strict=True):
            about = {"name": raw["metadata"]["name"], "uid": raw["metadata"]["uid"]}
            kind = {"apiVersion": raw["apiVersion"], "kind": raw["kind"]}
            above[key] = {**kind, **about, "controller": True}


def prepare(ward):
    """The namespaces, and what the Pods need."""
    spaces = [named("Namespace", ward.namespace(kind)) for kind in ("", *DENIED)]
    spaces[-1]["metadata"]["labels"] = {"pod-security.kubernetes.io/enforce": "restricted"}
    ward.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(listed([KIND, *spaces])))
    for kind in ("", *DENIED):
        ward.wait_for_account(kind)
    ward.apply(named("ResourceQuota", "none", spec={"hard": {"pods": "0"}}), namespace="quota")
    ports = {"clusterIP": "None", "publishNotReadyAddresses": True}
    ward.apply(named("Service", "set-peers", spec={**ports, "selector": {"app": "set-peers"}}))
    ward.cluster.kubectl("wait", "--for=condition=Established", f"crd/wrappers.{GROUP}")
    return [f"namespace/{space['metadata']['name']}" for space in spaces]


@pytest.fixture(scope="module")
def hospital(cluster):
    ward, names = Ward(cluster), []
    try:
        names = prepare(ward)
        create(ward, SITUATIONS)
        yield ward
    finally:
        names.append(f"crd/wrappers.{GROUP}")
        cluster.kubectl("delete", "--wait=false", "--ignore-not-found", *names)


@pytest.mark.parametrize(
    ("owner", "fault"), SITUATIONS, ids=["-".join(situation) for situation in SITUATIONS]
)
def test_the_first_cause_of_what_others_made(hospital, owner, fault):
    _, argument, where, _ = OWNERS[owner]
    _, cause, says, step = FAULTS[fault]
    findings = hospital.first(f"{argument}{owner}-{fault}", cause, says, DENIED.get(fault, ""))
    step = step.format(pod=where, beside=where.removesuffix("template.spec."))
    assert step in findings[0].next_step
    texts = [text for finding in findings for text in (finding.message, finding.next_step)]
    assert not list(filter(OF_JOB_YAML.search, texts))
