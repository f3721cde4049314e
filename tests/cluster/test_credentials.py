"""Credentials on a real cluster: nothing shows a token, and no other server gets one."""

import base64
import json
import subprocess

import pytest
from cluster import commands

CLIENTS = ("python", "kubectl")
COMMANDS = (
    ("list",),
    ("list", "-A", "-o", "json"),
    ("status", "digits"),
    ("logs", "digits"),
    ("why", "digits"),
    ("watch", "digits"),
    ("suspend", "digits"),
    ("delete", "digits"),
    ("doctor",),
    ("doctor", "-o", "json"),
    ("submit", "job.yaml", "--dry-run=server", "-o", "yaml"),
    ("diff", "job.yaml"),
    ("render", "job.yaml"),
)


@pytest.fixture
def run(cluster, namespace, tmp_path):
    """Runs a command line with a kubeconfig and a client; the completed process."""
    (tmp_path / "job.yaml").write_text(
        f"name: digits\nimage: {cluster.base_image}\nrun: {{command: [sleep, '1']}}\n"
    )

    def call(config, client, *args):
        file = tmp_path / "kubeconfig"
        file.write_text(json.dumps(config))
        if args[0] != "render":
            args = (*args, "--client", client)
        env = cluster.env | {"KUBECONFIG": str(file)}
        return commands.run("--traceback", *args, env=env, cwd=tmp_path)

    return call


@pytest.fixture
def token(cluster, namespace):
    """A valid token of a user who may do nothing."""
    cluster.kubectl("create", "serviceaccount", "nobody", "-n", namespace)
    return cluster.kubectl("create", "token", "nobody", "-n", namespace).stdout.strip()


def parts(token):
    """What of a token must not be seen: any of its parts, which are a secret for a part."""
    return [part for part in token.split(".") if len(part) > 20]


@pytest.mark.parametrize(
    ("client", "valid"), [("python", True), ("kubectl", False)], ids=["refused", "expired"]
)
def test_no_command_shows_the_token(valid, client, config, run, token):
    given = token if valid else f"{token[:-8]}AAAAAAAA"
    config["users"][0]["user"] = {"token": given}
    for command in COMMANDS:
        done = run(config, client, *command)
        seen = done.stdout + done.stderr
        for part in parts(given):
            assert part not in seen, command


@pytest.mark.parametrize("client", CLIENTS)
def test_no_command_shows_what_a_plugin_says_of_its_token(client, config, run, token, tmp_path):
    plugin = tmp_path / "plugin"
    plugin.write_text(f"#!/bin/sh\necho 'token: {token}' >&2\nexit 1\n")
    plugin.chmod(0o700)
    config["users"][0]["user"] = {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": str(plugin),
            "interactiveMode": "Never",
        }
    }
    for command in (("list",), ("doctor",), ("submit", "job.yaml")):
        done = run(config, client, *command)
        assert done.returncode == 1
        for part in parts(token):
            assert part not in done.stdout + done.stderr, command


@pytest.mark.parametrize("client", CLIENTS)
def test_a_server_with_another_authority_is_refused(client, config, run, tmp_path):
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=other"]
    argv += ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "ca"), "-days", "1"]
    subprocess.run(argv, check=True, capture_output=True)
    other = base64.b64encode((tmp_path / "ca").read_bytes()).decode()
    config["clusters"][0]["cluster"]["certificate-authority-data"] = other
    config["clusters"][0]["cluster"].pop("certificate-authority", None)
    listed = run(config, client, "list")
    assert listed.returncode == 1
    assert "has a certificate that is not trusted" in listed.stderr
    assert "correct certificate-authority" in listed.stderr
    doctor = run(config, client, "doctor")
    assert doctor.returncode == 1
    assert "next: correct the cluster's certificate-authority in the kubeconfig" in doctor.stdout
