"""What uv is told of package indexes: pip's settings, where it has none of its own.

Whoever has set up pip for a private index would otherwise get packages of the same names from the
public one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from k8sjob.image.builders.settings import pip_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["as_uv_settings"]

_OWN: Final = (
    "UV_CONFIG_FILE",
    "UV_DEFAULT_INDEX",
    "UV_EXTRA_INDEX_URL",
    "UV_FIND_LINKS",
    "UV_INDEX",
    "UV_INDEX_URL",
)
"""Variables by which uv itself is told."""
_BUNDLE: Final = "SSL_CERT_FILE"


def as_uv_settings(environ: Mapping[str, str] | None = None) -> tuple[str, dict[str, str]]:
    """Pip's settings in uv's form.

    Args:
        environ: variables instead of the process's own.

    Returns:
        A uv.toml, which may hold passwords, and variables; both empty where uv has settings.

    Raises:
        ImageError: a pip.conf cannot be read.
    """
    environ = os.environ if environ is None else environ
    if any(environ.get(name) for name in _OWN) or any(path.exists() for path in _files(environ)):
        return "", {}
    settings = pip_settings(environ)
    bundle = settings.get("cert")
    variables = {_BUNDLE: bundle} if bundle and not environ.get(_BUNDLE) else {}
    return "".join(_lines(settings)), variables


def _lines(settings: Mapping[str, str]) -> Iterator[str]:
    if hosts := settings.get("trusted-host", "").split():
        yield _line("allow-insecure-host", hosts)
    yield "[pip]\n"
    if index := settings.get("index-url"):
        yield _line("index-url", index)
    for key in ("extra-index-url", "find-links"):
        if values := settings.get(key, "").split():
            yield _line(key, values)
    for key, name, value in (("no-index", "no-index", True), ("pre", "prerelease", "allow")):
        if settings.get(key, "").lower() in {"1", "y", "yes", "true", "on", "t"}:
            yield _line(name, value)


def _line(key: str, value: Any) -> str:
    return f"{key} = {json.dumps(value)}\n"  # TOML writes these as JSON does


def _files(environ: Mapping[str, str]) -> Iterator[Path]:
    """Where uv looks, beside the project."""
    home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    yield Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "uv/uv.toml"
    for folder in (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":"):
        yield Path(folder) / "uv/uv.toml"
    yield Path("/etc/uv/uv.toml")
