"""The transport over kubectl: what it is asked, and its words read back."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
from waiting import until

from k8sjob.errors import BackendError
from k8sjob.kube.api_resources import ObjectReference
from k8sjob.kube.client.kubeconfig import IN_CLUSTER, Access, access
from k8sjob.kube.client.kubectl import KubectlTransport
from k8sjob.kube.client.transport import ApiError

JOB = "/apis/kubeflow.org/v1/namespaces/team/pytorchjobs/one"
NOISE = "E1121 16:00:00.000000   12 memcache.go:265] not now\nWarning: deprecated\n"


@pytest.fixture
def fake(tmp_path, kubeconfig):
    """A program in kubectl's place: prints what it is told, and writes down how it was called."""

    def make(stdout="", stderr="", code=0, user=None):
        calls = tmp_path / "calls"
        program = tmp_path / "kubectl"
        program.write_text(
            f"#!{sys.executable}\n"
            "import json, os, sys\n"
            f"stdin = sys.stdin.read() if '-f' in sys.argv else ''\n"
            f"open({str(calls)!r}, 'a').write(json.dumps([sys.argv[1:], stdin,"
            " os.environ.get('KUBECONFIG')]) + '\\n')\n"
            f"print({stdout!r}, end='', flush=True)\n"
            f"print({stderr!r}, end='', file=sys.stderr)\n"
            f"sys.exit({code})\n"
        )
        program.chmod(0o755)
        transport = KubectlTransport(access(kubeconfig=kubeconfig(user)), str(program))
        return transport, lambda: [json.loads(line) for line in calls.read_text().splitlines()]

    return make


CANNOT = "Unable to connect to the server: "
NO_FILE = "unable to read client-cert /a for u due to open /a: no such file or directory"
BROKEN = "read: connection reset by peer"
LATE = "context deadline exceeded"
NO_HOST = "dial tcp: lookup x: no such host"


def refused(reason, message):
    return f"Error from server ({reason}): {message}"


@pytest.mark.parametrize(
    ("stderr", "expected"),
    [
        (refused("NotFound", 'jobs "one" not found'), '404 NotFound: jobs "one" not found'),
        (refused("Expired", "too old: 1 (7)"), "410 Expired: too old: 1 (7)"),
        ("Error from server: something", "500 : something"),
        (refused("Unauthorized", "no"), "401 Unauthorized: Unauthorized"),
        (refused("Forbidden", "Unauthorized, x509"), "403 Forbidden: Unauthorized, x509"),
        (NOISE + refused("Forbidden", "no\nat all"), "403 Forbidden: no\nat all"),
        ("error: You must be logged in to the server (...)", "401 Unauthorized: Unauthorized"),
        ("The connection to the server x:1 was refused - d", "0 Unreachable: Connection refused"),
        (f"{CANNOT}{NO_HOST}", f"0 Unreachable: {NO_HOST}"),
        (f'Get "https://x/": {BROKEN} - error from a previous: EOF', f"0 Unreachable: {BROKEN}"),
        ("error: unexpected EOF", "0 Unreachable: unexpected EOF"),
        (f"{CANNOT}tls: failed to verify: x509: by nobody", "0 Untrusted: by nobody"),
        (f"error: {NO_FILE}", f"0 Unusable: {NO_FILE}"),
        ("", "0 Unreachable: kubectl gives no reason"),
        (f'Get "https://x/": {LATE}', f"0 Unreachable: {LATE}"),
        ("error: unknown flag: --raw", "0 : fails: error: unknown flag: --raw"),
    ],
)
def test_its_words_are_read_back(fake, stderr, expected):
    transport, _ = fake(stderr=stderr, code=1)
    for ask in (transport.request, lambda _, path: list(transport.stream(path))):
        with pytest.raises(ApiError) as told:
            ask("GET", JOB)
        assert f"{told.value.code} {told.value.reason}: {told.value.detail}" == expected


def test_a_plugin_that_fails_is_reported_with_its_own_words(fake):
    stderr = (
        "SSO session expired, token=abcdef012345\n"
        "Unable to connect to the server: getting credentials: exec: executable aws failed with"
        " exit code 1\nhelp\n"
    )
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": "aws"}
    transport, _ = fake(stderr=stderr, code=1, user={"exec": plugin})
    with pytest.raises(ApiError) as told:
        transport.request("GET", JOB)
    assert told.value.code == 401
    message = str(told.value)
    assert "'aws', which gives none: exec: executable aws failed with exit code 1: SSO" in message
    assert "abcdef012345" not in message


def test_without_any_credentials_kubectl_would_ask_a_person(fake):
    transport, _ = fake(stdout="Please enter Username: ", stderr="error: EOF", code=1)
    with pytest.raises(ApiError, match="does not accept the credentials of context here"):
        transport.request("GET", JOB)


def test_a_patch_is_a_request_to_the_object_itself(fake, kubeconfig):
    transport, calls = fake(stdout='{"kind": "PyTorchJob"}')
    body = {"spec": {"runPolicy": {"suspend": True}}}
    found = transport.request("PATCH", JOB, body=body)
    assert found == {"kind": "PyTorchJob"}
    ((argv, _, files),) = calls()
    assert argv == [
        *("--context", "here", "patch", "--type=merge", f"--patch={json.dumps(body)}"),
        *("--output=json", "--namespace", "team", "--", "pytorchjobs.v1.kubeflow.org", "one"),
    ]
    assert files == str(kubeconfig())


