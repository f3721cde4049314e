"""The environment variables that the client reads; only this module does.

Each is read when it is needed. Those of the runtime are in k8sjob.runtime.base; click reads the
ones of options, such as K8SJOB_PLAIN_HTTP.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

STATE: Final = "K8SJOB_STATE"
"""The folder of the jobs on this machine, and of records."""
TRACEBACK: Final = "K8SJOB_TRACEBACK"
"""1 shows the traceback of an error."""
WEBHOOK_URL: Final = "K8SJOB_WEBHOOK_URL"
"""Where messages of `k8sjob collect` are sent."""
COMPLETE: Final = "K8SJOB_COMPLETE"
"""The shell that asks for completions; it sends the line in K8SJOB_LINE."""
ISOLATION: Final = "BUILDAH_ISOLATION"
"""How buildah and podman isolate commands, if the user decides it."""


def variables() -> dict[str, str]:
    """All variables: for other programs, and for settings that other programs define."""
    return dict(os.environ)


def home() -> Path:
    """$HOME, else the folder of this user's account; / for users without one, as in containers."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def state_folder() -> Path:
    """$K8SJOB_STATE, else $XDG_STATE_HOME/k8sjob, else ~/.local/state/k8sjob."""
    if named := os.environ.get(STATE):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_STATE_HOME") or home() / ".local/state", "k8sjob")


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/k8sjob, else ~/.cache/k8sjob."""
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache", "k8sjob")


def kubeconfig() -> str:
    """$KUBECONFIG, one path or several, else ~/.kube/config."""
    return os.environ.get("KUBECONFIG") or str(home() / ".kube/config")


def api_server() -> tuple[str, str] | None:
    """Host and port of the cluster's API server, which every container of a pod gets."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    port = os.environ.get("KUBERNETES_SERVICE_PORT")
    return (host, port) if host and port else None


def visible_gpus() -> str | None:
    """$CUDA_VISIBLE_DEVICES: the GPUs that programs may use; None: all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def wants_traceback() -> bool:
    """Whether $K8SJOB_TRACEBACK is set, and not to 0."""
    return os.environ.get(TRACEBACK, "0") not in {"", "0"}


def webhook_url() -> str:
    """$K8SJOB_WEBHOOK_URL; it may hold a token."""
    return os.environ.get(WEBHOOK_URL, "").strip()


def take_completion() -> str | None:
    """The line that a shell wants completed, if it asks; removed, so that nothing inherits it."""
    line = os.environ.pop("K8SJOB_LINE", "")
    return line if os.environ.pop(COMPLETE, None) else None


def no_colors() -> bool:
    """Whether $NO_COLOR is set."""
    return bool(os.environ.get("NO_COLOR"))


def allows_live_screen() -> bool:
    """Whether a terminal is for a person ($CI is not set), and can move its cursor ($TERM)."""
    return not os.environ.get("CI") and os.environ.get("TERM") != "dumb"


def locale() -> str:
    """The language and the encoding of the terminal, as in ko_KR.UTF-8; empty if not set."""
    return os.environ.get("LC_ALL") or os.environ.get("LANG") or ""
