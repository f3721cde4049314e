"""The transport over the Python client: credentials that change, and what is asked again."""

import base64
import json
import logging
import subprocess
import sys
import threading

import pytest
from serving import Server, hang_up

from k8sjob.errors import BackendError, install_step
from k8sjob.kube.client.transport import ApiError
from k8sjob.threads import start

NODES = "/api/v1/nodes"
DENIED = (401, {"kind": "Status", "code": 401, "reason": "Unauthorized", "message": "no"})
GOOD = (200, {"kind": "NodeList"})


@pytest.fixture
def plugin(tmp_path):
    """A program that gives the token that stands in a file, and whether it ran, by a line each."""
    token, ran = tmp_path / "token", tmp_path / "ran"
    token.write_text("first-token")
    program = tmp_path / "plugin"
    credential = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}
    program.write_text(
        f"#!{sys.executable}\n"
        "import json\n"
        f"open({str(ran)!r}, 'a').write('ran\\n')\n"
        f"token = open({str(token)!r}).read()\n"
        f"print(json.dumps({{**{credential!r}, 'status': {{'token': token}}}}))\n"
    )
    program.chmod(0o755)
    api = credential["apiVersion"]
    user = {"exec": {"command": str(program), "apiVersion": api, "interactiveMode": "Never"}}
    return user, token, ran


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
    apiserver.on(GOOD)
    there.request("GET", NODES)
    assert tokens(apiserver) == RENEWED[1:]
    assert ran.read_text().count("ran") == 2


def test_a_connection_is_kept_after_a_stream_that_was_read_to_its_end(python, apiserver):
    there = python()
    apiserver.on((200, "line\n"), GOOD)
    assert list(there.stream(NODES)) == [b"line\n"]
    (connection,) = apiserver.connections
    assert there.request("GET", NODES) == GOOD[1]
    assert apiserver.connections == {connection}


def test_so_is_one_that_a_watch_is_begun_with(python, apiserver, plugin):
    user, token, _ = plugin
    there = python(user)
    token.write_text("second-token")
    apiserver.on(DENIED, (200, "line\n"))
    assert list(there.stream(NODES)) == [b"line\n"]
    assert tokens(apiserver) == RENEWED


def test_a_token_in_a_file_is_read_again(python, apiserver, tmp_path):
    file = tmp_path / "token-file"
    file.write_text("first-token")
    there = python({"tokenFile": str(file)})
    file.write_text("second-token")
    apiserver.on(DENIED, GOOD)
    there.request("GET", NODES)
    assert tokens(apiserver) == RENEWED


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
    broken = {"exec": {**user["exec"], "command": "sh", "args": ["-c", script]}}
    with pytest.raises(ApiError) as told:
        python(broken)
    assert "come from 'sh', which gives none: exec: process returned 1. it is" in str(told.value)
    assert "abcdef012345" not in str(told.value)
    with pytest.raises(ApiError):  # and one that fails later
        there.request("GET", NODES)
    assert capfd.readouterr() == ("", "")
    assert not logging.getLogger().handlers or all(
        type(handler) is not logging.StreamHandler for handler in logging.getLogger().handlers
    )


def test_a_plugin_that_is_missing_is_reported_with_how_to_install_it(python, apiserver, plugin):
    user, _, _ = plugin
    missing = {"command": "/nowhere/aws", "installHint": "brew install aws"}
    with pytest.raises(ApiError, match=r"install it \(brew install aws\), or log in again"):
        python({"exec": {**user["exec"], **missing}})


@pytest.mark.parametrize("where", ["kubeconfig", "plugin"])
@pytest.mark.parametrize("token", ["s3cr3t\n", "s3cr3t\r\nX-Other: y", "s3cr3t\u0101"])
def test_a_token_that_no_header_can_hold(python, apiserver, plugin, where, token):
    user, file, _ = plugin
    file.write_bytes(token.encode())
    there = python(user if where == "plugin" else {"token": token})
    with pytest.raises(ApiError, match="not allowed in an HTTP header") as told:
        there.request("GET", NODES)
    assert told.value.reason == "Unusable"
    assert "s3cr3t" not in str(told.value)
    assert not apiserver.asked


def test_what_is_in_the_kubeconfig_is_read_without_the_client(
    python, apiserver, certificate, tmp_path, monkeypatch
):
    encoded = base64.b64encode(certificate.read_bytes()).decode()
    commented = base64.b64encode("# Köln\n".encode() + certificate.read_bytes()).decode()
    (tmp_path / "ca.crt").write_bytes(certificate.with_suffix(".pem.crt").read_bytes())
    of_user = {"client-certificate-data": encoded, "client-key-data": encoded}
    apiserver.on(GOOD)
    python({"client-key-data": encoded}).request("GET", NODES)  # of no use alone
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    clusters = [
        {"certificate-authority": "ca.crt"},  # relative to its kubeconfig
        {"certificate-authority": "nowhere", "certificate-authority-data": commented},
        {"certificate-authority": None, "insecure-skip-tls-verify": True},
    ]
    for cluster in clusters:
        apiserver.on(GOOD)
        python({**of_user, "username": "ann", "password": "p"}, **cluster).request("GET", NODES)
        assert tokens(apiserver) == ["Basic YW5uOnA="]
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    with pytest.raises(BackendError, match="the Python client of Kubernetes is missing"):
        python({"token": "t"})


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


def test_a_proxy_is_asked_for_a_tunnel_once(python, certificate):
    asked = []
    with BehindProxy(lambda request: asked.append(request) or GOOD, tls=[certificate]) as proxy:
        url = f"http://ann:p%40ss@{proxy.host}"
        there = python(**{"server": "https://127.0.0.1", "proxy-url": url})
        assert [there.request("GET", NODES) for _ in range(2)] == [GOOD[1]] * 2
    (head,) = proxy.heads
    assert head.startswith("CONNECT 127.0.0.1:443 ")
    assert "Proxy-Authorization: Basic YW5uOnBAc3M=\r\n" in head
    headers = asked[-1].headers
    assert (headers["Host"], headers["Authorization"]) == ("127.0.0.1", RENEWED[0])
    assert "Proxy-Authorization" not in headers


def test_a_proxy_of_another_kind_is_refused(python):
    with pytest.raises(ApiError, match="https://, for which --client=kubectl is"):
        python(**{"proxy-url": "https://127.0.0.1:1"})


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


def test_without_the_client_the_package_that_plugins_need_is_named(kubeconfig, plugin):
    code = (
        "import sys; sys.modules['kubernetes'] = None\n"
        "from k8sjob.backends.cluster import connect\n"
        f"connect(kubeconfig={str(kubeconfig(plugin[0]))!r}, client='python')"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert BackendError.__name__ in last
    assert f"{install_step('cluster')}, or use --client=kubectl" in last


@pytest.mark.parametrize(
    "statement",
    [
        "from k8sjob.kube.client.kubeconfig import configured; configured()",
        "from k8sjob.backends.cluster import connect; connect(kubeconfig={!r}, client='kubectl')",
    ],
)
def test_the_client_is_loaded_for_its_transport_only(kubeconfig, statement):
    code = f"{statement.format(str(kubeconfig()))}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not {"kubernetes", "urllib3", "requests"} & set(done.stdout.split())
