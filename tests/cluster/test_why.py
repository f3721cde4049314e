"""Every cause is caused: jobs that cannot work, all side by side, and what `why` says of each.

The jobs are plain PyTorchJobs, as others make them, too.
"""

import copy
import json
import time
import uuid

import pytest

from k8sjob.backends.connect import connect
from k8sjob.lifecycle.diagnose import Cause, diagnose, witnesses
from k8sjob.lifecycle.logs import last_lines

pytestmark = pytest.mark.cluster

SECONDS = 240  # until a cause must have shown itself: node and disk are shared by all of them
FOR_EVER = "while :; do sleep 1; done"
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


def claim(name):
    return {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": name}}]}


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
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(10000):
    if dist.get_rank() == 1 and step == 3:
        raise ValueError("the loss is no number")
    dist.all_reduce(torch.ones(1))
"""
PROBED = container(FOR_EVER, readinessProbe={"exec": {"command": ["false"]}})
MINE = {"name": "mine", "image": HERE, "command": ["sh", "-c", "exit 6"]}

# (name, job, first cause, what its message says, replicas)
FAULTS = [
    # images
    ("image-missing", {"master": replicas(container(image="{registry}/k8sjob-tests:no-such"))},
     Cause.IMAGE_MISSING, "there is no image {registry}/k8sjob-tests:no-such"),
    ("image-registry", {"master": replicas(container(image=THERE))},
     Cause.REGISTRY, f"the image {THERE} cannot be reached"),
    ("image-name", {"master": replicas(container(image="Train:1:2"))},
     Cause.IMAGE_NAME, "'Train:1:2' is no image name"),
    ("image-access", {"master": replicas(container(image="127.0.0.1:{closed}/secret/train:1"))},
     Cause.IMAGE_ACCESS, "the registry refuses the image 127.0.0.1:{closed}/secret/train:1"),
    ("image-never", {"master": replicas(container(image=THERE, imagePullPolicy="Never"))},
     Cause.IMAGE_MISSING, "pull_policy Never"),
    ("image-init", {"master": replicas(initContainers=[{"name": "mine", "image": THERE}])},
     Cause.REGISTRY, THERE),
    # nodes
    ("gpus", {"master": replicas(container(**asking(**{"nvidia.com/gpu": "8"})),
                                 tolerations=[{"key": GHOST, "operator": "Exists"}])},
     Cause.UNSCHEDULABLE, "too little nvidia.com/gpu free (it asks for 8)"),
    ("gpu-kind", {"master": replicas(container(**asking(**{"example.com/gpu": "1"})))},
     Cause.UNSCHEDULABLE, "no node offers any example.com/gpu"),
    ("cpus", {"master": replicas(container(resources={"requests": {"cpu": "1000"}}))},
     Cause.UNSCHEDULABLE, "too little cpu free (it asks for 1k)"),
    ("taint", {"master": replicas(nodeSelector={"kubernetes.io/hostname": "ghost-gpus"})},
     Cause.UNSCHEDULABLE, f"a taint that it does not tolerate ({GHOST})"),
    ("selector", {"master": replicas(nodeSelector={"gpu": "a100"})},
     Cause.UNSCHEDULABLE, "not the labels that it asks for (gpu=a100)"),
    ("scheduler", {"master": replicas(schedulerName="nobody")},
     Cause.WAITING, "the scheduler 'nobody' has not looked at it"),
    ("lost", {"master": replicas(**on("ghost-lost"))},
     Cause.NODE_LOST, "its node ghost-lost is not ready"),
    ("evicted", {"master": replicas(container(f"head -c 99M /dev/zero > /tmp/x; {FOR_EVER}",
                                              **asking(**{"ephemeral-storage": "10Mi"})),
                                    restart="Never")},
     Cause.EVICTED, "its node put it out"),
    ("drained", {"master": replicas(container(FOR_EVER), terminationGracePeriodSeconds=900)},
     Cause.EVICTED, "its node was drained, or somebody evicted it"),
    ("preempted", {"master": replicas(container(**asking(**{"nvidia.com/gpu": "4"})),
                                      **on("ghost-gpus"))},
     Cause.PREEMPTED, "a pod of higher priority took its place"),
    # volumes, secrets, settings
    ("claim-missing", {"master": replicas(**claim("nowhere"))},
     Cause.VOLUME_CLAIM, "there is no claim 'nowhere'"),
    ("claim-pending", {"master": replicas(**claim("pending"))},
     Cause.VOLUME_CLAIM, "the claim 'pending' has no volume: no persistent volumes available"),
    ("secret", {"master": replicas(container(**variable(secretKeyRef={"name": "hf", "key": "t"})))},
     Cause.SECRET, "there is no secret 'hf'"),
    ("secret-key",
     {"master": replicas(container(**variable(secretKeyRef={"name": "known", "key": "t"})))},
     Cause.SECRET, "the secret 'known' has no key 't'"),
    ("config", {"master": replicas(volumes=[{"name": "v", "configMap": {"name": "settings"}}])},
     Cause.CONFIG_MAP, "there is no config map 'settings'"),
    ("path", {"master": replicas(volumes=[{"name": "v", "hostPath": {"path": "/no/such",
                                                                     "type": "Directory"}}])},
     Cause.VOLUME, "hostPath type check failed: /no/such is not a directory"),
    ("root", {"master": replicas(securityContext={"runAsNonRoot": True})},
     Cause.CONTAINER, "runAsNonRoot"),
    ("init", {"master": replicas(initContainers=[MINE])},
     Cause.INIT, "its init container 'mine' ended with exit code 6"),
    # pods that cannot be made
    ("account", {"master": replicas(serviceAccountName="trainer")},
     Cause.SERVICE_ACCOUNT, "there is no service account 'trainer'"),
    ("n" * 53, {"master": RUNS},
     Cause.JOB_NAME, "too long"),
    ("taken", {"master": RUNS},
     Cause.NAME_TAKEN, "taken-master-0 exists already and does not belong to this job"),
    # how containers end
    ("command", {"master": replicas(container(command=["no-such-program"]))},
     Cause.START, 'exec: "no-such-program": executable file not found'),
    ("folder", {"master": replicas(container(workingDir="/proc/no/such"))},
     Cause.START, "/proc/no/such"),
    ("crash", {"master": replicas(container("echo 'ValueError: no' >&2; exit 3"))},
     Cause.CRASH, "exit code 3: ValueError: no"),
    ("crash-once", {"master": replicas(container("echo it > /dev/termination-log; exit 4"),
                                       restart="Never")},
     Cause.CRASH, "exit code 4: it"),
    ("signal", {"master": replicas(container("kill -SEGV $$"), restart="Never")},
     Cause.KILLED, "ended by SIGSEGV"),
    ("memory", {"master": replicas({**python("x = 'x' * 2**30"), **asking(memory="64Mi")})},
     Cause.MEMORY, "out of memory"),
    ("module", {"master": replicas(python("import no_such_package"))},
     Cause.MISSING_MODULE, "no module named 'no_such_package'"),
    ("limit", {"master": replicas(container("exit 5")), "runPolicy": {"backoffLimit": 1}},
     Cause.CRASH, "exit code 5"),
    ("interface", {"master": replicas(python(MEET.format(60), GLOO_SOCKET_IFNAME="ib7"))},
     Cause.INTERFACE, "ib7"),
    ("meeting", {"master": replicas(python(MEET.format(5))), "nprocPerNode": "4"},
     Cause.RENDEZVOUS, "1 of 4 processes came"),
    ("peers", {"master": replicas(python(PEERS), restart="Never"),
               "worker": replicas(python(PEERS), restart="Never")},
     Cause.CRASH, "worker-0: exit code 1: ValueError: the loss is no number"),
    # the job
    ("overdue", {"master": RUNS, "runPolicy": {"activeDeadlineSeconds": 3}},
     Cause.DEADLINE, "its deadline of 3 s was over"),
    ("leftover", {"master": replicas(container("sleep 8")), "worker": RUNS},
     Cause.LEFTOVER, "worker-0: still running though the job ended (Succeeded)"),
    ("suspended", {"master": RUNS, "runPolicy": {"suspend": True}},
     Cause.SUSPENDED, "the job is suspended"),
    ("queued", {"master": RUNS, "runPolicy": {"suspend": True},
                "labels": {"kueue.x-k8s.io/queue-name": "research"}},
     Cause.QUEUED, "the job has waited in the queue 'research'"),
    ("managed", {"master": RUNS, "runPolicy": {"managedBy": "kueue.x-k8s.io/multikueue"}},
     Cause.OPERATOR_SILENT, "managed by kueue.x-k8s.io/multikueue"),
    ("probe", {"master": replicas(PROBED), "worker": RUNS},
     Cause.MASTER_AWAITED, "the Master runs and is not ready by its readinessProbe"),
]  # fmt: skip

# What stands in the way of all pods of a namespace: (its name, cause, what is said, objects in it)
NAMESPACES = [
    ("quota", Cause.QUOTA, "pods 1 asked, 0 of 0 used", ["quota.json"]),
    ("unlimited", Cause.QUOTA, "does not specify limits.memory for", []),
    ("limits", Cause.LIMIT_RANGE, "maximum memory usage per Container is 1Mi", []),
    ("restricted", Cause.POD_SECURITY, "'restricted:latest'", []),
    ("webhook", Cause.WEBHOOK, "does not answer", []),
]
