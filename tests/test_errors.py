"""What errors show of texts that others wrote."""

import json
import pickle
from importlib import metadata
from types import SimpleNamespace

import pytest

from k8sjob.errors import BackendError, SpecError, install_step, redacted
from k8sjob.findings import invalid

SECRET = "s3cr3tValue"


@pytest.mark.parametrize(
    "text",
    [
        # URLs
        "http://user:{}@host/x",
        "https://{}@github.com/a",
        "https://user:p@{}@host:80/",
        "https://host/?access_token={}&y=1",
        "https://host/?a=b&key={}",
        "https://host/?X-Amz-Signature={}",
        # variables and options
        "api_key={}",
        "AWS_SECRET_ACCESS_KEY={}",
        "DB_PASS={}",
        "secret_key = {}",
        "passwd: {}",
        "password='a {} b'",
        "password=,;'{}",
        "kubectl --token {}",
        "//user:{}@host/path",
        "?token%3D{}",
        "https://hooks.slack.com/services/T00/B00/{}",
        "--registry-password={}",
        # headers
        "Authorization: Bearer {}",
        "authorization=Basic {}",
        "Proxy-Authorization: Basic {}",
        "x-api-key: {}",
        "Invalid header value b'Bearer {}\\n'",
        '"Authorization": ["Bearer {}"]',
        # JSON and YAML
        '{{"access_token": "{}"}}',
        "{{'password': '{}'}}",
        r"{{\"token\":\"{}\"}}",
        r'{{"password": "a\"{}"}}',
        '{{"auth":"{}"}}',
        "client-key-data: {}",
        "password: |\n  {}",
        "secret: {}",
        "client_secret: {}",
        # by their form
        "exec: got eyJhbGciOiJSUzI1NiJ9.{}.c2ln instead",
        "pushed with ghp_abcdefgh{}",
        "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_a_secret_is_never_shown(text):
    shown = redacted(text.format(SECRET))
    assert "[hidden]" in shown
    assert SECRET not in shown


@pytest.mark.parametrize(
    "text",
    [
        "Connection refused",
        "the token expired",
        "failed to fetch token: no such file",
        'secrets "login" is forbidden: User "x" cannot get resource "secrets"',
        "secretName: login",
        "https://registry.example/v2/app@sha256:0123",
        'Bearer realm="https://auth.example"',
        "env_from:\n- secret: login-2",
        "/run/secrets/token: permission denied",
        "getting credentials: decoding stdout: no kind is set",
        "automountServiceAccountToken: false, as it was",
        "token='' and password=None",
        "git+ssh://git@host.example/team/lib.git",
        "--secret id=pip,src=pip.conf",
    ],
)
def test_other_texts_stay_as_they_are(text):
    assert redacted(text) == text


@pytest.mark.parametrize(
    "part", ["token ", "token:[", "token:  ", "://", "--a-", "bearer ", "-", '"']
)
def test_a_long_text_takes_linear_time(part):
    redacted(part * 50_000)  # quadratic patterns would take minutes


@pytest.mark.parametrize(
    ("origin", "step"),
    [
        (None, "pip install 'k8sjob[ui]'"),
        ({"url": "file:///a/k.whl", "archive_info": {}}, "pip install 'k8sjob[ui]'"),
        ({"url": "file:///a%20b", "dir_info": {}}, "pip install '/a b[ui]'"),
        ({"url": "file:///a", "dir_info": {"editable": True}}, "pip install -e '/a[ui]'"),
    ],
)
def test_an_extra_is_installed_from_where_k8sjob_came_from(monkeypatch, origin, step):
    distribution = SimpleNamespace(read_text=lambda _name: origin and json.dumps(origin))
    monkeypatch.setattr(metadata, "distribution", lambda _name: distribution)
    assert install_step("ui") == step


@pytest.mark.parametrize(
    "error",
    [
        SpecError([invalid(("volumes", 0), "no", "go", line=2)], "job.yaml"),
        BackendError("no", "go"),
    ],
)
def test_an_error_survives_pickling(error):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
