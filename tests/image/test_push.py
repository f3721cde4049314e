"""From code to an image in a registry."""

import subprocess
import time

import pytest
from registries import BOTH, LAYERS, docker_alone, read_image

from k8sjob.errors import ImageError
from k8sjob.image.dependencies import Dependencies
from k8sjob.image.registry.blob_content import Sent
from k8sjob.image.registry.manifest import ImageReference
from k8sjob.provenance import ImageLayer

REGISTRIES = BOTH


@pytest.mark.parametrize("form", ["oci", "v2s2"])
def test_an_image_is_its_base_and_one_layer(registry, base_image, pushed, code, form):
    base = base_image(registry, f"team/{form}:1", form=form)
    done = pushed(f"{registry.host}/team/app-{form}", base, code)
    below, base_config, _ = read_image(base)
    manifest, config, layers = read_image(done.reference)
    assert manifest["mediaType"] == below["mediaType"]
    assert manifest["layers"][:-1] == below["layers"]
    assert config["rootfs"]["diff_ids"][:-1] == base_config["rootfs"]["diff_ids"]
    assert len(config["history"]) == len(layers) == 3
    names = set(layers[-1])
    assert {"app/main.py", "app/pkg/__init__.py", "opt/k8sjob/k8sjob/contract.py"} <= names
    assert not any("/cli" in name or "image" in name for name in names)
    assert done.base.startswith(base.rpartition(":")[0] + "@sha256:")
    sent = [blob.sent for blob in done.blobs]
    assert sent == [Sent.MOUNTED, Sent.MOUNTED, Sent.UPLOADED, Sent.UPLOADED]
    labels = config["config"]["Labels"]
    assert labels["org.opencontainers.image.base.name"] == base
    assert labels["org.opencontainers.image.base.digest"] == done.base.partition("@")[2]
    assert ("annotations" in manifest) == (form == "oci")


def test_it_says_what_the_image_is_made_of(registry, base_image, pushed, code):
    base = base_image(registry)
    plain = pushed(f"{registry.host}/team/origin", base, code).origin
    manifest, _, _ = read_image(plain.image)
    top = manifest["layers"][-1]
    assert plain.layers == (ImageLayer("code", top["digest"], top["size"]),)
    assert (plain.base, plain.installed, plain.files) == (plain.onto, "", 2)
    assert plain.base.startswith(f"{registry.host}/team/base@sha256:")

    onto = pushed(f"{registry.host}/team/origin", "never/asked:1", code, onto=plain.image).origin
    assert (onto.onto, onto.base) == (plain.image, plain.base)  # as that one was labeled
    unlabeled = pushed(f"{registry.host}/team/origin", "never/asked:1", code, onto=base).origin
    assert (unlabeled.onto, unlabeled.base) == (plain.base, "")


@pytest.mark.parametrize("same", [True, False])
def test_layers_that_were_installed_are_distinguished_from_the_bases(
    registry, base_image, pushed, code, same
):
    base = base_image(registry)
    digest = pushed(f"{registry.host}/team/deps", base, code).origin.base
    wanted = Dependencies(pip=("tqdm",))
    place = wanted.place(
        ImageReference.parse(f"{registry.host}/team/deps"), digest.partition("@")[2]
    )
    below = LAYERS if same else ({"other": b"made anew by a builder"},)
    base_image(registry, str(place).partition("/")[2], layers=(*below, {"tqdm": b"x" * 1000}))
    origin = pushed(f"{registry.host}/team/deps", base, code, image={"pip": ["tqdm"]}).origin
    manifest, _, _ = read_image(origin.image)
    *_, installed, top = (ImageLayer("", one["digest"], one["size"]) for one in manifest["layers"])
    expected = [installed._replace(kind="dependencies")] if same else []
    assert origin.layers == (*expected, top._replace(kind="code"))
    assert (origin.base, origin.installed) == (digest, "pip: tqdm")
    assert origin.onto != origin.base


