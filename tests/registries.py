"""Registries and images for tests, made and read without this project's code."""

import contextlib
import gzip
import hashlib
import io
import json
import socket
import ssl
import subprocess
import tarfile
import time
import urllib.error
import urllib.request

import pytest
from inprocess import InProcessRegistry

from k8sjob.image.registry.http_client import RetryPolicy
from k8sjob.spec import JobSpec

# Impatient: what a fault costs is a matter of tries here, not of time.
QUICK = RetryPolicy(tries=4, pause=0.01, connect=20, read=60)


PASSWORD = "pass:word"
# bcrypt of it
HTPASSWD = "me:$2y$04$abcdefghijklmnopqrstuu7govE5p0NSk1WUEk5C2Qm3hpPC6VJ66\n"


CONFIG = {"Env": ["PATH=/usr/bin:/bin", "PYTHONPATH=/base/lib"], "Entrypoint": ["/entry"]}
LAYERS = ({"etc/os-release": b"ID=test\n", "app/old.txt": b"of the base"}, {"opt/more": b"m" * 99})


BOTH = ("in-process", "docker")


def with_docker(test):
    """Runs a test with Debian's registry, too."""
    test.registries = BOTH
    return test


def docker_alone(test):
    """Runs a test with Debian's registry, to which other tools push."""
    test.registries = ("docker",)
    return test


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask(registry, method, path, body=None, headers=None):
    """An answer of a registry; asked without this project's code."""
    url = path if "://" in path else f"{registry.scheme}://{registry.host}{path}"
    request = urllib.request.Request(url, body, headers or {}, method=method)
    tls = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), tls)
    with opener.open(request, timeout=60) as answer:
        return answer.read(), answer.headers


class Contents:
    """What tests read of a registry of either kind, and put there."""

    scheme = "http"

    def get(self, path, accept="*/*", **headers):
        """A resource as bytes, or None where there is none."""
        try:
            return ask(self, "GET", path, headers={"Accept": accept, **headers})[0]
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                return None
            raise

    def tags(self, repository):
        found = self.get(f"/v2/{repository}/tags/list")
        return json.loads(found)["tags"] or [] if found else []

    def put(self, layout, name, **headers):
        """Copies a layout's images to a name with a tag; what its index names gets the tag."""
        repository, _, tag = name.rpartition(":")
        root = f"/v2/{repository}"
        (top,) = json.loads((layout.folder / "index.json").read_bytes())["manifests"]
        self._put_manifest(layout, root, top, tag, headers)

    def _put_manifest(self, layout, root, entry, version, headers):
        raw = layout.path(entry["digest"]).read_bytes()
        content = json.loads(raw)
        for each in content.get("manifests", []):
            self._put_manifest(layout, root, each, each["digest"], headers)
        config = [content["config"]] if "config" in content else []
        for blob in [*config, *content.get("layers", [])]:
            _, answer = ask(self, "POST", f"{root}/blobs/uploads/", b"", headers)
            place = answer["Location"]
            place += ("&" if "?" in place else "?") + f"digest={blob['digest']}"
            kind = {"Content-Type": "application/octet-stream"}
            ask(self, "PUT", place, layout.path(blob["digest"]).read_bytes(), headers | kind)
        kind = {"Content-Type": entry["mediaType"]}
        ask(self, "PUT", f"{root}/manifests/{version}", raw, headers | kind)


class LocalRegistry(InProcessRegistry, Contents):
    """The one in this process."""

    def __init__(self, **config):
        super().__init__(password=PASSWORD, **config)


class Registry(Contents):
    """Debian's docker-registry, started with a configuration of its own."""

    def __init__(self, folder, **config):
        self.port = free_port()
        self.host = f"127.0.0.1:{self.port}"
        self.folder = folder
        http = {"addr": self.host, **config.pop("http", {})}
        self.scheme = "https" if "tls" in http else "http"
        content = {
            "version": 0.1,
            "log": {"level": "error", "accesslog": {"disabled": True}},
            "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
            "http": http,
            **config,
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yml").write_text(json.dumps(content))
        self.start()

    def start(self):
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                ["docker-registry", "serve", str(self.folder / "config.yml")],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.02)
        pytest.fail(f"no registry: {(self.folder / 'log').read_text()}")

    def stop(self):
        self.process.kill()
        self.process.wait()


