"""References, manifests and indexes, and the image above: its config beside the Dockerfile."""

import json
import re
from contextlib import closing

import pytest

from k8sjob.errors import ImageError
from k8sjob.image.appending import append_code
from k8sjob.image.build_context import read_context
from k8sjob.image.code_image import CodeImage
from k8sjob.image.layers import pack_code
from k8sjob.image.push import push
from k8sjob.image.registry import manifest
from k8sjob.image.registry.manifest import DEFAULT_REGISTRY, BaseImage, ImageReference
from k8sjob.rendering.dockerfile import dockerfile
from k8sjob.spec import JobSpec

OCI = "application/vnd.oci.image"
DOCKER = "application/vnd.docker"
DIGEST = "sha256:" + "a" * 64
ENDPOINT = f"registry-1.{DEFAULT_REGISTRY}"


def image_manifest(**changes):
    return {
        "schemaVersion": 2,
        "mediaType": manifest.OCI_MANIFEST,
        "config": {"mediaType": f"{OCI}.config.v1+json", "digest": DIGEST, "size": 2},
        "layers": [{"mediaType": "x/y", "digest": DIGEST, "size": 3}],
        **changes,
    }


def base_of(below, /, **changes):
    raw = json.dumps(image_manifest(**changes)).encode()
    found = manifest.read(raw, "", "base")
    config = {"os": "linux", "architecture": "amd64", "rootfs": {"diff_ids": [DIGEST]}, **below}
    return BaseImage(ImageReference.parse("reg.example/base:1"), found, config)


@pytest.fixture
def appended(code, build_spec):
    def call(below, /, **changes):
        with closing(pack_code(read_context(code))) as layer:
            command = CodeImage.of(build_spec).command
            made = append_code(base_of(below, **changes), layer, command)
        return json.loads(made.manifest), json.loads(made.config)

    return call


def test_the_container_is_the_one_that_the_dockerfile_gives(appended, build_spec):
    below = {"Env": ["PATH=/bin", "PYTHONPATH=/lib/x", "HOME=/root"], "Entrypoint": ["/init"]}
    run = appended({"config": {**below, "User": "root", "Cmd": ["sh"], "Volumes": {"/v": {}}}})[1]
    text = dockerfile(build_spec)
    words = dict(re.findall(r"^(USER|WORKDIR|CMD|ENV) (.*)$", text, re.MULTILINE))  # the last ones
    assert run["config"]["User"] == words["USER"]
    assert run["config"]["WorkingDir"] == words["WORKDIR"]
    assert run["config"]["Cmd"] == json.loads(words["CMD"])
    variables = dict(word.split("=", 1) for word in words["ENV"].split())
    paths = variables["PYTHONPATH"].replace("${PYTHONPATH:+:$PYTHONPATH}", ":/lib/x")
    env = dict(item.split("=", 1) for item in run["config"]["Env"])
    assert env == {"PATH": "/bin", **variables, "PYTHONPATH": paths, "USER": "k8sjob"}
    kept = {"Entrypoint": ["/init"], "Volumes": {"/v": {}}}
    assert kept.items() <= run["config"].items()


def test_variables_of_a_base_that_are_none(appended):
    for variables in ({"A": "1"}, "A=1", 7, None):
        config = appended({"config": {"Env": variables}})[1]["config"]
        assert [line.partition("=")[0] for line in config["Env"]] == ["PYTHONPATH", "HOME", "USER"]


def test_paths_are_not_named_twice_and_half_a_character_is_replaced(appended):
    ours = {"Env": ["PYTHONPATH=/opt/k8sjob:/app:/deps"]}
    config = appended({"config": ours, "author": "\ud83d"})[1]
    assert "PYTHONPATH=/opt/k8sjob:/app:/deps" in config["config"]["Env"]
    assert config["author"] == "?"


def test_what_the_base_says_of_itself_stays(appended):
    below = {"author": "somebody", "variant": "v3", "os.version": "1", "container_config": {}}
    written, config = appended(
        {**below, "config": None, "history": [{"created_by": "x"}]},
        annotations={"maker": "m"},
        config={**image_manifest()["config"], "data": "e30="},
    )
    assert (config["author"], config["variant"], config["os.version"]) == ("somebody", "v3", "1")
    assert "container_config" not in config
    assert [entry["created_by"] for entry in config["history"]] == ["x", "k8sjob push"]
    assert written["annotations"]["maker"] == "m"
    assert "data" not in written["config"]
    assert written["layers"][0] == image_manifest()["layers"][0]


def test_layers_that_are_elsewhere_stay_as_they_are(appended):
    foreign = {"mediaType": "x", "digest": DIGEST, "size": 3, "urls": ["https://layers.example/a"]}
    assert base_of({}, layers=[foreign]).manifest.layers[0].elsewhere
    assert appended({}, layers=[foreign])[0]["layers"][0] == foreign


