"""The components of a bed: what each is called with, and the files that configure them.

All paths are those inside the bed (see `supervisor.make_mounts`), so they are the same in each.
"""

import base64
import json

import yaml
from gomodules import OPERATOR, source

from .pki import kubeconfig
from .supervisor import DNS, NODE, WEBHOOK

BIN, BED = "/run/bin", "/run/bed"
CONF, PKI = f"{BED}/conf", f"{BED}/pki"
CONTAINERD = "/run/containerd/containerd.sock"
ETCD = "http://127.0.0.1:2379"
RBAC = "rbac.authorization.k8s.io"
SERVICES = "10.96.0.0/16"
PAUSE = "localhost/pause:bed"
# In the order in which they start.
ORDER = ("registry", "containerd", "etcd", "apiserver", "controller-manager", "scheduler")
ORDER += ("kubelet", "coredns", "operator")
CERTIFICATES = "/tmp/k8s-webhook-server/serving-certs"  # where the operator looks

CONTAINERD_CONFIG = """
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  # A machine without CAP_SYS_RESOURCE may not lower scores, and no sandbox would start.
  restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "/usr/lib/cni"
  conf_dir = "{conf}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".registry.mirrors."{registry}"]
  endpoint = ["http://{registry}"]
"""
COREFILE = """
.:53 {{
  bind {dns}
  errors
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {conf}/coredns.kubeconfig
    ttl 1
  }}
}}
"""
CNI = {
    "cniVersion": "0.4.0",
    "name": "bed",
    "plugins": [
        {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "dataDir": "/run/cni",
                "ranges": [[{"subnet": "10.244.0.0/22"}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
    ],
}
REGISTRY = {
    "version": 0.1,
    "storage": {"filesystem": {"rootdirectory": "/var/lib/registry"}, "delete": {"enabled": True}},
}
COSCHEDULING = {
    "apiVersion": "kubescheduler.config.k8s.io/v1",
    "kind": "KubeSchedulerConfiguration",
    "leaderElection": {"leaderElect": False},
    "clientConnection": {"kubeconfig": f"{CONF}/scheduler.kubeconfig"},
    "profiles": [
        {
            "schedulerName": "coscheduling",
            "plugins": {
                "multiPoint": {"enabled": [{"name": "Coscheduling"}]},
                "queueSort": {"enabled": [{"name": "Coscheduling"}], "disabled": [{"name": "*"}]},
            },
            "pluginConfig": [{"name": "Coscheduling", "args": {"permitWaitingTimeSeconds": 5}}],
        }
    ],
}
"""A second scheduler, which only tests of gangs need: see the fixture `coscheduling`."""
KUBELET = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "authentication": {
        "anonymous": {"enabled": False},
        "webhook": {"enabled": True},
        "x509": {"clientCAFile": f"{PKI}/ca.crt"},
    },
    "authorization": {"mode": "Webhook"},
    "cgroupDriver": "cgroupfs",
    "failSwapOn": False,
    "failCgroupV1": False,  # some machines still have it
    "clusterDNS": [DNS],
    "clusterDomain": "cluster.local",
    "resolvConf": "",
    "containerRuntimeEndpoint": f"unix://{CONTAINERD}",
    "tlsCertFile": f"{PKI}/node.crt",
    "tlsPrivateKeyFile": f"{PKI}/node.key",
    "evictionHard": {"memory.available": "200Mi", "nodefs.available": "1%"},
    "imageGCHighThresholdPercent": 99,
    "maxPods": 250,
}


def write_config(folder, access):
    """Write what the components read, into the bed's folder."""
    conf = folder / "conf"
    (conf / "cni").mkdir(parents=True, exist_ok=True)
    server = f"https://127.0.0.1:{access.apiserver}"
    for user in ("admin", "controller-manager", "scheduler", "kubelet", "coredns", "operator"):
        (conf / f"{user}.kubeconfig").write_text(kubeconfig(folder / "pki", user, server))
    address = f"127.0.0.1:{access.registry}"
    texts = {
        "containerd.toml": CONTAINERD_CONFIG.format(
            socket=CONTAINERD, pause=PAUSE, conf=CONF, registry=address
        ),
        "Corefile": COREFILE.format(dns=DNS, conf=CONF),
        "cni/10-bed.conflist": json.dumps(CNI),
        "registry.yaml": json.dumps({**REGISTRY, "http": {"addr": address}}),
        "coscheduling.yaml": json.dumps(COSCHEDULING),
        "kubelet.yaml": json.dumps({**KUBELET, "cgroupRoot": f"/{folder.name}"}),
    }
    for name, text in texts.items():
        (conf / name).write_text(text)
    certificates = folder / "tmp" / CERTIFICATES.removeprefix("/tmp/")
    certificates.mkdir(parents=True)
    for name, text in webhook_certificate(folder / "pki").items():
        (certificates / name).write_bytes(text)


def webhook_certificate(pki):
    """The files of every controller's webhook, as its Secret names them."""
    return {
        "ca.crt": (pki / "ca.crt").read_bytes(),
        "ca.key": (pki / "ca.rsa.key").read_bytes(),
        "tls.crt": (pki / "webhook.crt").read_bytes(),
        "tls.key": (pki / "webhook.key").read_bytes(),
    }


def webhook_secret(pki):
    """The data of a Secret with the files of a webhook."""
    files = webhook_certificate(pki).items()
    return {name: base64.b64encode(content).decode() for name, content in files}


def commands(apiserver, base_image):
    """The argument list of each component."""

    def user(name):
        return f"--kubeconfig={CONF}/{name}.kubeconfig"

    return {
        "registry": ["docker-registry", "serve", f"{CONF}/registry.yaml"],
        "containerd": ["containerd", "--config", f"{CONF}/containerd.toml"],
        "etcd": [
            f"{BIN}/etcd",
            "--data-dir=/var/lib/etcd",
            f"--listen-client-urls={ETCD}",
            f"--advertise-client-urls={ETCD}",
            "--unsafe-no-fsync",  # the data does not outlive the machine's next hour
        ],
        "apiserver": [
            f"{BIN}/kube-apiserver",
            f"--etcd-servers={ETCD}",
            f"--secure-port={apiserver}",
            f"--advertise-address={NODE}",
            f"--tls-cert-file={PKI}/apiserver.crt",
            f"--tls-private-key-file={PKI}/apiserver.key",
            f"--client-ca-file={PKI}/ca.crt",
            f"--service-account-key-file={PKI}/service-accounts.crt",
            f"--service-account-signing-key-file={PKI}/service-accounts.key",
            f"--service-account-issuer=https://{NODE}:{apiserver}",
            f"--service-cluster-ip-range={SERVICES}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--kubelet-client-certificate={PKI}/admin.crt",
            f"--kubelet-client-key={PKI}/admin.key",
            f"--kubelet-certificate-authority={PKI}/ca.crt",
            "--kubelet-preferred-address-types=InternalIP",
            "--allow-privileged=true",
        ],
        "controller-manager": [
            f"{BIN}/kube-controller-manager",
            user("controller-manager"),
            f"--service-account-private-key-file={PKI}/service-accounts.key",
            f"--root-ca-file={PKI}/ca.crt",
            "--use-service-account-credentials=true",
            "--leader-elect=false",
        ],
        "scheduler": [f"{BIN}/kube-scheduler", user("scheduler"), "--leader-elect=false"],
        "coscheduling": [
            f"{BIN}/kube-scheduler",
            f"--config={CONF}/coscheduling.yaml",
            "--secure-port=0",
        ],
        "kubelet": [
            f"{BIN}/kubelet",
            f"--config={CONF}/kubelet.yaml",
            user("kubelet"),
            f"--node-ip={NODE}",
            "--hostname-override=node",
        ],
        "coredns": [f"{BIN}/coredns", "-conf", f"{CONF}/Corefile"],
        "operator": [
            f"{BIN}/training-operator.v1",
            user("operator"),
            "--enable-scheme=pytorchjob",
            f"--pytorch-init-container-image={base_image}",
        ],
    }


ENVIRONMENT = {"operator": {"MY_POD_NAMESPACE": "kubeflow", "MY_POD_NAME": "operator-0"}}
# Memory is there, and the processors have more to do than collect; CERTIFICATES lie in /tmp.
EVERY_ENVIRONMENT = {"GOGC": "400", "TMPDIR": "/tmp"}
# After an outage of the apiserver they wait for up to a minute until they try it again.
WATCHING = ("controller-manager", "scheduler", "kubelet", "coredns", "operator")
WATCHING += ("jobset", "trainer", "kueue")


def objects(folder):
    """What a fresh apiserver is given: the operator's rights and webhook, and CoreDNS's rights."""
    manifests = source(OPERATOR) / "manifests/base"
    kubeflow = {"namespace": "kubeflow"}
    rights = []
    for name in ("role.yaml", "cluster-role-binding.yaml"):
        (found,) = yaml.safe_load_all((manifests / "rbac" / name).read_text())
        for subject in found.get("subjects", ()):
            subject["namespace"] = "kubeflow"
        rights.append(found)
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kubeflow"}},
        *rights,
        *coredns_rights(),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "training-operator", **kubeflow},
            "spec": {"clusterIP": WEBHOOK, "ports": [{"name": "webhook-server", "port": 9443}]},
        },
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "training-operator-webhook-cert", **kubeflow},
            "data": webhook_secret(folder / "pki"),
        },
        webhook(manifests),
    ]