TYPES = {
    "oci": (
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.oci.image.config.v1+json",
        "application/vnd.oci.image.layer.v1.tar+gzip",
    ),
    "v2s2": (
        "application/vnd.docker.distribution.manifest.v2+json",
        "application/vnd.docker.container.image.v1+json",
        "application/vnd.docker.image.rootfs.diff.tar.gzip",
    ),
}
MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)


class Address(Contents):
    def __init__(self, host):
        self.host = host


def read_image(reference, architecture="amd64"):
    """An image of a registry: manifest, config, and each layer's contents by name."""
    manifest, read = read_manifest(reference, architecture)
    layers = []
    for entry in manifest["layers"]:
        with tarfile.open(fileobj=io.BytesIO(read("blobs", entry["digest"]))) as archive:
            contents = {m: m.isfile() and archive.extractfile(m).read() for m in archive}
        layers.append({member.name: content for member, content in contents.items()})
    return manifest, json.loads(read("blobs", manifest["config"]["digest"])), layers


def read_manifest(reference, architecture="amd64"):
    """A manifest of a registry, and a function that reads blobs beside it."""
    host, _, name = reference.partition("/")
    repository, _, version = name.rpartition("@" if "@" in name else ":")
    root, registry = f"/v2/{repository}", Address(host)

    def read(kind, digest):
        raw = registry.get(f"{root}/{kind}/{digest}", ", ".join(MANIFESTS))
        assert raw is not None, f"{reference}: no {kind} {digest}"
        if digest.startswith("sha256:"):
            assert f"sha256:{hashlib.sha256(raw).hexdigest()}" == digest
        return raw

    manifest = json.loads(read("manifests", version))
    for entry in manifest.get("manifests", ()):
        if entry["platform"]["architecture"] == architecture:
            manifest = json.loads(read("manifests", entry["digest"]))
    return manifest, read


def tar_of(files):
    """An archive of files by their names; a text instead of bytes is where a link leads."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            if isinstance(data, str):
                member.type, member.linkname = tarfile.SYMTYPE, data
                archive.addfile(member)
                continue
            member.size = len(data)
            member.mode = 0o755 if data[:4] == b"\x7fELF" else 0o644
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


class Layout:
    """An OCI layout written by hand, to be copied into a registry."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "blobs/sha256").mkdir(parents=True)
        (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def blob(self, data, media_type):
        digest = hashlib.sha256(data).hexdigest()
        (self.folder / "blobs/sha256" / digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    def path(self, digest):
        return self.folder / "blobs" / digest.replace(":", "/")

    def image(self, layers, config=None, platform="linux/amd64", form="oci"):
        system, architecture = platform.split("/")[:2]
        archives = [tar_of(files) for files in layers]
        content = {
            "architecture": architecture,
            "os": system,
            "config": config or {},
            "rootfs": {
                "type": "layers",
                "diff_ids": [f"sha256:{hashlib.sha256(a).hexdigest()}" for a in archives],
            },
            "history": [{"created_by": f"layer {n}"} for n in range(len(archives))],
        }
        of_manifest, of_config, of_layer = TYPES[form]
        manifest = {
            "schemaVersion": 2,
            "mediaType": of_manifest,
            "config": self.blob(json.dumps(content).encode(), of_config),
            "layers": [self.blob(gzip.compress(a, 1, mtime=0), of_layer) for a in archives],
        }
        return self.blob(json.dumps(manifest).encode(), of_manifest)

    def index(self, entries):
        """The layout's index; several images are an index of their own in it, as tools expect."""
        media_type = "application/vnd.oci.image.index.v1+json"
        content = {"schemaVersion": 2, "mediaType": media_type, "manifests": entries}
        if len(entries) > 1:
            content["manifests"] = [self.blob(json.dumps(content).encode(), media_type)]
        (self.folder / "index.json").write_text(json.dumps(content))


def skopeo(*args):
    done = subprocess.run(["skopeo", *args], capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, f"{done.args}\n{done.stderr.decode()}"
    return done.stdout


def job(repository, base, **image):
    return JobSpec.model_validate(
        {
            "name": "tiny",
            "image": {"repository": repository, "base": base, **image},
            "run": {"script": "main.py", "args": ["--epochs", "2"]},
        }
    )
