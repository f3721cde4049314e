"""Controllers that only some tests need: JobSet, Kubeflow Trainer and Kueue (see `Bed.add`).

Each runs with its own manifests, as kustomize renders them, but as a process of the bed instead of
a Deployment: its webhook's Service has an address of the node's bridge, and a certificate of ours.
"""

import json
from dataclasses import dataclass, field

from . import pki
from .components import BED, CONF, RBAC, webhook_secret
from .supervisor import CONTROLLERS as ADDRESSES

MANAGED = {"k8sjob-tests/kueue": "managed"}
"""The label of namespaces whose jobs Kueue's webhooks see; all others are as without Kueue."""
FRAMEWORKS = (
    "batch/job",
    "kubeflow.org/pytorchjob",
    "jobset.x-k8s.io/jobset",
    "trainer.kubeflow.org/trainjob",
)


@dataclass(frozen=True)
class Controller:
    """How one of them is installed.

    Attributes:
        program: its name in `build.controllers()`.
        service: the Service of its webhook.
        config: its configuration file, beside what all have.
        needs: other controllers, which start before it.
        group: version of its configuration's API.
    """

    program: str
    service: str
    group: str
    config: dict = field(default_factory=dict)
    needs: tuple = ()


# In the order in which they start.
ALL = {
    "jobset": Controller(
        program="jobset",
        service="jobset-webhook-service",
        group="config.jobset.x-k8s.io/v1alpha1",
        config={"internalCertManagement": {"enable": False}},
    ),
    "trainer": Controller(
        program="trainer-controller-manager",
        service="kubeflow-trainer-controller-manager",
        group="config.trainer.kubeflow.org/v1alpha1",
        config={"certManagement": {"enable": False}},
        needs=("jobset",),
    ),
    "kueue": Controller(
        program="kueue",
        service="kueue-webhook-service",
        group="config.kueue.x-k8s.io/v1beta2",
        # Its own management of certificates is on: it takes ours, which are in its Secret; without
        # it Kueue reads others in /etc.
        config={
            "integrations": {"frameworks": list(FRAMEWORKS)},
            "featureGates": {"VisibilityOnDemand": False},
        },
        needs=("jobset", "trainer"),
    ),
}


def order(names):
    """These and what they need, in the order in which they start."""
    wanted = set(names).union(*(ALL[name].needs for name in names))
    return [name for name in ALL if name in wanted]


def prepare(name, folder, built, server, **settings):
    """Put a controller's program and files into a bed's folder; returns the argument list."""
    made = ALL[name]
    program = folder / "bin" / made.program
    program.parent.mkdir(exist_ok=True)
    if not program.exists():
        program.hardlink_to(built / made.program)  # the bed does not see the folder itself
        pki.client(folder / "pki", name, f"/O=system:serviceaccounts/CN={name}")
        config = pki.kubeconfig(folder / "pki", name, server)
        (folder / f"conf/{name}.kubeconfig").write_text(config)
    config = {
        "apiVersion": made.group,
        "kind": "Configuration",
        "webhook": {"host": ADDRESSES[name], "port": 443},
        "health": {"healthProbeBindAddress": "0"},
        "metrics": {"bindAddress": "0"},
        "leaderElection": {"leaderElect": False},
        **made.config,
        **settings,
    }
    (folder / f"conf/{name}.yaml").write_text(json.dumps(config))
    kubeconfig = f"--kubeconfig={CONF}/{name}.kubeconfig"
    return [f"{BED}/bin/{made.program}", f"--config={CONF}/{name}.yaml", kubeconfig]


def objects(name, folder, built):
    """A controller's manifests, for an apiserver that finds its webhook in this bed."""
    made = ALL[name]
    secret = webhook_secret(folder / "pki")
    parts = json.loads((built / f"{name}.json").read_text())
    for part in parts:
        kind = part["kind"]
        hooks = part.get("webhooks", [])
        if kind == "CustomResourceDefinition":
            hooks = [part["spec"]["conversion"]["webhook"]] if "conversion" in part["spec"] else []
        for hook in hooks:
            hook["clientConfig"]["caBundle"] = secret["ca.crt"]
            if name == "kueue" and "namespaceSelector" in hook:
                hook["namespaceSelector"]["matchLabels"] = MANAGED
        for subject in part.get("subjects", []):
            if subject["kind"] == "ServiceAccount":  # whose name may be too long for a certificate
                subject |= {"kind": "User", "name": name, "apiGroup": RBAC}
                del subject["namespace"]
        if kind == "Secret":
            part["data"] = secret
        if kind == "Service" and part["metadata"]["name"] == made.service:
            part["spec"]["clusterIP"] = ADDRESSES[name]
    return parts