def webhook(manifests):
    """The operator's own webhook configuration, the part for PyTorchJobs."""
    (found,) = yaml.safe_load_all((manifests / "webhook/manifests.yaml").read_text())
    found["metadata"]["name"] = "validator.training-operator.kubeflow.org"
    found["webhooks"] = [hook for hook in found["webhooks"] if ".pytorchjob." in hook["name"]]
    for hook in found["webhooks"]:
        hook["clientConfig"]["service"] |= {
            "name": "training-operator",
            "namespace": "kubeflow",
            "port": 9443,  # nothing translates ports here
        }
    return found


def cluster_role(name, to, *rules, kind="User"):
    """A ClusterRole of this name, and the binding that gives it to a user or a group."""
    version, metadata = {"apiVersion": f"{RBAC}/v1"}, {"metadata": {"name": name}}
    role = {"apiGroup": RBAC, "kind": "ClusterRole", "name": name}
    bound = {"roleRef": role, "subjects": [{"apiGroup": RBAC, "kind": kind, "name": to}]}
    return [
        {**version, "kind": "ClusterRole", **metadata, "rules": list(rules)},
        {**version, "kind": "ClusterRoleBinding", **metadata, **bound},
    ]


def gang_rights():
    """The coscheduling plugin reads PodGroups, as the scheduler's user."""
    rule = {"apiGroups": ["scheduling.x-k8s.io"], "resources": ["*"], "verbs": ["*"]}
    return cluster_role("coscheduling", "system:kube-scheduler", rule)


def coredns_rights():
    """CoreDNS reads who serves which name."""
    verbs = {"verbs": ["list", "watch", "get"]}
    core = {"apiGroups": [""], "resources": ["services", "pods", "namespaces", "endpoints"]}
    slices = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"]}
    account = "system:serviceaccount:kube-system:coredns"
    return cluster_role("coredns", account, core | verbs, slices | verbs)
