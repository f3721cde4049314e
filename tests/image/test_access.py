"""Logins at registries: names and passwords, tokens, TLS, proxies."""

import base64
import hashlib
import json
import shutil
import time

import pytest
from registries import BOTH, HTPASSWD, PASSWORD
from tokens import TokenServer

from k8sjob.errors import ImageError
from k8sjob.image.registry.blob_content import Sent
from k8sjob.image.registry.credentials import Keyring

REGISTRIES = BOTH


def keys(folder, logins):
    """A keyring from a file, with these `user:password` by place."""
    auths = {
        place: {"auth": base64.b64encode(text.encode()).decode()} if isinstance(text, str) else text
        for place, text in logins.items()
    }
    (folder / "config.json").write_text(json.dumps({"auths": auths}))
    return Keyring.load({"DOCKER_CONFIG": str(folder), "HOME": str(folder)})


@pytest.fixture(scope="module")
def basic(start_registry, base_image, tmp_path_factory):
    """A registry that wants a name and a password for everything."""
    file = tmp_path_factory.mktemp("auth") / "htpasswd"
    file.write_text(HTPASSWD)
    registry = start_registry(auth={"htpasswd": {"realm": "test", "path": str(file)}})
    login = base64.b64encode(f"me:{PASSWORD}".encode()).decode()
    base_image(registry, Authorization=f"Basic {login}")
    return registry


def test_a_name_and_a_password(basic, pushed, code, home):
    base, target = f"{basic.host}/team/base:1", f"{basic.host}/team/app"
    done = pushed(target, base, code, keyring=keys(home, {basic.host: f"me:{PASSWORD}"}))
    assert [blob.sent for blob in done.blobs][:2] == [Sent.MOUNTED] * 2


def test_no_login_and_a_wrong_one(basic, pushed, code, home):
    base, target = f"{basic.host}/team/base:1", f"{basic.host}/team/app"
    with pytest.raises(ImageError, match=rf"{basic.host} requires a login; run: docker login"):
        pushed(target, base, code)
    with pytest.raises(
        ImageError, match=r"returned 401: UNAUTHORIZED .*; run: docker login"
    ) as bad:
        pushed(target, base, code, keyring=keys(home, {basic.host: "me:wr0ng"}))
    assert "wr0ng" not in str(bad.value)
    assert base64.b64encode(b"me:wr0ng").decode() not in str(bad.value)


@pytest.fixture
def tokens(certificate):
    server = TokenServer(certificate)
    server.users["me"] = PASSWORD
    server.rights = {
        ("me", "team/base"): "pull",
        ("me", "team/app"): "pull,push",
        ("root", "team/base"): "pull,push",
    }
    server.users["root"] = "root"
    yield server
    server.stop()


@pytest.fixture
def bearer(start_registry, base_image, tokens):
    """A registry that wants tokens."""
    registry = start_registry(auth=tokens.config)
    access = [{"type": "repository", "name": "team/base", "actions": ["pull", "push"]}]
    base_image(registry, Authorization=f"Bearer {tokens.token('root', access)}")
    return registry


@pytest.fixture
def push_there(bearer, pushed, code):
    """Pushes to the registry that wants tokens."""

    def call(keyring, **options):
        base, target = f"{bearer.host}/team/base:1", f"{bearer.host}/team/app"
        return pushed(target, base, code, keyring=keyring, **options)

    return call


def test_one_token_is_enough_for_both_repositories(push_there, bearer, tokens, home):
    done = push_there(keys(home, {bearer.host: f"me:{PASSWORD}"}))
    assert [blob.sent for blob in done.blobs][:2] == [Sent.MOUNTED] * 2
    assert tokens.asked == [["repository:team/app:pull,push", "repository:team/base:pull"]]


def test_a_token_that_is_exchanged_for_others(push_there, bearer, tokens, home):
    tokens.refresh["REFRESH"] = "me"
    assert push_there(keys(home, {bearer.host: {"identitytoken": "REFRESH"}})).blobs
    with pytest.raises(ImageError, match=r"no token from 127.0.0.1:\d+ \(status 401\)") as caught:
        push_there(keys(home, {bearer.host: {"identitytoken": "OLD-ONE"}}))
    assert "OLD-ONE" not in str(caught.value)


def test_a_server_that_refuses_the_whole_where_a_part_is_not_allowed(
    push_there, bearer, tokens, home
):
    tokens.whole = True
    tokens.rights["", "team/base"] = "pull"
    with pytest.raises(ImageError, match=r"status 403\): the login is refused"):
        push_there(keys(home, {bearer.host: "root:root"}))
    done = push_there(keys(home, {bearer.host: f"me:{PASSWORD}"}))
    assert done.blobs


def test_nobody_may_push(push_there, bearer, tokens, home):
    tokens.rights = {("", "team/base"): "pull", ("", "team/app"): "pull"}
    with pytest.raises(ImageError, match=r"127.0.0.1:\d+ returned 401: UNAUTHORIZED"):
        push_there(keys(home, {bearer.host: f"me:{PASSWORD}"}))
    assert push_there(keys(home, {}), dry_run=True).blobs


def test_a_token_that_ends_in_mid_upload_is_renewed(push_there, bearer, tokens, code, home):
    (code / "data.bin").write_bytes(hashlib.shake_128(b"x").digest(3_000_000))
    tokens.lasts = 0.5
    slept = []

    def slowly(sent, total):
        if sent > 1_000_000 and not slept:
            slept.append(sent)
            time.sleep(1.6)

    done = push_there(keys(home, {bearer.host: f"me:{PASSWORD}"}), progress=slowly)
    assert [blob.sent for blob in done.blobs][-2:] == [Sent.UPLOADED] * 2
    assert len(tokens.asked) > 1


def test_two_logins_in_one_registry_are_two_sessions(push_there, bearer, tokens, home):
    """podman's entries are for parts of a registry: the base cannot be mounted, but copied."""
    tokens.users["other"] = "o"
    tokens.rights = {("other", "team/base"): "pull", ("me", "team/app"): "pull,push"}
    logins = {
        f"{bearer.host}/team/base": "other:o",
        f"{bearer.host}/team/app": f"me:{PASSWORD}",
    }
    done = push_there(keys(home, logins))
    assert [blob.sent for blob in done.blobs][:2] == [Sent.UPLOADED] * 2


# --- TLS ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls(start_registry, certificate, base_image):
    cert, key = certificate
    registry = start_registry(http={"tls": {"certificate": str(cert), "key": str(key)}})
    base_image(registry)
    return registry


@pytest.fixture
def push_to_tls(tls, pushed, code):
    return lambda: pushed(f"{tls.host}/team/app", f"{tls.host}/team/base:1", code)


def test_a_certificate_must_be_trusted(tls, push_to_tls, certificate, home, monkeypatch):
    message = rf"{tls.host}: its certificate is not trusted: self-signed certificate; put"
    with pytest.raises(ImageError, match=message):
        push_to_tls()
    folder = home / ".docker/certs.d" / tls.host
    folder.mkdir(parents=True)
    shutil.copy(certificate[0], folder)
    assert push_to_tls().blobs
    (folder / "ca.crt").write_text("nonsense")
    with pytest.raises(ImageError, match=r"ca\.crt: not a usable certificate"):
        push_to_tls()
    (folder / "ca.crt").unlink()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    assert push_to_tls().unchanged
