"""What a part of the tests needs besides Python: `python tests/needs.py image` shows it.

`make test` needs nothing of it; `make test-image`, `test-cluster` and `test-chaos` do.
"""

import os
import shutil
import sys
from pathlib import Path

PROGRAMS = {  # by the packages of Debian
    "image": {
        "buildah": "buildah",
        "debootstrap": "debootstrap",
        "docker-registry": "docker-registry",
        "openssl": "openssl",
        "skopeo": "skopeo",
    },
    "cluster": {
        "containerd": "containerd",
        "runc": "runc",
        "docker-registry": "docker-registry",
        "skopeo": "skopeo",
        "buildah": "buildah",
        "debootstrap": "debootstrap",
        "openssl": "openssl",
        "ip": "iproute2",
        "iptables": "iptables",
        "nsenter": "util-linux",
        "/usr/lib/cni/bridge": "containernetworking-plugins",
        "go": "",
    },
    "chaos": {"unshare": "util-linux", "ip": "iproute2", "mount": "mount", "cc": "gcc libc6-dev"},
}
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def lacking(part):
    """What this machine lacks for a part of the tests, as one clause, or None."""
    if os.uname().sysname != "Linux" or os.geteuid() != 0:
        return "needs root on Linux"
    missing = {
        Path(program).name: package
        for program, package in PROGRAMS[part].items()
        if shutil.which(program, path=PATH) is None
    }
    if not missing:
        return None
    remedies = []
    if packages := " ".join(dict.fromkeys(filter(None, missing.values()))):
        remedies.append(f"on Debian: apt install {packages}")
    if "go" in missing:
        remedies.append("install Go 1.21 or newer, which builds Kubernetes and the operator")
    return f"{', '.join(missing)} missing; {'; '.join(remedies)}"


def main():
    """Says for each part that is named what it lacks; exit code 1 if there is something."""
    found = {part: lacking(part) for part in sys.argv[1:]}
    if os.environ.get("KUBECONFIG") and os.environ.get("K8SJOB_TEST_REGISTRY"):
        found.pop("cluster", None)
    for part, reason in found.items():
        if reason:
            sys.stderr.write(f"make test-{part}: {reason}\n")
    sys.exit(any(found.values()))


if __name__ == "__main__":
    main()
