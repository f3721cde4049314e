"""buildah without a daemon, and the Debian image with torch that tests build upon."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SUITE = "trixie"
NEWER = "forky"
"""The suite for what needs a newer torch: FSDP on CPUs needs 2.7."""
PACKAGES = ("python-is-python3", "python3", "python3-pip", "python3-torch")
# An older debootstrap knows no newer suite by name; the script of all suites is the same.
SOURCE = ("http://deb.debian.org/debian", "/usr/share/debootstrap/scripts/sid")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
# The operator's init container waits for the master's name with nslookup; libc has its like.
NSLOOKUP = '#!/bin/sh\nexec getent hosts "$1"\n'
ENV = "USE_LIBUV=0"  # Debian's torch is built without libuv, which its store would use by default


def cache_home():
    """Where tests keep what is made once: in ~/.cache, or as XDG_CACHE_HOME says."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "k8sjob-tests"
    home.mkdir(parents=True, exist_ok=True)
    return home


@contextlib.contextmanager
def once(name):
    """Holds the lock of this name, so that two sessions do not make the same thing twice."""
    with (cache_home() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def missing_tools():
    """What building images here lacks, as one clause, or None."""
    missing = [tool for tool in ("buildah", "debootstrap") if shutil.which(tool) is None]
    if os.name != "posix" or os.geteuid() != 0:
        return "building images without a daemon needs root on Linux"
    if missing:
        return f"{' and '.join(missing)} missing; on Debian: apt install {' '.join(missing)}"
    return None


class Buildah:
    """buildah with a storage of its own, away from the machine's images."""

    def __init__(self):
        self.home = cache_home()

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
        self._bud("--layers", "--force-rm", "-t", tag, context)
        return tag

    def client_image(self):
        """The image of packaging/Dockerfile upon the base image."""
        tag, root = "localhost/k8sjob-test-itself", Path(__file__).resolve().parents[1]
        base = f"BASE={self.base_image()}"
        with once("client-image"):
            self._bud("--build-arg", base, "-f", root / "packaging/Dockerfile", "-t", tag, root)
        return tag

    def _bud(self, *args):
        secret = ["--secret", f"id=ca,src={CERTIFICATES}"] if CERTIFICATES.exists() else []
        self("bud", "--isolation", "chroot", *secret, *args)

    def push(self, image, reference):
        """Push to a registry on plain HTTP; returns the digest.

        By skopeo and as it lies in the storage, because buildah would compress first, which takes
        longer than the way over loopback and hides that the registry has the layer already.
        """
        driver = self("info", "--format", "{{.store.GraphDriverName}}")
        storage = f"[{driver}@{self.home / 'storage'}+{self.home / 'run'}]"
        with tempfile.NamedTemporaryFile("r") as digest:
            copy = ["skopeo", "copy", "--quiet", "--preserve-digests", "--dest-tls-verify=false"]
            ends = [f"containers-storage:{storage}{image}", f"docker://{reference}"]
            argv = [*copy, "--digestfile", digest.name, *ends]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=900, check=False)
            assert done.returncode == 0, f"{argv}\n{done.stderr[-4000:]}"
            return digest.read().strip()

    def storage_conf(self, folder):
        """Writes the file by which other programs use this storage; see CONTAINERS_STORAGE_CONF."""
        driver = self("info", "--format", "{{.store.GraphDriverName}}")
        where = f'graphroot = "{self.home}/storage"\nrunroot = "{self.home}/run"\n'
        (folder / "storage.conf").write_text(f'[storage]\ndriver = "{driver}"\n{where}')
        return folder / "storage.conf"

    def config(self, image):
        """The config of an image, as in the OCI specification."""
        return json.loads(self("inspect", "--type", "image", image))["OCIv1"]["config"]

    def base_image(self, suite=SUITE):
        """Debian with Python, pip and torch; made once (two minutes) for each recipe."""
        recipe = [suite, *PACKAGES, NSLOOKUP, ENV]
        key = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:12]
        image = f"localhost/k8sjob-test-base:{key}"
        with once("base-image"):
            if not self("images", "--format", "{{.ID}}", "--filter", f"reference={image}"):
                self._make_base(suite, f"k8sjob-test-{key}", image)
        return image

    def _make_base(self, suite, name, image):
        if name in self("containers", "--format", "{{.ContainerName}}").split():
            self("rm", name)
        self("from", "--name", name, "scratch")
        root = Path(self("mount", name))
        options = ("--variant=minbase", f"--include={','.join(PACKAGES)}")
        subprocess.run(
            ["debootstrap", *options, suite, root, *SOURCE],
            stdout=subprocess.DEVNULL,
            timeout=900,
            check=True,
        )
        for left in root.glob("var/cache/apt/archives/*.deb"):
            left.unlink()
        nslookup = root / "usr/local/bin/nslookup"
        nslookup.write_text(NSLOOKUP)
        nslookup.chmod(0o755)
        self("umount", name)
        self("config", "--env", ENV, name)
        self("commit", "--rm", "--quiet", name, image)
