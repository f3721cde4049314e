"""Images in a folder instead of a registry, read there by other tools."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from registries import docker_alone, read_image, skopeo

from k8sjob.errors import ImageError
from k8sjob.image.registry.blob_content import Sent


@pytest.fixture(scope="module")
def base(registry, base_image):
    return base_image(registry, "layout/base:1")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def written(registry, pushed, code, out):
    """Pushes into the folder `out`."""

    def call(base, **options):
        return pushed(f"{registry.host}/layout/app", base, code, **{"output": out, **options})

    return call


def manifest_of(folder, tag):
    """The manifest under a tag in a layout's folder; all that it names is there."""
    (entry,) = [
        each
        for each in json.loads((folder / "index.json").read_text())["manifests"]
        if each["annotations"]["org.opencontainers.image.ref.name"] == tag
    ]
    manifest = json.loads(blob_of(folder, entry))
    for each in (manifest["config"], *manifest["layers"]):
        blob_of(folder, each)
    return manifest


def blob_of(folder, entry):
    raw = (folder / "blobs" / entry["digest"].replace(":", "/")).read_bytes()
    assert f"sha256:{hashlib.sha256(raw).hexdigest()}" == entry["digest"]
    return raw


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_the_image_is_the_one_that_the_registry_gets(registry, base, written, out):
    dry = written(base, dry_run=True)
    assert {blob.sent for blob in dry.blobs} == {Sent.MISSING}
    assert not out.exists()
    done = written(base)
    assert [blob.sent for blob in done.blobs] == [Sent.UPLOADED] * 4
    assert registry.tags("layout/app") == []
    there = written(base, output=None)
    assert (done.reference, done.digest, dry.digest) == (there.reference, *[there.digest] * 2)
    assert manifest_of(out, done.tag) == read_image(there.reference)[0]


def test_several_images_lie_beside_each_other(registry, base, written, code, out):
    first = written(base)
    before = files(out)
    again = written(base)
    assert (again.unchanged, again.blobs, files(out)) == (True, (), before)
    (code / "main.py").write_text("print('else')\n")
    second = written(base)
    assert [blob.sent for blob in second.blobs] == [Sent.THERE] * 2 + [Sent.UPLOADED] * 2
    entries = json.loads((out / "index.json").read_text())["manifests"]
    assert [entry["digest"] for entry in entries] == [first.digest, second.digest]
    assert entries[0]["platform"] == {"os": "linux", "architecture": "amd64"}
    assert entries[1]["annotations"] == {
        "org.opencontainers.image.ref.name": second.tag,
        "io.containerd.image.name": f"{registry.host}/layout/app:{second.tag}",
    }
    for image in (first, second):
        assert manifest_of(out, image.tag)["layers"]


@docker_alone
def test_a_base_with_docker_media_types_becomes_one_of_oci(
    registry, base_image, written, out, buildah
):
    done = written(base_image(registry, "layout/docker:1", form="v2s2"))
    raw = json.dumps(manifest_of(out, done.tag))
    assert "vnd.docker" not in raw
    assert raw.count("application/vnd.oci.image.layer.v1.tar+gzip") == 3
    name = buildah("from", f"oci:{out}:{done.tag}")
    try:
        root = Path(buildah("mount", name))
        assert (root / "app/main.py").read_text() == "print('hello')\n"
    finally:
        buildah("rm", name)
        buildah("rmi", "--all")


@pytest.mark.parametrize("fault", ["other_content", "cut_answer", "forbidden"])
def test_what_comes_wrong_is_never_an_image(faulty, base, written, tmp_path, fault):
    whole = 0
    for at in range(1, 8):
        out = tmp_path / str(at)
        faulty.arm(fault, at)
        try:
            done = written(f"{faulty.host}/{base.partition('/')[2]}", output=out)
        except ImageError:
            assert not (out / "index.json").exists()
        else:
            whole += 1
            assert manifest_of(out, done.tag)
        finally:
            faulty.arm(None)
        for path in out.glob("blobs/sha256/*"):
            assert path.name == hashlib.sha256(path.read_bytes()).hexdigest()
    assert whole


@pytest.fixture
def job_file(write_job, registry, base):
    return write_job(f"{registry.host}/layout/cli", base)


@docker_alone
def test_the_command_says_how_to_bring_it_on(skopeo_is_there, k8sjob, job_file, registry, out):
    would = k8sjob("push", job_file, "--dry-run", "-o", f"oci:{out}")
    sizes = r"would send [\d.]+ kB, and [\d.]+ (kB|bytes) of the base$"
    assert re.search(sizes, would.stderr, re.MULTILINE), would.stderr
    done = k8sjob("push", job_file, "--output", f"oci:{out}")
    assert done.returncode == 0, done.stderr
    assert would.stdout == done.stdout
    assert done.stdout.startswith(f"{registry.host}/layout/cli@sha256:")
    words = re.search(r"to push it: skopeo copy (.*)$", done.stderr, re.MULTILINE)
    skopeo("copy", "-q", "--dest-tls-verify=false", *words[1].split())
    assert read_image(done.stdout.strip())[0]["layers"]


def test_a_disk_that_is_full(k8sjob, job_file, code, out):
    (code / "large").write_bytes(os.urandom(3 << 20))
    argv = f"ulimit -f 1024; exec {sys.executable} -m k8sjob push {job_file} -o oci:{out}"
    done = subprocess.run(["bash", "-c", argv], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"error: {out}: cannot be written: File too large; free some space" in done.stderr
    assert not (out / "index.json").exists()
    assert [name for name in files(out) if "k8sjob-" in name] == []
    again = k8sjob("push", job_file, "-o", f"oci:{out}")  # with space
    assert again.returncode == 0, again.stderr
