"""Images built for real, as root on Debian, with buildah and debootstrap and no daemon."""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

SUITE = "trixie"
PACKAGES = ("python-is-python3", "python3", "python3-pip", "python3-torch")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


class Buildah:
    """buildah with a storage of its own, away from the machine's images."""

    def __init__(self, home):
        self.home = home

    def argv(self, *args):
        where = ["--root", self.home / "storage", "--runroot", self.home / "run"]
        return [str(arg) for arg in ("buildah", *where, *args)]

    def __call__(self, *args, timeout=900):
        done = subprocess.run(
            self.argv(*args), capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, f"{done.args}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout.strip()

    def build(self, context, tag):
        """Build a context as its reader would, with the machine's certificates as a secret."""
        secret = ["--secret", f"id=ca,src={CERTIFICATES}"] if CERTIFICATES.exists() else []
        self("bud", "--isolation", "chroot", "--layers", *secret, "-t", tag, context)
        return tag

    def config(self, image):
        """The config of an image, as in the OCI specification."""
        return json.loads(self("inspect", "--type", "image", image))["OCIv1"]["config"]


@pytest.fixture(scope="session")
def buildah():
    """Skips where images cannot be built."""
    missing = [tool for tool in ("buildah", "debootstrap") if shutil.which(tool) is None]
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("building images without a daemon needs root on Linux")
    if missing:
        pytest.skip(f"{' and '.join(missing)} missing; on Debian: apt install {' '.join(missing)}")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = cache / "k8sjob-tests"
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Buildah(home)


@pytest.fixture(scope="session")
def base_image(buildah):
    """Debian with Python, pip and torch; made once (two minutes) for each list of packages."""
    key = hashlib.sha256(json.dumps([SUITE, *PACKAGES]).encode()).hexdigest()[:12]
    image = f"localhost/k8sjob-test-base:{key}"
    if buildah("images", "--format", "{{.ID}}", "--filter", f"reference={image}"):
        return image
    name = f"k8sjob-test-{key}"
    if name in buildah("containers", "--format", "{{.ContainerName}}").split():
        buildah("rm", name)
    buildah("from", "--name", name, "scratch")
    root = buildah("mount", name)
    include = ",".join(PACKAGES)
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={include}", SUITE, root],
        stdout=subprocess.DEVNULL,
        timeout=900,
        check=True,
    )
    for left in (*Path(root).glob("var/cache/apt/archives/*.deb"),):
        left.unlink()
    buildah("umount", name)
    buildah("commit", "--rm", "--quiet", name, image)
    return image


@pytest.fixture
def container(buildah):
    """Makes working containers of an image, and removes them."""
    made = []

    def make(image):
        made.append(buildah("from", "--pull-never", image))
        return made[-1]

    yield make
    for name in made:
        buildah("rm", name)
