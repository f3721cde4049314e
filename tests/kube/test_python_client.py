"""The transport over the Python client: credentials that change, and what is asked again."""

import base64
import json
import ssl
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from serving import Server, hang_up

from k8sjob.connections import proxy_for
from k8sjob.errors import BackendError, install_step
from k8sjob.kube.client import credential_plugin
from k8sjob.kube.client.kubeconfig import access
from k8sjob.kube.client.python_client import PythonTransport
from k8sjob.kube.client.transport import ApiError
from k8sjob.threads import start

API = "client.authentication.k8s.io/v1"
NODES = "/api/v1/nodes"
DENIED = (401, {"kind": "Status", "code": 401, "reason": "Unauthorized", "message": "no"})
GOOD = (200, {"kind": "NodeList"})


@pytest.fixture(autouse=True)
def _without_the_package(monkeypatch):
    """Importing it takes longer than most commands."""
    monkeypatch.setitem(sys.modules, "kubernetes", None)


def run_by(*argv, **fields):
    """A user whose credentials come from a program."""
    command = {"command": argv[0], "args": [*argv[1:]], "apiVersion": API}
    return {"exec": {**command, "interactiveMode": "Never", **fields}}


def credential(**status):
    """What a plugin prints."""
    return json.dumps({"apiVersion": API, "kind": "ExecCredential", "status": status})


@pytest.fixture
def plugin(tmp_path):
    """A program beside the kubeconfig; the files with its token, and with a line of each run."""
    token, ran, program = (tmp_path / name for name in ("token", "ran", "plugin"))
    token.write_text("first-token")
    (tmp_path / "end").write_text("2999-01-01T00:00:00Z")
    printed = json.dumps(credential(token="$(cat token)", expirationTimestamp="$(cat end)"))
    program.write_text(f"#!/bin/sh\ncd {tmp_path}; echo ran >> ran; echo {printed}\n")
    program.chmod(0o755)
    return run_by("./plugin"), token, ran


def tokens(apiserver):
    return [headers["Authorization"] for _, _, headers, _ in apiserver.asked]


RENEWED = ["Bearer first-token", "Bearer second-token"]


def test_a_token_that_is_not_taken_any_more_is_requested_again(python, apiserver, plugin):
    user, token, ran = plugin
    there = python(user)
    apiserver.on(GOOD)
    there.request("GET", NODES)
    token.write_text("second-token")
    apiserver.on(DENIED, GOOD)
    assert there.request("GET", NODES) == GOOD[1]
    assert tokens(apiserver) == RENEWED
    token.write_text("first-token")
    apiserver.on(DENIED, (200, "line\n"))
    assert list(there.stream(NODES)) == [b"line\n"]
    assert tokens(apiserver) == RENEWED[::-1]
    assert ran.read_text().count("ran") == 3


def test_a_connection_is_kept_after_a_stream_that_was_read_to_its_end(python, apiserver):
    there = python()
    apiserver.on((200, "line\n"), GOOD)
    assert list(there.stream(NODES)) == [b"line\n"]
    (connection,) = apiserver.connections
    assert there.request("GET", NODES) == GOOD[1]
    assert apiserver.connections == {connection}


def test_a_token_of_a_pod_is_read_again(python, apiserver, certificate, tmp_path, monkeypatch):
    (tmp_path / "token").write_text("first-token\n")
    (tmp_path / "ca.crt").write_bytes(Path(f"{certificate}.crt").read_bytes())
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    for name, value in zip(("HOST", "PORT"), apiserver.host.split(":"), strict=True):
        monkeypatch.setenv(f"KUBERNETES_SERVICE_{name}", value)
    monkeypatch.setattr("k8sjob.kube.client.kubeconfig.SERVICE_ACCOUNT", tmp_path)
    there = PythonTransport(access())
    apiserver.on(GOOD)
    there.request("GET", NODES)
    (tmp_path / "token").write_text("second-token\n")
    there.request("GET", NODES)
    assert tokens(apiserver) == RENEWED
    (tmp_path / "token").unlink()
    with pytest.raises(ApiError, match=r"cannot be used: .*No such file"):
        there.request("GET", NODES)


