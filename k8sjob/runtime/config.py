"""The job's settings inside the container, and the places that its processes share.

Only this module and env.py read the process's environment.
"""

from __future__ import annotations

import json
import os
import reprlib
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from k8sjob import contract
from k8sjob.contract import RuntimeConfig
from k8sjob.runtime.env import EnvError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "HEARTBEAT_ENV",
    "error_file",
    "heartbeat_file",
    "launcher_hosts_store",
    "lifeline",
    "mapped_paths",
    "runtime_config",
    "source_folder",
    "termination_log",
    "under_k8sjob",
]

HEARTBEAT_ENV: Final = "K8SJOB_HEARTBEAT_FILE"
"""The file whose modification time a rank renews with each beat, for the agent of its node."""

_NUMBERS: Final = {
    "checkpoint_keep": int,
    "max_restarts": int,
    "rendezvous_timeout": float,
    "collective_timeout": float,
    "hang_timeout": float,
    "stop_grace": float,
}
_TEXTS: Final = {
    "job": False,
    "strategy": False,
    "restart_policy": False,
    "checkpoint_format": False,
    "backend": True,
    "checkpoint_dir": True,
    "local_rank_arg": True,
}
"""Fields that are text, and whether they may be null."""


def runtime_config(environ: Mapping[str, str] | None = None) -> RuntimeConfig:
    """The settings of the job; the defaults where none were given.

    Keys that this version does not know are passed over: a newer client may have sent them.

    Args:
        environ: the environment to read; None is the process's own.

    Raises:
        EnvError: CONFIG_ENV is no JSON object, or a field has a value of another kind.
    """
    environ = os.environ if environ is None else environ
    text = environ.get(contract.CONFIG_ENV)
    config = RuntimeConfig() if text is None else _decode(text)
    override = environ.get(contract.CHECKPOINT_DIR_ENV)
    return config if override is None else replace(config, checkpoint_dir=override or None)


def error_file(environ: Mapping[str, str] | None = None) -> Path | None:
    """Where a rank writes its Reason; None where no agent asked for it."""
    return _path(environ, contract.ERROR_FILE_ENV)


def heartbeat_file(environ: Mapping[str, str] | None = None) -> Path | None:
    """The file that a rank touches with each beat; None where no agent watches."""
    return _path(environ, HEARTBEAT_ENV)


def launcher_hosts_store(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the rendezvous' store belongs to the launcher, as torchrun tells its processes."""
    named = (os.environ if environ is None else environ).get("TORCHELASTIC_USE_AGENT_STORE")
    return named == "True"


def under_k8sjob(environ: Mapping[str, str] | None = None) -> bool:
    """Whether k8sjob started this job, and so somebody reads its event lines."""
    return contract.CONFIG_ENV in (os.environ if environ is None else environ)


def termination_log(environ: Mapping[str, str] | None = None) -> Path | None:
    """Where the container's Reason goes, or None outside a container.

    The kubelet mounts its file before the container starts. Where it is absent nothing is created:
    /dev of a machine that is no container is not ours to write in.
    """
    named = _path(environ, contract.TERMINATION_LOG_ENV)
    kubelet = Path(contract.TERMINATION_LOG)
    return named or (kubelet if kubelet.exists() else None)


def lifeline(environ: Mapping[str, str] | None = None) -> int | None:
    """The file descriptor at whose end of file the parent is gone; None where there is none."""
    text = (os.environ if environ is None else environ).get(contract.LIFELINE_ENV)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise EnvError(
            f"{contract.LIFELINE_ENV}={reprlib.repr(text)} is no file descriptor; remove it, k8sjob"
            " sets it"
        )
    return int(text)


def mapped_paths(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Mount path of the spec -> path on this machine; empty in a pod.

    Raises:
        EnvError: PATHS_ENV is no JSON object of strings.
    """
    text = (os.environ if environ is None else environ).get(contract.PATHS_ENV)
    if text is None:
        return {}
    body = _object(contract.PATHS_ENV, text)
    for mount, path in body.items():
        if not isinstance(path, str):
            raise EnvError(f"{contract.PATHS_ENV}: {mount!r}: {path!r} is no path; write a string")
    return body


def source_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """The user's own folder, of which the working folder is a copy; None in a pod."""
    return _path(environ, contract.SOURCE_ENV)


def _path(environ: Mapping[str, str] | None, name: str) -> Path | None:
    text = (os.environ if environ is None else environ).get(name)
    return Path(text) if text else None


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EnvError(
            f"{name} is not JSON: {error}; seen {_short(text)}; let `k8sjob render` write it"
        ) from None
    if not isinstance(body, dict):
        raise EnvError(
            f"{name} is not a JSON object: seen {_short(text)}; let `k8sjob render` write it"
        )
    return body


def _decode(text: str) -> RuntimeConfig:
    known = {item.name for item in fields(RuntimeConfig)}
    body = {key: value for key, value in _object(contract.CONFIG_ENV, text).items() if key in known}
    for key, value in body.items():
        _check(key, value)
    return RuntimeConfig(**body)


def _check(key: str, value: Any) -> None:
    """Refuse a value of the wrong kind here, where its name is known, not where it is used."""
    if key in _NUMBERS:
        kind = int if _NUMBERS[key] is int else (int, float)
        good = isinstance(value, kind) and not isinstance(value, bool) and 0 <= value < float("inf")
        wanted = "a number of at least 0"
    elif key in _TEXTS:
        good = isinstance(value, str) or (value is None and _TEXTS[key])
        wanted = "text"
    elif key == "checkpoint_every":
        number = isinstance(value, int) and not isinstance(value, bool) and value > 0
        good, wanted = number or value == "epoch", '"epoch" or a number of steps'
    else:
        good, wanted = isinstance(value, dict), "a JSON object"
    if not good:
        raise EnvError(
            f"{contract.CONFIG_ENV}: {key} is {_short(json.dumps(value))}, not {wanted}; "
            "let `k8sjob render` write it"
        )


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
