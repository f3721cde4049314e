"""What this machine knows of package indexes, given to a build as secrets: no layer has them."""

from __future__ import annotations

import configparser
import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k8sjob.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["pip_settings", "write_secrets"]

_KEYS: Final = (
    "index-url",
    "extra-index-url",
    "no-index",
    "find-links",
    "trusted-host",
    "proxy",
    "timeout",
    "default-timeout",
    "retries",
    "pre",
    "prefer-binary",
    "only-binary",
    "no-binary",
)
"""Settings of pip's that mean the same elsewhere; its folders and checks are this machine's own."""
_CERTIFICATES: Final = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
"""Variables that name a bundle, the one for pip first."""


def write_secrets(folder: Path, environ: Mapping[str, str] | None = None) -> dict[str, Path]:
    """Find the machine's certificates and pip's settings.

    Args:
        folder: where to write a pip.conf, for this user's eyes only.
        environ: variables instead of the process's own.

    Returns:
        The secrets that there are, by their names in the Dockerfile: `ca` and `pip`.

    Raises:
        ImageError: a pip.conf, or a bundle that is named, cannot be read.
    """
    environ = os.environ if environ is None else environ
    settings = pip_settings(environ)
    # A folder of this machine is not there where pip runs.
    links = [link for link in settings.pop("find-links", "").split() if _is_remote(link)]
    if links:
        settings["find-links"] = "\n".join(links)
    secrets = {}
    if bundle := _bundle(environ, settings.pop("cert", None)):
        secrets["ca"] = bundle
    if settings:
        secrets["pip"] = folder / "pip.conf"
        lines = (f"{key} = {_continued(value)}\n" for key, value in settings.items())
        with open(os.open(secrets["pip"], os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:  # noqa: PTH123 - a descriptor
            file.write("[global]\n" + "".join(lines))
    return secrets


def _is_remote(link: str) -> bool:
    return "://" in link and not link.startswith("file:")


def _continued(value: str) -> str:
    """A value of several lines, as such a file has it."""
    return "\n    ".join(line.strip() for line in value.splitlines() if line.strip())


def pip_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """What pip is told: by its files, for all commands and for install, then by variables.

    Args:
        environ: variables of the process.

    Returns:
        Settings that say something about indexes, and `cert`; lists as words.

    Raises:
        ImageError: a pip.conf cannot be read.
    """
    found: dict[str, str] = {}
    for path in _files(environ):
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, UnicodeDecodeError, configparser.Error) as error:
            reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            raise ImageError(
                f"{path}: cannot be read as pip's settings: {reason}; repair it, or name another"
                " file by PIP_CONFIG_FILE"
            ) from None
        for section in ("global", "install"):
            if parser.has_section(section):
                found |= {key.replace("_", "-"): value for key, value in parser.items(section)}
    for key in (*_KEYS, "cert"):
        if value := environ.get(f"PIP_{key.upper().replace('-', '_')}"):
            found[key] = value
    return {key: found[key] for key in (*_KEYS, "cert") if found.get(key)}


def _files(environ: Mapping[str, str]) -> Iterator[Path]:
    """Where pip looks on Unix, the last word last."""
    named = environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return
    for folder in (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":"):
        yield Path(folder) / "pip/pip.conf"
    yield Path("/etc/pip.conf")
    home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    yield home / ".pip/pip.conf"
    yield home / "Library/Application Support/pip/pip.conf"
    yield Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip/pip.conf"
    if environ.get("VIRTUAL_ENV"):
        yield Path(environ["VIRTUAL_ENV"]) / "pip.conf"
    if named:
        yield Path(named)


def _bundle(environ: Mapping[str, str], configured: str | None) -> Path | None:
    """The certificates by which an index is known: those for pip, else the machine's."""
    named = next((environ[name] for name in _CERTIFICATES if environ.get(name)), configured)
    if named is None:
        path = Path(ssl.get_default_verify_paths().cafile or "")
        return path.resolve() if path.is_file() else None
    if not Path(named).is_file():
        raise ImageError(
            f"{named}: no such file; {', '.join(_CERTIFICATES)} or pip's own settings name it as"
            " the bundle of certificates that are trusted"
        )
    return Path(named).resolve()
