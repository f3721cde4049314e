"""Registries on loopback, images in them, and jobs on those."""

import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from faulty import FaultyRegistry
from registries import CONFIG, LAYERS, QUICK, Layout, LocalRegistry, Registry, job

from k8sjob.cli import main
from k8sjob.image.build import build
from k8sjob.image.push import push
from k8sjob.image.registry.credentials import Keyring
from k8sjob.image.registry.http_client import HttpClient


def pytest_generate_tests(metafunc):
    """Tests run with the registry of this process, or with those that they or their module name."""
    if "start_registry" in metafunc.fixturenames:
        kinds = getattr(metafunc.module, "REGISTRIES", ["in-process"])
        kinds = getattr(metafunc.function, "registries", kinds)
        marks = {"docker": pytest.mark.system}
        params = [pytest.param(kind, marks=marks.get(kind, ())) for kind in kinds]
        metafunc.parametrize("start_registry", params, indirect=True, scope="session")


@pytest.fixture(scope="session")
def start_registry(request, tmp_path_factory):
    """Starts registries that end with the tests: in this process, and Debian's own."""
    if request.param == "docker" and shutil.which("docker-registry") is None:
        pytest.skip("docker-registry missing; on Debian: apt install docker-registry")
    started = []

    def start(**config):
        if request.param == "docker":
            registry = Registry(tmp_path_factory.mktemp("registry"), **config)
        else:
            registry = LocalRegistry(**config)
        started.append(registry)
        return registry

    yield start
    for registry in started:
        registry.stop()


@pytest.fixture(scope="session")
def registry(start_registry):
    """One without TLS and without logins, as it is usual on loopback."""
    return start_registry()


@pytest.fixture(scope="session")
def readonly(start_registry):
    """A registry that nothing can be written to."""
    maintenance = {"readonly": {"enabled": True}}
    return start_registry(storage={"inmemory": {}, "maintenance": maintenance})


@pytest.fixture(scope="session")
def base_image(tmp_path_factory):
    """Puts an image into a registry; returns its name there."""

    def put(registry, name="team/base:1", *, form="oci", layers=LAYERS, config=CONFIG, **headers):
        layout = Layout(tmp_path_factory.mktemp("layout"))
        layout.index([layout.image(layers, config, form=form)])
        registry.put(layout, name, **headers)
        return f"{registry.host}/{name}"

    return put


@pytest.fixture
def several(registry, tmp_path):
    """Puts an index of images for several platforms into the registry; returns its name there."""

    def put(name, *platforms):
        layout = Layout(tmp_path / "several")
        entries = []
        for platform in platforms:
            place = dict(zip(("os", "architecture", "variant"), platform.split("/"), strict=False))
            entry = layout.image([{"who": platform.encode()}], platform=platform)
            entries.append({**entry, "platform": place})
        layout.index(entries)
        registry.put(layout, name)
        return f"{registry.host}/{name}"

    return put


@pytest.fixture(scope="session")
def skopeo_is_there():
    """Skips where what reads and writes images beside this project is missing."""
    if shutil.which("skopeo") is None:
        pytest.skip("skopeo missing; on Debian: apt install skopeo")


@pytest.fixture
def buildah(skopeo_is_there, tmp_path):
    """buildah with a storage of its own."""
    if os.geteuid() != 0 or shutil.which("buildah") is None:
        pytest.skip("reading images with buildah needs root, and on Debian: apt install buildah")
    storage = ["--root", tmp_path / "storage", "--runroot", tmp_path / "run"]

    def call(*args):
        argv = ["buildah", *storage, "--storage-driver=vfs", *args]
        done = subprocess.run([str(a) for a in argv], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{argv}\n{done.stderr}"
        return done.stdout.strip()

    return call


@pytest.fixture
def code(tmp_path):
    """A user's folder."""
    folder = tmp_path / "code"
    (folder / "pkg").mkdir(parents=True)
    (folder / "main.py").write_text("print('hello')\n")
    (folder / "pkg/__init__.py").write_text("")
    return folder


@pytest.fixture
def write_job(code):
    """Writes the job.yaml of an image to build, with more fields of it; returns its path."""

    def write(repository, base, more=""):
        image = f"image: {{repository: {repository}, base: '{base}'{more}}}"
        (code / "job.yaml").write_text(f"name: tiny\n{image}\nrun: {{script: main.py}}\n")
        return code / "job.yaml"

    return write


@pytest.fixture
def k8sjob(capfd):
    """Runs a command line in this process, with these variables in its environment."""

    def call(*args, **env):
        capfd.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as end:
                main([str(arg) for arg in args])
        out, err = capfd.readouterr()
        return SimpleNamespace(returncode=end.value.code or 0, stdout=out, stderr=err)

    return call


@pytest.fixture
def build_spec():
    """A job whose image is built."""
    return job("reg.example/team/app", "reg.example/base:1")


@pytest.fixture
def pushed():
    """Pushes with little patience, and without the credentials of whoever runs the tests."""

    def call(repository, base, folder, *, image=None, keyring=None, http=None, **options):
        return push(
            job(repository, base, **(image or {})),
            folder,
            keyring=keyring or Keyring({}),
            http=http or HttpClient(retry=QUICK),
            **options,
        )

    return call


@pytest.fixture
def build_there(code):
    """Builds what a job installs, in the same way; returns what was made, and the lines of it."""

    def call(repository, base, image, *, folder=code, **options):
        detail = []
        how = {"keyring": Keyring({}), "http": HttpClient(retry=QUICK), "say": detail.append}
        return build(job(repository, base, **image), folder, **how, **options), detail

    return call


@pytest.fixture(scope="module")
def faulty(registry):
    """A proxy before the registry, honest until it is told otherwise."""
    with FaultyRegistry(registry) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """A certificate for 127.0.0.1 that nobody has signed, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "ca.crt", folder / "ca.key"
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    algorithm = ["-newkey", "rsa:2048", "-nodes", "-days", "2"]
    argv = ["openssl", "req", "-x509", *algorithm, *subject, "-keyout", str(key), "-out", str(cert)]
    if shutil.which("openssl") is None:
        pytest.skip("openssl missing; on Debian: apt install openssl")
    subprocess.run(argv, check=True, capture_output=True)
    return cert, key


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    """No credentials, certificates or proxies of whoever runs the tests."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("DOCKER_CONFIG", "REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


@pytest.fixture
def home(tmp_path):
    """The user's home folder."""
    folder = Path(tmp_path / "home")
    folder.mkdir(exist_ok=True)
    return folder