def test_no_contents_are_requested_of_an_object_that_only_has_to_exist(fake):
    transport, calls = fake(stdout="hf-token   Opaque   1   5d\n")
    found = transport.request("GET", "/api/v1/namespaces/team/secrets/hf-token", metadata_only=True)
    assert found == {"kind": "PartialObjectMetadata", "metadata": {"name": "hf-token"}}
    ((argv, _, _),) = calls()
    asked = ["get", "--no-headers", "--namespace", "team", "--", "secrets", "hf-token"]
    assert argv[2:] == asked


def test_a_name_that_is_written_like_an_option_is_a_name(fake):
    """Whoever creates a job chooses the names of its Secrets."""
    transport, calls = fake()
    path = ObjectReference("secret", "--server=https://elsewhere.example").path("team")
    transport.request("GET", path, metadata_only=True)
    ((argv, _, _),) = calls()
    assert argv[-3:] == ["--", "secrets", "--server=https://elsewhere.example"]


def test_in_a_pod_kubectl_finds_its_account_by_itself(fake, monkeypatch):
    _, calls = fake(stdout="{}")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    program = fake(stdout="{}")[0]._argv[0]
    KubectlTransport(Access(IN_CLUSTER, "https://10.96.0.1:443"), program).request("GET", JOB)
    ((argv, _, files),) = calls()
    assert argv == ["get", "--raw", JOB], "with more kubectl would not look for it"
    assert files is None


def test_an_answer_that_is_no_json(fake):
    transport, _ = fake(stdout="hello")
    with pytest.raises(
        ApiError, match=r"kubectl prints no JSON: 'hello'; check it with: .* version"
    ):
        transport.request("GET", JOB)


def test_a_long_line_of_an_error_is_read_once(fake):
    """It took a minute for 150 KB, and four for twice as many."""
    transport, _ = fake(stderr="error: " + "a" * 600_000, code=1)
    with pytest.raises(ApiError, match=r"kubectl fails: error: a{393};"):
        transport.request("GET", JOB)


def test_what_a_plugin_leaves_in_the_background_is_not_waited_for(kubeconfig, tmp_path):
    """An agent or a tunnel holds the pipes that kubectl had."""
    pids = tmp_path / "pids"
    program = shell(tmp_path, f"sleep 600 &\necho $! >> {pids}\necho '{{}}'")
    transport = KubectlTransport(access(kubeconfig=kubeconfig()), program)
    try:
        assert transport.request("GET", JOB, timeout=60) == {}
        assert list(transport.stream(JOB, idle=60)) == [b"{}\n"]
    finally:
        for pid in pids.read_text().split():
            os.kill(int(pid), signal.SIGKILL)


def test_without_kubectl_it_is_named(kubeconfig):
    transport = KubectlTransport(access(kubeconfig=kubeconfig()), "/nowhere/kubectl")
    with pytest.raises(BackendError, match="/nowhere/kubectl cannot be started"):
        transport.request("GET", JOB)
    with pytest.raises(BackendError, match="install kubectl"):
        list(transport.stream(JOB, stop=threading.Event()))


READER = """
import sys, threading
from k8sjob.kube.client.kubeconfig import access
from k8sjob.kube.client.kubectl import KubectlTransport

transport = KubectlTransport(access(kubeconfig=sys.argv[1]), sys.argv[2])
first = threading.Event()

def read():
    for line in transport.stream("/api"):
        print(line.decode(), end="", flush=True)
        first.set()

threading.Thread(target=read, daemon=True).start()
assert first.wait(30)
"""


def test_no_kubectl_outlives_a_program_that_ends_in_the_middle_of_a_stream(kubeconfig, tmp_path):
    program = shell(tmp_path, "echo $$\nexec sleep 600")
    argv = [sys.executable, "-c", READER, str(kubeconfig()), program]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    until(lambda: not lives(done.stdout.strip()))


def test_a_request_that_takes_too_long_ends_with_all_that_it_started(kubeconfig, tmp_path):
    """A plugin that hangs is kubectl's child, and holds the pipes that are read."""
    written = tmp_path / "pid"
    program = shell(
        tmp_path, f"sleep 600 &\necho $! > {written}.new\nmv {written}.new {written}\nwait"
    )
    transport = KubectlTransport(access(kubeconfig=kubeconfig()), program)
    seconds = 1.0
    while not written.exists():  # a slow machine may not have started it in time
        with pytest.raises(ApiError, match="it does not respond in time"):
            transport.request("GET", JOB, timeout=seconds)
        seconds *= 2
    until(lambda: not lives(written.read_text().strip()))


def shell(folder, script):
    """The path of a program in kubectl's place."""
    program = folder / "kubectl"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


def lives(pid):
    """Whether the process is there and is not merely waited for."""
    argv = ["ps", "-o", "stat=", "-p", pid]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout != "" and not done.stdout.startswith("Z")
