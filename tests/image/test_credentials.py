"""Credentials as docker and podman leave them behind, with their helpers."""

import base64
import json
import os
import pwd

import pytest

from k8sjob.errors import ImageError
from k8sjob.image.registry.credentials import Keyring, Login
from k8sjob.image.registry.manifest import DEFAULT_REGISTRY, ImageReference


def basic(text):
    return base64.b64encode(text.encode()).decode()


@pytest.fixture
def keep(home):
    """Writes docker's file, or another one below the home folder."""

    def write(content, name=".docker/config.json"):
        file = home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return file

    return write


@pytest.fixture
def helper(tmp_path, monkeypatch):
    """Installs a credential helper that is a shell script."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def write(name, script):
        program = folder / f"docker-credential-{name}"
        program.write_text(f"#!/bin/sh\nread server\n{script}\n")
        program.chmod(0o755)

    return write


def login(text, environ=None):
    entries = Keyring.load(environ).entries(ImageReference.parse(text))
    return next((found for entry in entries if (found := entry.login())), None)


def test_nobody_with_a_home(monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # as in a container with any user
    assert login("reg.example/no-such") is None


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"auth": basic("me:with:colons")}, Login("me", "with:colons")),
        ({"auth": basic("me:padded\0\0")}, Login("me", "padded")),
        ({"username": "me", "password": "secret"}, Login("me", "secret")),
        ({"identitytoken": "T", "auth": basic("me:")}, Login("me", "", "T")),
        ({}, None),
    ],
)
def test_forms_of_an_entry(keep, entry, expected):
    keep({"auths": {"reg.example:5000": entry}})
    assert login("reg.example:5000/team/x") == expected
    assert login("reg.example/team/x") is None


DEFAULT_KEY = f"https://index.{DEFAULT_REGISTRY}/v1/"


@pytest.mark.parametrize(
    ("key", "image"),
    [
        ("https://reg.example/v1/", "reg.example/team/x"),
        ("reg.example/v2/", "reg.example/team/x"),
        (DEFAULT_KEY, "python"),
        (DEFAULT_KEY, f"registry-1.{DEFAULT_REGISTRY}/team/x"),
    ],
)
def test_a_registry_is_named_in_several_ways(keep, key, image):
    keep({"auths": {key: {"auth": basic("me:x")}}})
    assert login(image) == Login("me", "x")


def test_podmans_entries_are_for_a_part_of_a_registry(keep):
    auths = {
        "quay.example/teama": {"auth": basic("a:1")},
        "quay.example/teama/deep": {"auth": basic("deep:2")},
        "quay.example": {"auth": basic("all:3")},
        "other.example/teama": {"auth": basic("b:4")},
    }
    keep({"auths": auths}, ".config/containers/auth.json")
    assert login("quay.example/teama/x").username == "a"
    assert login("quay.example/teama/deep/x").username == "deep"
    assert login("quay.example/teamab/x").username == "all"
    assert login("other.example/teamb/x") is None
    keys = Keyring.load()
    one, two = (
        keys.entries(ImageReference.parse(f"quay.example/{n}/x")) for n in ("teama", "teamc")
    )
    assert one != two
    assert keys.entries(ImageReference.parse("quay.example/teamc/y")) == two


def test_the_order_of_the_files(keep, tmp_path):
    entry = lambda name: {"auths": {"reg.example": {"auth": basic(f"{name}:x")}}}  # noqa: E731
    keep(entry("podman"), ".config/containers/auth.json")
    assert login("reg.example/x").username == "podman"
    named = keep(entry("named"), "named.json")
    environ = {**os.environ, "REGISTRY_AUTH_FILE": str(named)}
    assert login("reg.example/x", environ).username == "named"
    keep(entry("docker"))
    assert login("reg.example/x", environ).username == "docker"
    keep(entry("moved"), "elsewhere/config.json")
    environ["DOCKER_CONFIG"] = str(named.parent / "elsewhere")
    assert login("reg.example/x", environ).username == "moved"


def test_helpers(keep, helper):
    helper("one", """echo "{\\"Username\\": \\"$server\\", \\"Secret\\": \\"s\\"}" """)
    helper("token", """echo '{"Username": "<token>", "Secret": "T"}'""")
    helper("none", "echo 'credentials not found in native keychain'; exit 1")
    keep(
        {
            "credsStore": "none",
            "credHelpers": {"reg.example": "one", "https://cloud.example": "token"},
            "auths": {"plain.example": {"auth": basic("me:x")}, "reg.example": {}},
        }
    )
    assert login("reg.example/x") == Login("reg.example", "s")
    assert login("cloud.example/x") == Login(identity_token="T")
    assert login("plain.example/x") == Login("me", "x")
    assert login("else.example/x") is None


def test_the_store_is_queried_by_the_name_that_it_knows(keep, helper):
    helper("store", """echo "{\\"Username\\": \\"$server\\", \\"Secret\\": \\"s\\"}" """)
    keep({"credsStore": "store"})
    assert login("python").username == f"https://index.{DEFAULT_REGISTRY}/v1/"
    assert login("reg.example:5000/x").username == "reg.example:5000"


SECRET = "s3cr3t-value"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo no session >&2; exit 3", r"exit code 3: no session; try it by hand"),
        (
            f"""echo '{{"Secret": "{SECRET}"}}'; exit 1""",
            r"exit code 1: \(its output is not shown\)",
        ),
        (f"""echo '{{"Secret": "{SECRET}"}}'""", r"not JSON with Username and Secret"),
        ("exit 1", r"exit code 1: it gave no message"),
    ],
)
def test_a_helper_that_fails(keep, helper, script, message):
    helper("bad", script)
    keep({"credHelpers": {"reg.example": "bad"}})
    with pytest.raises(ImageError, match=message) as caught:
        login("reg.example/x")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, r"config\.json: not JSON in UTF-8"),
        ({"auths": {"reg.example": {"auth": SECRET}}}, r"auth is not base64 of USER:PASSWORD"),
    ],
)
def test_a_broken_file_is_named(keep, content, message):
    keep(content)
    with pytest.raises(ImageError, match=message) as caught:
        login("reg.example/x")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("content", ["", "{}", '{"auths": []}', '{"auths": {"reg.example": 7}}'])
def test_a_file_without_logins(keep, content):
    keep(content)
    assert login("reg.example/x") is None


def test_secrets_are_in_no_repr(keep):
    keep({"auths": {"reg.example": {"auth": basic(f"me:{SECRET}")}}})
    entries = Keyring.load().entries(ImageReference.parse("reg.example/x"))
    assert SECRET not in repr(entries)
    assert basic(f"me:{SECRET}") not in repr(entries)
    assert SECRET not in repr(entries[0].login())
    assert SECRET not in repr(Login("me", SECRET, SECRET))
