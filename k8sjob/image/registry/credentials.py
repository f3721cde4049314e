"""Credentials for registries, as `docker login` and `podman login` store them.

Read are docker's config.json (in $DOCKER_CONFIG or ~/.docker) with its credential helpers, then
podman's auth.json ($REGISTRY_AUTH_FILE, the user's runtime folder, ~/.config/containers), whose
entries may be for a part of a registry. Never ~/.netrc. No secret is ever in a message or a repr.
"""

from __future__ import annotations

import base64
import binascii
import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from k8sjob.environment import home, variables
from k8sjob.errors import ImageError, redacted
from k8sjob.image.registry.manifest import DEFAULT_LOGIN, DEFAULT_REGISTRY, plain_host, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from k8sjob.image.registry.manifest import ImageReference

_HELPER_LIMIT: Final = 60.0
"""Seconds that a helper may take: it may ask the user, or a cloud."""
_TOKEN_USER: Final = "<token>"  # noqa: S105 - the name by which a helper says that it gives a token
_NOT_FOUND: Final = "credentials not found"


@dataclass(frozen=True, slots=True)
class Login:
    """A login for a registry: name and password, or a token to exchange for access tokens.

    No secret of it is in a repr.
    """

    username: str = ""
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class CredentialEntry:
    """One place with credentials for a repository; not asked before they are needed.

    Attributes:
        file: the file that names it.
        key: under what it stands there.
        helper: name of the program to ask first, without `docker-credential-`; None: there is none.
    """

    file: Path
    key: str
    helper: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def login(self) -> Login | None:
        """The credentials, or None if there are none after all.

        Raises:
            ImageError: the helper fails, or the entry cannot be read.
        """
        # With a helper the file itself has mostly an empty entry.
        login = self._helper_login(self.helper) if self.helper else None
        return login or self._stored_login()

    def _stored_login(self) -> Login | None:
        text = {key: value for key, value in self.fields.items() if isinstance(value, str)}
        username, password = text.get("username", ""), text.get("password", "")
        if auth := text.get("auth", ""):
            try:
                decoded = base64.b64decode(auth, validate=True).decode()
            except (binascii.Error, UnicodeDecodeError):
                decoded = ""
            username, colon, password = decoded.partition(":")
            if not colon:
                raise ImageError(
                    f"{self.file}: auths[{self.key!r}].auth is not base64 of USER:PASSWORD; log in"
                    f" again: docker login {shlex.quote(self.key)}"
                )
        # docker removes NULs there, too.
        login = Login(username, password.rstrip("\0"), text.get("identitytoken", ""))
        return None if login == Login() else login

    def _helper_login(self, helper: str) -> Login | None:
        import shutil  # noqa: PLC0415 - most have none
        import subprocess  # noqa: PLC0415

        program = f"docker-credential-{helper}"
        path = shutil.which(program)
        if path is None:
            raise ImageError(
                f"{self.file} names the credential helper {program} for {self.key}, which is not on"
                " PATH; install it, or remove its name from the file"
            )
        try:
            done = subprocess.run(
                [path, "get"],
                # The protocol of credential helpers: the server's name on stdin, JSON on stdout.
                input=self.key,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_HELPER_LIMIT,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = getattr(error, "strerror", None) or f"no response in {_HELPER_LIMIT:.0f} s"
            raise ImageError(f"{program} get {self.key}: {reason}; try it by hand") from None
        if done.returncode != 0:
            # Helpers write their error on stdout.
            detail = f"{done.stdout} {done.stderr}".strip()
            # The exit code is 1 for this, too; docker itself compares the text.
            if _NOT_FOUND in detail:
                return None
            raise ImageError(
                f"{program} get {self.key}: exit code {done.returncode}: {_first_line(detail)}; try"
                " it by hand, or log in again"
            )
        try:
            answer = json.loads(done.stdout)
            username, secret = str(answer["Username"]), str(answer["Secret"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ImageError(
                f"{program} get {self.key}: its output is not JSON with Username and Secret; try it"
                " by hand"
            ) from None
        if username == _TOKEN_USER:
            return Login(identity_token=secret)
        return Login(username, secret)


class Keyring:
    """All credentials of the user."""

    def __init__(self, files: Mapping[Path, Mapping[str, Any]]) -> None:
        self._files = files

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> Keyring:
        """Read the existing files; environ: variables instead of the process's own.

        Raises:
            ImageError: one of them cannot be read.
        """
        paths = _paths(variables() if environ is None else environ)
        files = ((path, _read(path)) for path in dict.fromkeys(paths))
        return cls({path: content for path, content in files if content is not None})

    def entries(self, reference: ImageReference) -> tuple[CredentialEntry, ...]:
        """The places with credentials for a repository, best first; equal ones are one login."""
        return tuple(self._entries(reference.registry, reference.repository))

    def _entries(self, registry: str, repository: str) -> Iterator[CredentialEntry]:
        # Docker's own registry has a key from the time of its first API.
        server = DEFAULT_LOGIN if registry == DEFAULT_REGISTRY else registry
        # An entry may be for a part of a registry: the longest, so the closest, comes first.
        parts = [registry, *repository.split("/")]
        places = ["/".join(parts[:end]) for end in range(len(parts), 0, -1)]
        for file, content in self._files.items():
            auths = {
                _registry_of(key): (key, value) for key, value in table(content, "auths").items()
            }
            helpers = {
                _registry_of(key): value for key, value in table(content, "credHelpers").items()
            }
            for place in places:
                key, fields = auths.get(place, (server, {}))
                store = content.get("credsStore") if place == registry else None
                helper = helpers.get(place) or store
                if helper or fields:
                    entry = fields if isinstance(fields, dict) else {}
                    yield CredentialEntry(file, key, str(helper) if helper else None, entry)


def _registry_of(key: str) -> str:
    """The registry, or a part of one, that a key of the file speaks of."""
    scheme, separator, address = key.partition("://")
    path = address if separator else scheme
    host, _, below = path.partition("/")
    # docker's keys may be URLs with the path of an API; podman's may be a namespace of the
    # registry.
    below = "" if separator or below.strip("/") in {"", "v1", "v2"} else below.strip("/")
    return plain_host(host) + (f"/{below}" if below else "")


def _paths(environ: Mapping[str, str]) -> Iterator[Path]:
    folder = Path(environ.get("HOME") or home())
    yield Path(environ.get("DOCKER_CONFIG") or folder / ".docker") / "config.json"
    if named := environ.get("REGISTRY_AUTH_FILE"):
        yield Path(named)
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        yield Path(runtime) / "containers/auth.json"
    yield Path(environ.get("XDG_CONFIG_HOME") or folder / ".config") / "containers/auth.json"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes() or b"{}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ImageError(
            f"{path}: {error.strerror}; it may hold the credentials of a registry: make it"
            " readable, or set DOCKER_CONFIG to another folder"
        ) from None
    except json.JSONDecodeError as error:
        raise ImageError(
            f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}; repair it, or set"
            " DOCKER_CONFIG to another folder"
        ) from None
    except (UnicodeDecodeError, RecursionError):
        raise ImageError(f"{path}: not JSON in UTF-8; repair it, or move it away") from None
    if not isinstance(content, dict):
        raise ImageError(f"{path}: not a JSON object; repair it, or move it away")
    return content


def _first_line(text: str) -> str:
    """A program's error message, but nothing that looks like its answer."""
    line = next((line for line in text.splitlines() if line.strip()), "it gave no message")
    return "(its output is not shown)" if "{" in line else redacted(line[:200])
