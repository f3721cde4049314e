"""What a job installs, by the base's own pip from an index that wants a password."""

import base64
import gzip
import json
import os
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from registries import Registry, job
from wheelhouse import wheel

from k8sjob.image.build import build
from k8sjob.image.credentials import Keyring
from k8sjob.image.push import push

pytestmark = pytest.mark.system

LOGIN = "somebody:very-secret"
MAIN = "import json, torch, tinylib\nprint(json.dumps([tinylib.version, torch.__file__]))\n"


@pytest.fixture
def index(tmp_path):
    """An index on loopback with one package: gives its address, with the password in it."""
    file = wheel(tmp_path / "wheels", "tinylib", "1.2")
    wanted = "Basic " + base64.b64encode(LOGIN.encode()).decode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            known = self.headers.get("Authorization") == wanted
            page = f'<a href="/{file.name}">{file.name}</a>'.encode()
            content = {"/simple/tinylib/": page, f"/{file.name}": file.read_bytes()}.get(self.path)
            self.send_response(401 if not known else 404 if content is None else 200)
            if not known:
                self.send_header("WWW-Authenticate", 'Basic realm="index"')
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(content or b"") if known else 0))
            self.end_headers()
            if known:
                self.wfile.write(content or b"")

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{LOGIN}@127.0.0.1:{server.server_port}/simple/"
        server.shutdown()


@pytest.fixture
def registry(buildah, tmp_path):
    registry = Registry(tmp_path / "registry")
    yield registry
    registry.stop()
    shutil.rmtree(registry.folder)  # the base is large


@pytest.fixture
def storage_of(buildah, tmp_path, monkeypatch):
    """Builders use the storage that has the base already."""
    driver = buildah("info", "--format", "{{.store.GraphDriverName}}")
    where = f'graphroot = "{buildah.home}/storage"\nrunroot = "{buildah.home}/run"\n'
    (tmp_path / "storage.conf").write_text(f'[storage]\ndriver = "{driver}"\n{where}')
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(tmp_path / "storage.conf"))


@pytest.fixture
def settings(index, monkeypatch):
    """This user's index is that one."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_INDEX_URL", index)


@pytest.fixture
def spec(buildah, base_image, registry, code):
    buildah.push(base_image, f"{registry.host}/base:1")
    return job(f"{registry.host}/team/app", f"{registry.host}/base:1", pip=["tinylib"])


@pytest.fixture
def code(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code/main.py").write_text(MAIN)
    return tmp_path / "code"


@pytest.mark.usefixtures("settings", "storage_of")
def test_a_package_is_installed_and_the_code_put_on_it(buildah, registry, spec, code):
    keyring, said = Keyring({}), []
    built = build(spec, code, builder="buildah", cached=False, keyring=keyring, say=said.append)
    try:
        assert any("Successfully installed tinylib-1.2" in line for line in said)
        assert "very-secret" not in "\n".join(said)
        done = push(spec, code, keyring=keyring)
        assert done.base == built.reference
        check_layers(registry, built.base, done.reference)
        version, torch = output(buildah, done.reference)
        assert version == "1.2"
        assert torch.startswith("/usr/lib/python3/")
    finally:
        buildah("rmi", f"localhost/k8sjob-{built.tag}")


def check_layers(registry, base, image):
    """The base is as it was, and nothing upon it knows the password."""
    below, manifest = (read(registry, reference) for reference in (base, image))
    count = len(below["layers"])
    assert manifest["layers"][:count] == below["layers"]
    for part in (manifest["config"], *manifest["layers"][count:]):
        blob = registry.get(f"/v2/team/app/blobs/{part['digest']}")
        raw = gzip.decompress(blob) if blob.startswith(b"\x1f\x8b") else blob
        assert len(raw) > 100
        assert b"very-secret" not in raw


def read(registry, reference):
    repository, _, digest = reference.removeprefix(f"{registry.host}/").partition("@")
    accepted = "application/vnd.oci.image.manifest.v1+json"
    return json.loads(registry.get(f"/v2/{repository}/manifests/{digest}", accepted))


def output(buildah, reference):
    """What the image's command prints last."""
    name = buildah("from", "--tls-verify=false", reference)
    try:
        said = buildah("run", "--isolation", "chroot", name, "--", "python", "main.py")
    finally:
        buildah("rm", name)
        buildah("rmi", reference)
    return json.loads(said.splitlines()[-1])
