"""`python -m cluster.record FILE`: records jobs of a cluster into tests/observe/recorded.

The file (see `situations/`) is a list of steps, in a namespace that is made for them:
`apply` some objects, `run` a command of a shell ($N is the namespace), or `record` a job under its
name as soon as the first finding of `why` begins with these words, and has others. test_recorded.py
replays what is recorded. `owners` in place of FILE: what test_owners.py makes.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import yaml

from k8sjob.backends.cluster import connect
from k8sjob.kube.objects import stamp
from k8sjob.observe.diagnose import diagnose
from k8sjob.observe.logs import last_lines

from .bed.cluster import Cluster
from .bed.controllers import MANAGED
from .test_owners import DENIED, FAULTS, KIND, OWNERS, SITUATIONS, create, prepare
from .test_why import Ward

NAMESPACE, SHOWN = "test-record", "team"
RECORDED = Path(__file__).resolve().parents[1] / "observe/recorded"
SECONDS = 200  # until a cause must have shown itself
TOKEN = "kube-api-access"
DROPPED = {
    "addresses", "capacity", "containerID", "daemonEndpoints", "dnsPolicy",
    "enableServiceLinks", "eventTime", "fairSharing", "flavorFungibility", "flavorsReservation",
    "flavorsUsage", "generateName", "generation", "hostIP", "hostIPs", "imageID", "images",
    "kubectl.kubernetes.io/last-applied-configuration", "managedFields", "nodeInfo",
    "observedGeneration", "podIP", "podIPs", "podSets", "preemptionPolicy",
    "reportingComponent", "reportingInstance", "resourceVersion", "serviceAccount", "source",
    "terminationMessagePath", "terminationMessagePolicy",
}  # fmt: skip
"""Fields that tell where a cluster runs, or that `why` never reads."""


def trimmed(value):
    """A part of an object without such fields, empty ones and the volume of the token."""
    if isinstance(value, list):
        return [trimmed(part) for part in value if TOKEN not in str(part)[:60]]
    if not isinstance(value, dict):
        return value
    fields = {key: trimmed(part) for key, part in value.items() if key not in DROPPED}
    return {key: part for key, part in fields.items() if part not in (None, {}, [])}


def situation(backend, name):
    """A job as `why` reads it at this moment, and the findings about it."""
    snapshot = backend.snapshot(backend.find(name))
    logs, related = last_lines(backend, snapshot), backend.related(snapshot)
    now = snapshot.now.replace(microsecond=0)  # as a stamp has it: ages stay the same
    objects = {
        "now": stamp(now),
        "job": snapshot.job.raw,
        "word": getattr(snapshot.job, "word", ""),
        "below": list(getattr(snapshot.job, "below", ())),
        "pods": list(snapshot.pods),
        "events": list(snapshot.events),
        "related": list(related),
        "logs": {replica: list(map(str, lines)) for replica, lines in logs.items() if lines},
    }
    return trimmed(objects), diagnose(snapshot, logs, related, now=now)


def record(backend, name, *, why, says="", others=(), step="", job=""):
    """Wait until `why` says so of a job, and write what it read, one object a line."""
    until, first, more = time.monotonic() + SECONDS, "", []
    while not (first.startswith(why) and says in first and {*others} <= {*more}):
        if time.monotonic() > until:
            sys.exit(f"{name}: {first!r} is not {why!r} {says!r} {others}")
        time.sleep(bool(first))
        objects, findings = situation(backend, job or name)
        first = f"{findings[0].id} | {findings[0].message}" if findings else "nothing"
        more = [finding.id for finding in findings[1:]]
    rows = []
    for key, value in {"why": first, "others": more, "step": step, **objects}.items():
        text = json.dumps(value, ensure_ascii=False)
        if key in {"pods", "events", "related", "below"}:
            lines = ",\n  ".join(json.dumps(part, ensure_ascii=False) for part in value)
            text = f"[\n  {lines}\n ]"
        rows += [f' "{key}": {text}'] if value else []
    text = "{\n" + ",\n".join(rows) + "\n}\n"
    text = text.replace(os.environ["K8SJOB_TEST_REGISTRY"], "registry.example")
    (RECORDED / f"{name}.json").write_text(text.replace(NAMESPACE, SHOWN))
    sys.stdout.write(f"{name}: {first} {more}\n    {findings[0].next_step}\n")
    sys.stdout.flush()


def record_others(cluster):
    """Record objects that are no jobs, each with a fault."""
    ward = Ward(cluster)
    ward.mark, names = NAMESPACE, [f"crd/{KIND['metadata']['name']}"]
    try:
        names += prepare(ward)
        create(ward, SITUATIONS)
        for owner, fault in SITUATIONS:
            job, (_, cause, *_) = f"{OWNERS[owner][1]}{owner}-{fault}", FAULTS[fault]
            where = ward.backend(DENIED.get(fault, ""))
            record(where, f"others-{owner}-{fault}", why=cause, job=job)
    finally:
        cluster.kubectl("delete", "--wait=false", "--ignore-not-found", *names)


def main(file):
    """Take the steps of a file, and leave nothing of them."""
    cluster = Cluster(os.environ["KUBECONFIG"], os.environ["K8SJOB_TEST_REGISTRY"])
    if file == "owners":
        record_others(cluster)
        return
    backend = connect(kubeconfig=cluster.kubeconfig, namespace=NAMESPACE)
    text = Path(file).read_text().replace("{base}", cluster.base_image)
    steps = yaml.safe_load(text.replace("{registry}", cluster.registry))
    meta = {"name": NAMESPACE, "labels": MANAGED}
    cluster.create({"kind": "Namespace", "metadata": meta})
    within, names = ("-n", NAMESPACE), []
    try:
        while not cluster.read("serviceaccounts", "default", NAMESPACE):
            time.sleep(0.2)
        for step in steps:
            if objects := step.get("apply"):
                text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
                applied = cluster.kubectl("apply", "-f", "-", "-o", "name", *within, stdin=text)
                names = [*applied.stdout.split(), *names]  # in reverse: a queue before its flavor
            elif command := step.get("run"):
                env = cluster.env | {"N": NAMESPACE}
                subprocess.run(["bash", "-ec", command], env=env, check=True)
            else:
                record(backend, step.pop("record"), **step)
    finally:
        now = ("--force", "--grace-period=0", "--wait=false", *within)
        cluster.kubectl("delete", "pytorchjobs,pods", "--all", *now, check=False)
        names.append(f"namespace/{NAMESPACE}")
        cluster.kubectl("delete", "--timeout=60s", "--ignore-not-found", *within, *names)


if __name__ == "__main__":
    main(sys.argv[1])
