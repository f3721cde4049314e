"""`k8sjob push` as a user calls it, and what a user gets wrong."""

import base64
import json
import re

import pytest


@pytest.fixture
def push(k8sjob):
    return lambda *args, **env: k8sjob("push", *args, **env)


def test_only_the_reference_is_on_stdout(push, registry, base_image, write_job, code):
    base = base_image(registry, "command/base:1")
    job = write_job(f"{registry.host}/command/app", base)
    (code / ".env").write_text("x")
    (code / "conf.txt").write_text("-----BEGIN PRIV" + "ATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0B\n")
    would = push(job, "--dry-run")
    assert re.search(r"would send \d+ kB", would.stderr)
    assert "of the base unless the registry mounts them" in would.stderr
    assert registry.tags("command/app") == []
    done = push(code)
    assert done.stdout == would.stdout
    assert done.stdout.startswith(f"{registry.host}/command/app@sha256:")
    assert "left out, since they may hold credentials: .env; a line '!.env' in" in done.stderr
    assert "warning: conf.txt:1: a private key: it goes into the image" in done.stderr
    assert "mounted: 2 parts" in done.stderr
    told = json.loads(push(job, "-o", "json").stdout)
    assert (told["reference"], told["unchanged"], told["files"]) == (done.stdout.strip(), True, 4)
    assert told["findings"] == [{"path": "conf.txt", "line": 1, "what": "a private key"}]
    strict = push(job, "--strict")
    assert (strict.returncode, strict.stdout) == (1, "")
    assert "error: conf.txt:1: a private key" in strict.stderr


def test_code_is_put_onto_what_was_built(push, registry, base_image, write_job):
    below, base = (base_image(registry, f"command/{name}:1") for name in ("below", "deps"))
    job = write_job(f"{registry.host}/command/onto", below, ", apt: [git]")
    refused = push(job)
    assert refused.returncode == 1
    assert "image: apt: git has to be installed, and no image has it" in refused.stderr
    assert "build it with `k8sjob build`, or specify one that has it with --onto" in refused.stderr
    assert push(job, "--onto", base).returncode == 0


MISTAKES = {
    "{host}/command/base:9": r"returned 404: MANIFEST_UNKNOWN manifest unknown; check the name",
    "{host}/nothing/there:1": r"reading {host}/nothing/there:1: {host} returned 404",
    "127.0.0.1:9/x:1": r"reading 127.0.0.1:9/x:1: 127.0.0.1:9: ",
    "no.such.host.invalid/x:1": "no host has that name; check that it is reachable, and try again",
    "{host}/command/base@sha256:" + "0" * 64: r"returned 404: MANIFEST_UNKNOWN",
}


@pytest.mark.parametrize("base", MISTAKES)
def test_a_base_that_cannot_be_had(push, registry, base_image, write_job, base):
    base_image(registry, "command/base:1")
    job = write_job(f"{registry.host}/command/none", base.format(host=registry.host))
    done = push(job)
    assert (done.returncode, done.stdout) == (1, "")
    assert MISTAKES[base].format(host=registry.host) in done.stderr
    code, error = done.stderr.splitlines()
    assert code.startswith("code: 3 files (")
    assert code.endswith(f") of {job.parent}")
    assert error.startswith("error:")


def test_a_registry_that_takes_nothing(push, registry, readonly, base_image, write_job):
    base = base_image(registry, "command/base:1")
    done = push(write_job(f"{readonly.host}/command/app", base))
    assert done.returncode == 1
    assert f"{readonly.host} returned 405; it does not accept uploads" in done.stderr


def test_a_proxy_and_a_registry_that_is_named_for_plain_http(push, registry, base_image, write_job):
    """The registry itself is the proxy by which a host that does not exist is reached."""
    base_image(registry, "command/base:1")
    job = write_job("reg.invalid/command/plain", "reg.invalid/command/base:1")
    proxy = dict.fromkeys(("http_proxy", "https_proxy"), f"http://who:secret@{registry.host}")
    for args, env in (
        (["--plain-http", "reg.invalid"], {}),
        ([], {"K8SJOB_PLAIN_HTTP": "other.example reg.invalid"}),
    ):
        done = push(job, *args, **proxy, **env)
        assert done.returncode == 0, done.stderr
    assert registry.proxy_logins == {"Basic " + base64.b64encode(b"who:secret").decode()}
    refused = push(job, **proxy)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (1, 2)
    assert "secret" not in refused.stderr
    direct = push(job, "--plain-http", "reg.invalid", **proxy, no_proxy="reg.invalid")
    assert "no host has that name" in direct.stderr
