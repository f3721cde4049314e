"""Registries and images for tests, made by other tools than this project."""

import contextlib
import gzip
import hashlib
import io
import json
import socket
import ssl
import subprocess
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from k8sjob.image.wire import Patience
from k8sjob.spec import JobSpec

# Impatient: what a fault costs is a matter of tries here, not of time.
QUICK = Patience(tries=4, pause=0.01, connect=20, read=60)


def read_image(reference, *flags):
    """An image as skopeo reads it: manifest, config, and each layer's contents by name."""
    with tempfile.TemporaryDirectory() as name:
        how = ["--src-tls-verify=false", *flags]
        skopeo("copy", "-q", *how, f"docker://{reference}", f"dir:{name}")
        manifest = json.loads(Path(name, "manifest.json").read_bytes())
        blobs = [
            Path(name, entry["digest"].removeprefix("sha256:")).read_bytes()
            for entry in (manifest["config"], *manifest["layers"])
        ]
    layers = []
    for blob in blobs[1:]:
        with tarfile.open(fileobj=io.BytesIO(blob)) as archive:
            contents = {m: m.isfile() and archive.extractfile(m).read() for m in archive}
        layers.append({member.name: content for member, content in contents.items()})
    return manifest, json.loads(blobs[0]), layers


CONFIG = {"Env": ["PATH=/usr/bin:/bin", "PYTHONPATH=/base/lib"], "Entrypoint": ["/entry"]}
LAYERS = ({"etc/os-release": b"ID=test\n", "app/old.txt": b"of the base"}, {"opt/more": b"m" * 99})


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Registry:
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
        self._wait()

    def _wait(self):
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.02)
        pytest.fail(f"no registry: {(self.folder / 'log').read_text()}")

    def stop(self):
        self.process.kill()
        self.process.wait()

    def get(self, path, accept="*/*", **headers):
        """A resource as bytes, or None where there is none; asked without this project's code."""
        url = f"{self.scheme}://{self.host}{path}"
        request = urllib.request.Request(url, headers={"Accept": accept, **headers})
        tls = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), tls)
        try:
            with opener.open(request, timeout=60) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                return None
            raise

    def tags(self, repository):
        found = self.get(f"/v2/{repository}/tags/list")
        return json.loads(found)["tags"] or [] if found else []


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
    """An OCI layout written by hand, for skopeo to copy into a registry."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "blobs/sha256").mkdir(parents=True)
        (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def blob(self, data, media_type):
        digest = hashlib.sha256(data).hexdigest()
        (self.folder / "blobs/sha256" / digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    def image(self, layers, config=None, platform="linux/amd64"):
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
        oci = "application/vnd.oci.image"
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{oci}.manifest.v1+json",
            "config": self.blob(json.dumps(content).encode(), f"{oci}.config.v1+json"),
            "layers": [
                self.blob(gzip.compress(a, 1, mtime=0), f"{oci}.layer.v1.tar+gzip")
                for a in archives
            ],
        }
        return self.blob(json.dumps(manifest).encode(), f"{oci}.manifest.v1+json")

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