def test_a_kubeconfig_is_read_again_as_after_a_login(python, apiserver, kubeconfig):
    there = python({"token": "first-token"})
    kubeconfig({"token": "second-token"})
    apiserver.on(DENIED, GOOD)
    there.request("GET", NODES)
    assert tokens(apiserver) == RENEWED


def test_requests_side_by_side_run_a_plugin_once(python, apiserver, plugin):
    user, token, ran = plugin
    there, both = python(user), threading.Barrier(2)
    token.write_text("second-token")

    def answer(request):
        if request.headers["Authorization"] == RENEWED[1]:
            return GOOD
        both.wait(30)
        return DENIED

    apiserver.answer = answer
    answers = [start(lambda: there.request("GET", NODES)) for _ in range(2)]
    assert [future.result() for future in answers] == [GOOD[1]] * 2
    assert ran.read_text().count("ran") == 2


def test_credentials_are_read_once_per_request(python, apiserver, plugin):
    user, _, ran = plugin
    there = python(user)
    apiserver.on(DENIED)
    with pytest.raises(ApiError, match="log in again with"):
        there.request("GET", NODES)
    assert len(apiserver.asked) == 2
    assert ran.read_text().count("ran") == 2


def test_a_plugin_that_fails_is_reported_and_nothing_is_printed(python, apiserver, plugin, capfd):
    user, _, _ = plugin
    there = python(user)
    apiserver.on(DENIED)
    script = "echo it is expired: token=abcdef012345 >&2; exit 1"
    with pytest.raises(ApiError) as told:
        python(run_by("sh", "-c", script))
    assert "come from 'sh', which gives none: it exits with 1: it is" in str(told.value)
    assert "abcdef012345" not in str(told.value)
    with pytest.raises(ApiError, match="it exits with 1"):  # and one that fails later
        there.request("GET", NODES)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["/nowhere/aws"], "No such file or directory"),
        (["sleep", "60"], "it has not ended after 0 s"),
        (["echo", "|  token  | k8s-aws-v1.abc |"], "it prints no JSON: "),  # `output = table`
        (["echo", "[]"], "it prints an object of None, and the kubeconfig has client.auth"),
        (["echo", credential(token="t").replace("/v1", "/v1beta1")], "of .*/v1beta1, and the"),
        (["echo", credential()], "neither a token nor a certificate with its key"),
        (["echo", credential(token="t", clientKeyData="k")], "nor a certificate with its key"),
    ],
)
def test_a_plugin_may_give_no_credentials(python, monkeypatch, argv, why):
    monkeypatch.setattr(credential_plugin, "LOGIN_SECONDS", 0.2)
    match = rf"'{argv[0]}', which gives none: .*{why}.*; install it \(brew install aws\), or log in"
    with pytest.raises(ApiError, match=match) as told:
        python(run_by(*argv, installHint="brew install aws"))
    assert "abc" not in str(told.value)


def test_a_plugin_that_cannot_be_started(python):
    with pytest.raises(ApiError, match="it needs a terminal"):
        python(run_by("true", interactiveMode="Always"))
    for wrong in ({"args": [1]}, {"args": "x"}, {"env": [{"name": "A"}]}, {"command": None}):
        with pytest.raises(ApiError, match="here cannot be used: exec needs command and apiVers"):
            python(run_by("true", **wrong))


def test_credentials_are_renewed_before_they_end(python, apiserver, plugin):
    user, token, ran = plugin
    ran.with_name("end").write_text((datetime.now(UTC) + timedelta(seconds=5)).isoformat())
    there = python(user)
    ran.with_name("end").write_text("2999-01-01T00:00:00Z")
    token.write_text("second-token")
    apiserver.on(GOOD)
    assert [there.request("GET", NODES) for _ in range(2)] == [GOOD[1]] * 2
    assert tokens(apiserver) == [RENEWED[1]] * 2
    assert ran.read_text().count("ran") == 2