@pytest.mark.parametrize("rootfs", [None, {}, {"diff_ids": []}, {"diff_ids": [DIGEST] * 2}])
def test_a_config_that_does_not_fit_its_manifest(appended, rootfs):
    with pytest.raises(ImageError, match="its config does not name its 1 layers; the image is br"):
        appended({"rootfs": rootfs})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "not a JSON object"),
        ({"schemaVersion": 1, "mediaType": f"{DOCKER}.distribution.manifest.v1+json"}, "too old"),
        (image_manifest(layers={}), "its manifest has no config or no layers"),
        (image_manifest(mediaType=["a"]), "its manifest is of the type \"['a']\""),
        (image_manifest(config={"mediaType": {}}), "holds {}, not a container image"),
        (image_manifest(layers=[7]), "None is not a digest; the image is broken"),
        (image_manifest(layers=[{"digest": DIGEST, "size": -1}]), "has the size -1"),
    ],
)
def test_what_is_no_image(content, message):
    """Others are in docs/reference/errors-image.md."""
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    with pytest.raises(ImageError, match=f"^base: .*{re.escape(message)}"):
        manifest.read(raw, "text/plain; charset=utf-8", "base")


def entry(platform, digit):
    place = dict(zip(("os", "architecture", "variant"), platform.split("/"), strict=False))
    return {"digest": "sha256:" + digit * 64, "size": 1, "platform": place}


@pytest.mark.parametrize(
    ("platforms", "wanted", "chosen"),
    [
        (["linux/arm64"], None, 0),
        (["linux/arm64/v8", "linux/amd64"], None, 1),
        (["linux/arm64/v8", "linux/amd64"], "linux/arm64", 0),
        (["unknown/unknown", "linux/arm64"], None, 1),
        (["linux/amd64", "linux/amd64"], None, 0),
        (["linux/arm64", "windows/amd64"], None, None),
        ([], None, None),
        (["linux/arm64\nbuilt: all", "linux/arm64"], None, 1),
        (["linux\r/amd64", "linux/amd64/\x1b[2J", "linux/" + "a" * 999], None, None),
    ],
)
@pytest.mark.parametrize("kind", [manifest.OCI_INDEX, manifest.DOCKER_INDEX])
def test_platforms(platforms, wanted, chosen, kind):
    entries = [entry(platform, str(number)) for number, platform in enumerate(platforms)]
    index = manifest.read(json.dumps({"mediaType": kind, "manifests": entries}).encode(), "", "b")
    if chosen is None:
        with pytest.raises(ImageError, match=r"b: (not for linux|its index names no)"):
            index.choose(wanted, "b")
    else:
        assert index.choose(wanted, "b") == entries[chosen]["digest"]


def test_a_message_names_few_platforms():
    index = manifest.Index({f"linux/a{number:03}": DIGEST for number in range(500)})
    with pytest.raises(ImageError, match="linux/a009 and 490 more; set") as raised:
        index.choose(None, "b")
    assert len(str(raised.value)) < 300


def test_a_platform_in_a_config_begins_no_line():
    broken = base_of({"architecture": "arm64\nbuilt: all"})
    with pytest.raises(ImageError, match=r"is for 'linux/arm64\\nbuilt: all', which is not a"):
        _ = broken.platform
    with pytest.raises(ImageError, match="not a platform"):
        _ = base_of({"os": {"a": 1}}).platform


@pytest.mark.parametrize(
    ("text", "registry", "repository", "version", "endpoint"),
    [
        ("python", DEFAULT_REGISTRY, "library/python", "latest", ENDPOINT),
        ("python:3.12-slim", DEFAULT_REGISTRY, "library/python", "3.12-slim", ENDPOINT),
        (f"index.{DEFAULT_REGISTRY}/team/x", DEFAULT_REGISTRY, "team/x", "latest", ENDPOINT),
        (f"{ENDPOINT}/team/x:1", DEFAULT_REGISTRY, "team/x", "1", ENDPOINT),
        ("localhost:5000/a/b/c:1", "localhost:5000", "a/b/c", "1", "localhost:5000"),
        ("reg.example:5000/x:tag@" + DIGEST, "reg.example:5000", "x", DIGEST, "reg.example:5000"),
    ],
)
def test_what_is_left_out_is_what_docker_takes_for_it(
    text, registry, repository, version, endpoint
):
    reference = ImageReference.parse(text)
    assert (reference.registry, reference.repository) == (registry, repository)
    assert (reference.version, reference.endpoint) == (version, endpoint)
    assert str(reference) == text
    assert reference.at(DIGEST).startswith(f"{reference.name}@sha256:")


def test_a_reference_is_used_as_it_is(code):
    fields = {"name": "x", "image": "reg.example/x:1", "run": {"script": "main.py"}}
    with pytest.raises(ImageError, match=r"'reg.example/x:1' is used as it is, so there is nothin"):
        push(JobSpec.model_validate(fields), code)
