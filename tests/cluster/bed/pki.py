"""Certificates and kubeconfigs, as kubeadm lays them out: one authority, a name for each user."""

import base64
import json
import subprocess

from .supervisor import APISERVER, NODE

# user -> subject; a component's rights are those of its name.
USERS = {
    "admin": "/O=system:masters/CN=admin",
    "controller-manager": "/CN=system:kube-controller-manager",
    "scheduler": "/CN=system:kube-scheduler",
    "kubelet": "/O=system:nodes/CN=system:node:node",
    "coredns": "/CN=system:serviceaccount:kube-system:coredns",
    "operator": "/CN=system:serviceaccount:kubeflow:training-operator",
}
KUBERNETES = "kubernetes.default.svc"
SERVERS = {
    "apiserver": f"DNS:kubernetes,DNS:{KUBERNETES},DNS:localhost,IP:127.0.0.1,IP:{APISERVER}"
    f",IP:{NODE}",
    "node": f"IP:{NODE},DNS:node",
    "webhook": "DNS:training-operator.kubeflow.svc"
    ",DNS:jobset-webhook-service.jobset-system.svc"
    ",DNS:kubeflow-trainer-controller-manager.kubeflow-system.svc"
    ",DNS:kueue-webhook-service.kueue-system.svc",
}
EC = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
CA = "basicConstraints=critical,CA:TRUE"
# The names that the operator and Kueue ask of their webhooks' authority.
AUTHORITY = ("training-operator-ca", "kueue-ca")


def make(folder):
    """Write every key and certificate into the folder."""
    folder.mkdir()
    (folder / "openssl.cnf").write_text("[req]\ndistinguished_name = names\n[names]\n")
    names = ",".join(f"DNS:{name}" for name in AUTHORITY)
    _certificate(folder, "ca", f"/CN={AUTHORITY[0]}", [f"subjectAltName={names}", CA], None)
    # The operator's webhook reads an authority's key in this older form alone.
    _openssl(folder, "rsa", "-traditional", "-in", "ca.key", "-out", "ca.rsa.key")
    _certificate(folder, "service-accounts", "/CN=service-accounts", [], None)
    for name, subject in USERS.items():
        client(folder, name, subject)
    for name, names in SERVERS.items():
        usage = "extendedKeyUsage=serverAuth"
        _certificate(folder, name, f"/CN={name}", [f"subjectAltName={names}", usage])


def client(folder, name, subject):
    """Write the key and certificate of a user."""
    _certificate(folder, name, subject, ["extendedKeyUsage=clientAuth"])


def _certificate(folder, name, subject, extensions, authority="ca"):
    added = [part for extension in extensions for part in ("-addext", extension)]
    key = EC
    if name == "ca":
        key = ["-newkey", "rsa:2048"]
    by = ["-CA", f"{authority}.crt", "-CAkey", f"{authority}.key"] if authority else []
    files = ["-keyout", f"{name}.key", "-out", f"{name}.crt", "-nodes", "-days", "365"]
    options = ["-config", "openssl.cnf", "-subj", subject]
    _openssl(folder, "req", "-x509", *key, *options, *added, *by, *files)


def _openssl(folder, *args):
    subprocess.run(["openssl", *args], cwd=folder, check=True, stderr=subprocess.DEVNULL)


def kubeconfig(folder, user, server):
    """A kubeconfig with everything inside, so that it works wherever it is copied to."""
    data = {
        "client-certificate-data": encoded(folder / f"{user}.crt"),
        "client-key-data": encoded(folder / f"{user}.key"),
    }
    cluster = {"server": server, "certificate-authority-data": encoded(folder / "ca.crt")}
    context = {"cluster": "bed", "user": user, "namespace": "default"}
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "bed", "cluster": cluster}],
            "users": [{"name": user, "user": data}],
            "contexts": [{"name": "bed", "context": context}],
            "current-context": "bed",
        }
    )


def encoded(path):
    """A file's content as Kubernetes objects carry it."""
    return base64.b64encode(path.read_bytes()).decode()
