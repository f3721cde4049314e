"""This machine's settings of pip, passed on to builders.

Builds in containers get them as secrets: no layer has them. uv gets them in its own form where it
has no settings itself; or whoever has set up pip for a private index would get packages of the same
names from the public one.
"""

from __future__ import annotations

import configparser
import json
import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from k8sjob import environment
from k8sjob.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_KEYS: Final = (
    *("index-url", "extra-index-url", "no-index", "find-links", "trusted-host", "proxy"),
    *("timeout", "default-timeout", "retries"),
    *("pre", "prefer-binary", "only-binary", "no-binary"),
)
"""Settings that mean the same elsewhere; pip's folders and checks are this machine's own."""
_BUNDLES: Final = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
"""Variables that name a bundle of certificates, the one for pip first."""
_UV_VARIABLES: Final = (
    *("UV_CONFIG_FILE", "UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL"),
    *("UV_FIND_LINKS", "UV_INDEX", "UV_INDEX_URL"),
)
_TRUE: Final = frozenset({"1", "y", "yes", "true", "on", "t"})


def write_secrets(folder: Path, environ: Mapping[str, str] | None = None) -> dict[str, Path]:
    """The machine's certificates and pip's settings, by their names in the Dockerfile: ca, pip.

    A pip.conf that only this user can read is written to the folder.

    Raises:
        ImageError: a pip.conf, or a bundle that is named, cannot be read.
    """
    environ = environment.variables() if environ is None else environ
    settings = _pip_settings(environ)
    # A folder of this machine is not there where pip runs.
    links = settings.pop("find-links", "").split()
    if remote := [link for link in links if "://" in link and not link.startswith("file:")]:
        settings["find-links"] = "\n".join(remote)
    secrets = {}
    if bundle := _bundle(environ, settings.pop("cert", None)):
        secrets["ca"] = bundle
    if settings:
        separator = "\n    "  # as lists are written there; other values are one word
        secrets["pip"] = folder / "pip.conf"
        lines = [f"{key} = {separator.join(value.split())}\n" for key, value in settings.items()]
        # The address of an index may hold a password.
        with open(os.open(secrets["pip"], os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:  # noqa: PTH123 - a descriptor
            file.write("[global]\n" + "".join(lines))
    return secrets


def _bundle(environ: Mapping[str, str], configured: str | None) -> Path | None:
    """The certificates by which an index is known: those for pip, else the machine's."""
    named = next((environ[name] for name in _BUNDLES if environ.get(name)), configured)
    if named is None:
        # Companies that inspect TLS put their CA into the machine's bundle, and a base image knows
        # nothing of it.
        path = Path(ssl.get_default_verify_paths().cafile or "")
        return path.resolve() if path.is_file() else None
    if not Path(named).is_file():
        raise ImageError(
            f"{named}: no such file; {', '.join(_BUNDLES)} or pip's own settings name it as"
            " the bundle of certificates that are trusted"
        )
    return Path(named).resolve()


def as_uv_settings() -> tuple[str, dict[str, str]]:
    """Pip's settings in uv's form.

    Returns:
        A uv.toml, which may hold passwords, and variables; both empty where uv has settings.

    Raises:
        ImageError: a pip.conf cannot be read.
    """
    environ = environment.variables()
    _, config, system = _folders(environ)
    files = [folder / "uv/uv.toml" for folder in (config, *system, Path("/etc"))]
    # Who has set up uv for an index means it.
    if any(environ.get(name) for name in _UV_VARIABLES) or any(path.exists() for path in files):
        return "", {}
    settings = _pip_settings(environ)
    bundle = settings.get("cert")
    variables = {"SSL_CERT_FILE": bundle} if bundle and not environ.get("SSL_CERT_FILE") else {}
    return "".join(_uv_lines(settings)), variables


def _uv_lines(settings: Mapping[str, str]) -> Iterator[str]:
    table: dict[str, Any] = {"index-url": settings.get("index-url")}
    table |= {key: settings.get(key, "").split() for key in ("extra-index-url", "find-links")}
    for key, name, value in (("no-index", "no-index", True), ("pre", "prerelease", "allow")):
        table[name] = settings.get(key, "").lower() in _TRUE and value
    if hosts := settings.get("trusted-host", "").split():
        yield f"allow-insecure-host = {json.dumps(hosts)}\n"
    yield "[pip]\n"
    for key, value in table.items():
        if value:
            yield f"{key} = {json.dumps(value)}\n"  # TOML writes these as JSON does


def _folders(environ: Mapping[str, str]) -> tuple[Path, Path, list[Path]]:
    """The user's home and configuration, and the system's."""
    home = Path(environ.get("HOME") or environment.home())
    config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    system = (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")
    return home, config, [Path(folder) for folder in system]


def _pip_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Settings about indexes, and `cert`, lists as words: of files, then of variables, as pip."""
    settings: dict[str, str] = {}
    for path in _pip_files(environ):
        # Raw, as pip reads it: a % in a password is no interpolation.
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, UnicodeDecodeError, configparser.Error) as error:
            reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            raise ImageError(
                f"{path}: cannot be read as pip's settings: {reason}; repair it, or set"
                " PIP_CONFIG_FILE to another file"
            ) from None
        for section in ("global", "install"):
            if parser.has_section(section):
                settings |= {key.replace("_", "-"): value for key, value in parser.items(section)}
    # pip's variables take precedence over its files.
    for key in (*_KEYS, "cert"):
        if value := environ.get(f"PIP_{key.upper().replace('-', '_')}"):
            settings[key] = value
    return {key: settings[key] for key in (*_KEYS, "cert") if settings.get(key)}


def _pip_files(environ: Mapping[str, str]) -> Iterator[Path]:
    """The files that pip reads on Unix; later ones override earlier ones."""
    named = environ.get("PIP_CONFIG_FILE")
    # pip itself takes this value for "no files at all".
    if named == os.devnull:
        return
    home, config, system = _folders(environ)
    for folder in system:
        yield folder / "pip/pip.conf"
    yield Path("/etc/pip.conf")
    yield home / ".pip/pip.conf"
    yield home / "Library/Application Support/pip/pip.conf"
    yield config / "pip/pip.conf"
    if environ.get("VIRTUAL_ENV"):
        yield Path(environ["VIRTUAL_ENV"]) / "pip.conf"
    if named:
        yield Path(named)
