import pytest

from k8sjob.image.registry.manifest import DEFAULT_LOGIN, DEFAULT_REGISTRY, Reference

DIGEST = "sha256:" + "a" * 64
ENDPOINT = f"registry-1.{DEFAULT_REGISTRY}"


@pytest.mark.parametrize(
    ("text", "registry", "repository", "version", "endpoint"),
    [
        ("python", DEFAULT_REGISTRY, "library/python", "latest", ENDPOINT),
        ("python:3.12-slim", DEFAULT_REGISTRY, "library/python", "3.12-slim", ENDPOINT),
        ("team/x", DEFAULT_REGISTRY, "team/x", "latest", ENDPOINT),
        (f"{DEFAULT_REGISTRY}/python", DEFAULT_REGISTRY, "library/python", "latest", ENDPOINT),
        (f"index.{DEFAULT_REGISTRY}/team/x", DEFAULT_REGISTRY, "team/x", "latest", ENDPOINT),
        (f"{ENDPOINT}/team/x:1", DEFAULT_REGISTRY, "team/x", "1", ENDPOINT),
        ("localhost/x", "localhost", "x", "latest", "localhost"),
        ("localhost:5000/a/b/c:1", "localhost:5000", "a/b/c", "1", "localhost:5000"),
        ("reg.example/x@" + DIGEST, "reg.example", "x", DIGEST, "reg.example"),
        ("reg.example:5000/x:tag@" + DIGEST, "reg.example:5000", "x", DIGEST, "reg.example:5000"),
    ],
)
def test_what_is_left_out_is_what_docker_takes_for_it(
    text, registry, repository, version, endpoint
):
    reference = Reference.parse(text)
    assert (reference.registry, reference.repository) == (registry, repository)
    assert (reference.version, reference.endpoint) == (version, endpoint)
    assert str(reference) == text
    assert reference.at(DIGEST).startswith(f"{reference.name}@sha256:")


def test_the_login_of_the_default_registry_is_where_docker_keeps_it():
    assert f"https://index.{DEFAULT_REGISTRY}/v1/" == DEFAULT_LOGIN
