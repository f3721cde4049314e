"""The archive and the manifest of the krew plugin: python packaging/krew.py FOLDER REPOSITORY.

FOLDER gets kubectl-k8sjob.tar.gz, a file of the release at REPOSITORY (https://HOST/OWNER/k8sjob),
and k8sjob.yaml, which krew reads: kubectl krew install --manifest=k8sjob.yaml.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import tarfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MANIFEST = """\
apiVersion: krew.googlecontainertools.github.com/v1alpha2
kind: Plugin
metadata:
  name: k8sjob
spec:
  version: v{version}
  shortDescription: Run and explain PyTorch training jobs
  description: |
    Distributed PyTorch training from one job.yaml, the same on a laptop and on Kubernetes:
    checks, submits, follows and explains PyTorchJobs, TrainJobs, JobSets and Indexed Jobs.
  caveats: |
    It runs the k8sjob on the PATH, or else k8sjob {version} by uv or pipx.
  platforms:
    - selector:
        matchExpressions:
          - {{key: os, operator: In, values: [linux]}}
      uri: {url}
      sha256: {digest}
      bin: kubectl-k8sjob
      files:
        - {{from: kubectl-k8sjob, to: .}}
        - {{from: LICENSE, to: .}}
"""


def write(folder: Path, repository: str) -> None:
    """Write both files; the same sources give the same bytes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    script = (ROOT / "packaging/kubectl-k8sjob").read_text().replace("VERSION", project["version"])
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        _add(archive, "kubectl-k8sjob", script.encode(), 0o755)
        _add(archive, "LICENSE", (ROOT / "LICENSE").read_bytes(), 0o644)
    content = gzip.compress(packed.getvalue(), mtime=0)
    digest = hashlib.sha256(content).hexdigest()
    version = project["version"]
    url = f"{repository}/releases/download/v{version}/kubectl-k8sjob.tar.gz"
    manifest = MANIFEST.format(version=version, url=url, digest=digest)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kubectl-k8sjob.tar.gz").write_bytes(content)
    (folder / "k8sjob.yaml").write_text(manifest, encoding="utf-8")


def _add(archive: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    archive.addfile(entry, io.BytesIO(content))


if __name__ == "__main__":
    if len(sys.argv) != 3 or not sys.argv[2].startswith("https://"):
        sys.exit("usage: python packaging/krew.py FOLDER https://HOST/OWNER/k8sjob")
    write(Path(sys.argv[1]), sys.argv[2])