def test_a_plugin_is_told_of_the_cluster_and_may_give_a_certificate(
    python, apiserver, certificate, tmp_path
):
    apiserver.tls.verify_mode = ssl.CERT_REQUIRED
    apiserver.tls.load_verify_locations(f"{certificate}.crt")
    pem, info = certificate.read_text(), tmp_path / "info"
    env = {"INFO": str(info), "PRINTED": credential(clientCertificateData=pem, clientKeyData=pem)}
    user = run_by(
        *("sh", "-c", 'echo "$KUBERNETES_EXEC_INFO" > "$INFO"; printf %s "$PRINTED"'),
        provideClusterInfo=True,
        env=[{"name": name, "value": value} for name, value in env.items()],
    )
    config = {"name": API.replace("/v1", "/exec"), "extension": {"audience": "blue"}}
    apiserver.on(GOOD)
    assert python(user, extensions=[config]).request("GET", NODES) == GOOD[1]
    authority = base64.b64encode(Path(f"{certificate}.crt").read_bytes()).decode()
    cluster = {"server": apiserver.url, "certificate-authority-data": authority}
    spec = {"interactive": False, "cluster": {**cluster, "config": {"audience": "blue"}}}
    told = {"apiVersion": API, "kind": "ExecCredential", "spec": spec}
    assert json.loads(info.read_text()) == told


@pytest.mark.parametrize("where", ["kubeconfig", "plugin"])
@pytest.mark.parametrize("token", ["s3cr3t\n", "s3cr3t\r\nX-Other: y", "s3cr3t\u0101"])
def test_a_token_that_no_header_can_hold(python, apiserver, where, token):
    user = run_by("echo", credential(token=token)) if where == "plugin" else {"token": token}
    there = python(user)
    with pytest.raises(ApiError, match="not allowed in an HTTP header") as told:
        there.request("GET", NODES)
    assert told.value.reason == "Unusable"
    assert "s3cr3t" not in str(told.value)
    assert not apiserver.asked


def test_certificates_and_passwords_of_the_kubeconfig(python, apiserver, certificate, tmp_path):
    encoded = base64.b64encode(certificate.read_bytes()).decode()
    commented = base64.b64encode("# Köln\n".encode() + certificate.read_bytes()).decode()
    (tmp_path / "ca.crt").write_bytes(certificate.with_suffix(".pem.crt").read_bytes())
    of_user = {"client-certificate-data": encoded, "client-key-data": encoded}
    apiserver.on(GOOD)
    python({"client-key-data": encoded}).request("GET", NODES)  # of no use alone
    clusters = [
        {"certificate-authority": "ca.crt"},  # relative to its kubeconfig
        {"certificate-authority": "nowhere", "certificate-authority-data": commented},
        {"certificate-authority": None, "insecure-skip-tls-verify": True},
    ]
    for cluster in clusters:
        apiserver.on(GOOD)
        python({**of_user, "username": "ann", "password": "p"}, **cluster).request("GET", NODES)
        assert tokens(apiserver) == ["Basic YW5uOnA="]


def test_an_auth_provider_is_left_to_the_package(python, apiserver, monkeypatch):
    claims = base64.urlsafe_b64encode(b'{"exp": 32503680000}').decode().rstrip("=")
    token = f"h.{claims}.s"
    user = {"auth-provider": {"name": "oidc", "config": {"id-token": token}}}
    with pytest.raises(BackendError, match="client of Kubernetes is missing") as told:
        python(user)
    assert f"{install_step('cluster')}, or use --client=kubectl" in str(told.value)
    monkeypatch.delitem(sys.modules, "kubernetes")
    pytest.importorskip("kubernetes")
    apiserver.on(GOOD)
    python(user).request("GET", NODES)
    assert tokens(apiserver) == [f"Bearer {token}"]
    away = dict.fromkeys(("client-id", "client-secret", "refresh-token"), "x")
    away |= {"id-token": "h.eyJleHAiOiAxfQ==.s", "idp-issuer-url": "https://127.0.0.1:1"}
    for provider in ({"name": "azure"}, {"name": "oidc", "config": away}):
        with pytest.raises(ApiError, match="cannot be used: its auth-provider gives no token"):
            python({"auth-provider": provider})