def test_unchanged_code_is_not_sent_again(registry, base_image, pushed, code):
    base = base_image(registry)
    first = pushed(f"{registry.host}/team/same", base, code)
    (code / "main.py").touch()
    again = pushed(f"{registry.host}/team/same", base, code)
    assert (again.reference, again.unchanged, again.blobs) == (first.reference, True, ())
    (code / "main.py").write_text("print('else')\n")
    changed = pushed(f"{registry.host}/team/same", base, code)
    assert changed.digest != first.digest
    assert [blob.sent for blob in changed.blobs] == [Sent.THERE] * 2 + [Sent.UPLOADED] * 2
    assert sorted(registry.tags("team/same")) == sorted([first.tag, changed.tag])


def test_unchanged_code_is_not_read_again(registry, base_image, pushed, code, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(code.with_name("cache")))
    base, packs = base_image(registry), []

    def push(name):
        packs.clear()
        packing = lambda *numbers: packs.append(numbers)  # noqa: E731
        return pushed(f"{registry.host}/team/{name}", base, code, packing=packing)

    time.sleep(2.1)  # younger files are not trusted
    first = push("known")
    assert packs
    again = push("known")
    assert (packs, again.unchanged) == ([], True)
    assert again._replace(unchanged=False, blobs=first.blobs) == first
    elsewhere = push("elsewhere")
    assert packs  # what it does not have is sent, so it is read
    assert [blob.sent for blob in elsewhere.blobs][-1] is Sent.UPLOADED
    assert elsewhere.digest == first.digest


def test_a_base_in_another_registry_is_copied(registry, start_registry, base_image, pushed, code):
    other = start_registry()
    base = base_image(other, layers=({"data": bytes(3 << 20)}, {"more": b"x" * 5_000_000}))
    seen = []
    done = pushed(
        f"{registry.host}/team/copied", base, code, progress=lambda *numbers: seen.append(numbers)
    )
    assert [blob.sent for blob in done.blobs] == [Sent.UPLOADED] * 4
    _, _, layers = read_image(done.reference)
    assert layers[0]["data"] == bytes(3 << 20)
    assert seen[-1][0] == seen[-1][1] == sum(blob.size for blob in done.blobs)


def test_the_platform_is_chosen_from_an_index(registry, base_image, several, pushed, code):
    base = several("team/several:1", "linux/arm64/v8", "linux/amd64")
    target = f"{registry.host}/team/platform"
    for platform, expected in ((None, "amd64"), ("linux/arm64", "arm64"), ("linux/amd64", "amd64")):
        done = pushed(target, base, code, image={"platform": platform})
        _, config, _ = read_image(done.reference, expected)
        assert config["architecture"] == expected
        assert done.platform == f"linux/{expected}"
    with pytest.raises(ImageError, match=r"not for linux/s390x, only for linux/amd64, linux/arm64"):
        pushed(target, base, code, image={"platform": "linux/s390x"})
    one = base_image(registry)
    with pytest.raises(ImageError, match=r"is for linux/amd64; image.platform says linux/arm64"):
        pushed(target, one, code, image={"platform": "linux/arm64"})


def test_what_an_image_has_below_is_hidden_when_code_is_put_onto_it(
    registry, base_image, pushed, code
):
    base = base_image(registry)
    done = pushed(
        f"{registry.host}/team/onto", "never/asked:1", code, onto=base, image={"pip": ["tqdm"]}
    )
    names = list(read_image(done.reference)[2][-1])
    for folder in ("app", "opt/k8sjob"):
        assert names.index(folder) < names.index(f"{folder}/.wh..wh..opq")


@docker_alone
def test_buildah_runs_on_what_was_pushed(registry, base_image, pushed, code, buildah):
    base = base_image(registry)
    (code / "run.sh").write_text("#!/bin/sh\n")
    (code / "run.sh").chmod(0o700)
    done = pushed(f"{registry.host}/team/built", base, code)
    name = buildah("from", "--tls-verify=false", done.reference)
    try:
        root = buildah("mount", name)
        listed = subprocess.run(
            ["find", ".", "-printf", "%p %m %U:%G\n"],
            cwd=f"{root}/app",
            check=True,
            capture_output=True,
            text=True,
        )
        assert sorted(listed.stdout.splitlines()) == sorted(
            [
                ". 775 1000:0",
                "./main.py 644 1000:0",
                "./old.txt 644 0:0",
                "./pkg 775 1000:0",
                "./pkg/__init__.py 644 1000:0",
                "./run.sh 755 1000:0",
            ]
        )
    finally:
        buildah("rm", name)
        buildah("rmi", done.reference)
