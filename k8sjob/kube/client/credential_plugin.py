"""Credentials from the program that a kubeconfig's user has under `exec`.

Source: client.authentication.k8s.io/v1, ExecCredential; client-go, plugin/pkg/client/auth/exec.
"""

from __future__ import annotations

import base64
import json
import math
import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from k8sjob.environment import variables
from k8sjob.kube.json_text import parsed
from k8sjob.kube.objects import at_path, moment

if TYPE_CHECKING:
    from k8sjob.kube.client.kubeconfig import Access

LOGIN_SECONDS: Final = 120.0
"""How long a plugin may take that asks a person."""
_CLUSTER_FIELDS: Final = (
    "server tls-server-name insecure-skip-tls-verify certificate-authority-data proxy-url"
    " disable-compression"
)


def plugin_credentials(access: Access) -> tuple[dict[str, str], float]:
    """What the plugin returns, as fields of a kubeconfig's user, and the time when it expires.

    Raises:
        ApiError: it returns no credentials, or the kubeconfig does not say how to start it.
    """
    plugin = access.user["exec"]
    interactive = plugin.get("interactiveMode") != "Never" and os.isatty(0)
    try:
        spec = {"interactive": interactive}
        if plugin.get("provideClusterInfo"):
            spec["cluster"] = _cluster_info(access.cluster)
        request = {"apiVersion": plugin["apiVersion"], "kind": "ExecCredential", "spec": spec}
        env = {entry["name"]: entry["value"] for entry in plugin.get("env") or ()}
        env["KUBERNETES_EXEC_INFO"] = json.dumps(request)
        argv = [plugin["command"]] + (plugin.get("args") or [])
        if plugin.get("interactiveMode") == "Always" and not interactive:
            raise access.without_credentials("it needs a terminal to ask a person")
        stdin = None if interactive else subprocess.DEVNULL
        return _credentials(_output(argv, variables() | env, stdin), plugin["apiVersion"])
    except (KeyError, TypeError):
        needs = "command and apiVersion; args is a list of texts, and each env has name and value"
        raise access.unusable(f"exec needs {needs}") from None
    except subprocess.TimeoutExpired:
        why = f"it has not ended after {LOGIN_SECONDS:.0f} s"
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", "") or str(error)
    raise access.without_credentials(why)


def _cluster_info(cluster: dict[str, Any]) -> dict[str, Any]:
    info = {name: cluster[name] for name in _CLUSTER_FIELDS.split() if cluster.get(name)}
    file = cluster.get("certificate-authority")
    if file and "certificate-authority-data" not in info and Path(file).is_file():
        info["certificate-authority-data"] = _encoded(Path(file).read_bytes())
    for entry in cluster.get("extensions") or ():
        if entry["name"] == "client.authentication.k8s.io/exec":
            info["config"] = entry["extension"]
    return info


def _output(argv: list[str], env: dict[str, str], stdin: int | None) -> bytes:
    # A pipe for stderr would be held open by an agent that a plugin leaves in the background.
    with tempfile.TemporaryFile() as stderr:
        done = subprocess.run(
            argv,
            env=env,
            stdin=stdin,
            stdout=subprocess.PIPE,
            # Where a person looks on, a login shows its address and its code.
            stderr=None if os.isatty(2) else stderr,
            timeout=LOGIN_SECONDS,
            check=False,
        )
        stderr.seek(0)
        if done.returncode:
            detail = " ".join(stderr.read(1 << 16).decode(errors="replace").split())
            raise ValueError(f"it exits with {done.returncode}: {detail}".removesuffix(": "))
    return done.stdout


def _credentials(printed: bytes, version: str) -> tuple[dict[str, str], float]:
    try:
        answer = parsed(printed)
    except ValueError as error:
        raise ValueError(f"it prints no JSON: {error}") from None
    if (theirs := at_path(answer, "apiVersion")) != version:
        raise ValueError(f"it prints an object of {theirs}, and the kubeconfig has {version}")
    names = ("token", "clientCertificateData", "clientKeyData", "expirationTimestamp")
    token, certificate, key, end = (str(at_path(answer, "status", name) or "") for name in names)
    if bool(certificate) != bool(key) or not (token or key):
        raise ValueError("it gives neither a token nor a certificate with its key")
    fields = {"token": token, "client-certificate-data": _encoded(certificate.encode())}
    fields["client-key-data"] = _encoded(key.encode())
    expires = moment(end)
    return fields, expires.timestamp() if expires else math.inf


def _encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()