class BehindProxy(Server):
    """A server and the proxy before it, which keeps what it is asked for."""

    heads = ()

    def finish_request(self, request, address):
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += request.recv(1)
        self.heads = (*self.heads, head.decode())
        request.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        super().finish_request(request, address)


@pytest.mark.parametrize(
    ("server", "address", "host"),
    [
        ("https://127.0.0.1", "127.0.0.1:443", "127.0.0.1"),
        ("HTTPS://[::1]:6443", "[::1]:6443", "[::1]:6443"),
    ],
)
def test_a_proxy_is_asked_for_a_tunnel_once(server, address, host, python, certificate):
    asked = []
    with BehindProxy(lambda request: asked.append(request) or GOOD, tls=[certificate]) as proxy:
        url = f"http://ann:p%40ss@{proxy.host}"
        there = python(**{"server": server, "proxy-url": url, "tls-server-name": "127.0.0.1"})
        assert [there.request("GET", NODES) for _ in range(2)] == [GOOD[1]] * 2
    (head,) = proxy.heads
    assert head.startswith(f"CONNECT {address} ")
    assert "Proxy-Authorization: Basic YW5uOnBAc3M=\r\n" in head
    headers = asked[-1].headers
    assert (headers["Host"], headers["Authorization"]) == (host, RENEWED[0])
    assert "Proxy-Authorization" not in headers
    with pytest.raises(ApiError, match=f"reached: .*, through the proxy {proxy.host};"):
        there.request("GET", NODES)


def test_a_proxy_of_another_kind_is_refused(python):
    with pytest.raises(ApiError, match=r"cannot be used: .*; only --client=kubectl takes others"):
        python(**{"proxy-url": "https://127.0.0.1:1"})


@pytest.mark.parametrize(
    ("server", "excepted", "proxied"),
    [
        ("https://api.example.com", "", True),
        ("https://api.example.com", "*", False),
        ("https://api.example.com:6443", "other.com, Example.COM:6443", False),
        ("https://badexample.com", "example.com,badexample.com:6443,,:443,x:y", True),
        ("https://example.com", ".example.com,*.example.com", True),
        ("https://api.example.com", "*.example.com", False),
        ("https://10.1.2.3", "10.9.9.9/8", False),
        ("https://10.1.2.3:6443", "10.1.2.3:443,11.0.0.0/8", True),
        ("https://[fd00::1]", "fd00::/8", False),
        ("https://[fd00::1]", "[fd00::1]:443", False),
        ("https://localhost:6443", "", False),
        ("https://local.localhost", "", True),
        ("https://127.0.0.2", "", False),
        ("https://[::1]:6443", "", False),
        ("http://api.example.com", "", False),  # HTTP_PROXY is not set
    ],
)
def test_proxies_are_those_of_kubectl(server, excepted, proxied):
    variables = {"https_proxy": "proxy:3128", "NO_PROXY": excepted}
    assert proxy_for(server, variables) == ("http://proxy:3128" if proxied else "")


def test_to_act_as_somebody_else(python, apiserver):
    there = python({"token": "t", "as": "bob", "as-groups": ["a", "b"]})
    apiserver.on(GOOD)
    there.request("GET", NODES)
    ((_, _, headers, _),) = apiserver.asked
    assert headers["Impersonate-User"] == "bob"
    assert headers.get_all("Impersonate-Group") == ["a", "b"]


def test_retry_after_is_followed(python, apiserver):
    there = python()
    apiserver.on((429, "later", {"Retry-After": "0"}), (503, "later", {"Retry-After": "0"}), GOOD)
    assert there.request("POST", NODES, body={}) == GOOD[1]
    assert len(apiserver.asked) == 3
    apiserver.on((429, "later", {"Retry-After": "0"}))
    with pytest.raises(ApiError) as told:
        there.request("GET", NODES)
    assert told.value.code == 429
    assert len(apiserver.asked) == 4


def test_only_reads_are_retried_on_a_broken_connection(python, apiserver):
    there = python()
    apiserver.on(hang_up, GOOD)
    assert there.request("GET", NODES) == GOOD[1]
    apiserver.on(hang_up, GOOD)
    with pytest.raises(ApiError, match="Remote end closed connection"):
        there.request("POST", NODES, body={})
    assert len(apiserver.asked) == 1


def test_a_read_is_retried_on_a_new_connection(python, apiserver):
    there, both, kept = python(), threading.Barrier(2), set()

    def answer(_):
        if kept:
            return lambda handler: handler.connection in kept or handler.reply(*GOOD)
        both.wait(30)
        return GOOD

    apiserver.answer = answer
    for future in [start(lambda: there.request("GET", NODES)) for _ in range(2)]:
        future.result()
    kept |= apiserver.connections
    assert there.request("GET", NODES) == GOOD[1]


def test_an_announcement_is_not_taken_for_an_answer(python, apiserver):
    there = python()

    def announce(handler):
        handler.wfile.write(b"HTTP/1.1 103 Early Hints\r\n\r\n")
        handler.reply(*GOOD)

    apiserver.on(announce)
    with pytest.raises(ApiError, match="the server returned 103"):
        there.request("GET", NODES)


def test_a_certificate_may_be_trusted_without_its_issuer(python, certificate, tmp_path):
    pem = tmp_path / "server.pem"
    argv = f"openssl req -x509 -CA {certificate} -CAkey {certificate} -newkey rsa:2048 -noenc"
    argv += f" -subj /CN=x -addext subjectAltName=IP:127.0.0.1 -keyout {pem}.key -out {pem}"
    subprocess.run(argv.split(), check=True, capture_output=True)
    with Server(lambda _: GOOD, tls=[pem, f"{pem}.key"]) as server:
        there = python(server=server.url, **{"certificate-authority": str(pem)})
        assert there.request("GET", NODES) == GOOD[1]


def test_a_patch_names_its_kind_and_only_metadata_is_requested(python, apiserver):
    there = python()
    apiserver.on(GOOD)
    patch = "application/merge-patch+json"
    there.request("PATCH", NODES, body={"spec": None})
    there.request("GET", NODES, metadata_only=True)
    (_, _, changed, body), (_, _, read, _) = apiserver.asked
    assert (changed["Content-Type"], json.loads(body)) == (patch, {"spec": None})
    assert "as=PartialObjectMetadata" in read["Accept"]


def test_an_answer_in_another_language_is_reported(python, apiserver):
    there = python()
    apiserver.on((502, "<html>\nBad   Gateway</html>"))
    with pytest.raises(ApiError, match="returned 502: <html> Bad Gateway</html>"):
        there.request("GET", NODES)
    apiserver.on((200, "<html>log in</html>"))
    with pytest.raises(ApiError, match="returned 200: <html>log in</html>"):
        there.request("GET", NODES)


def test_a_kubeconfig_that_the_client_cannot_use(python, apiserver):
    with pytest.raises(ApiError, match=r"context here cannot be used: .*/nowhere"):
        python(server="https://127.0.0.1:1", **{"certificate-authority": "/nowhere"})
    with pytest.raises(ApiError, match=r"cannot be reached: .*label empty"):
        python(server="https://a..b").request("GET", NODES)
