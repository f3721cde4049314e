"""Authorisation at one registry: nothing, a name and password, or a token that is renewed.

A registry says what it wants in a challenge. One token may cover several repositories: that of the
base, to read, and that of the image, to write.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode, urlsplit

from k8sjob.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8sjob.image.credentials import Login
    from k8sjob.image.wire import Answer, Wire

__all__ = ["Access"]

_SCHEME: Final = re.compile(r"(?:^|,)\s*(Basic|Bearer)\b", re.IGNORECASE)
_PARAMETER: Final = re.compile(r'(\w+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))')
_CLIENT: Final = "k8sjob"


@dataclass(slots=True)
class Access:
    """What requests to one registry show; may be shared by threads.

    Attributes:
        wire: to ask for tokens.
        host: the registry, for messages.
        find_login: gives the credentials; called once, when the registry wants any.
        scopes: what is to be done there, as `repository:NAME:pull,push`.
        header: value of Authorization; None before the registry has asked for one.
    """

    wire: Wire
    host: str
    find_login: Callable[[], Login | None]
    scopes: set[str] = field(default_factory=set)
    header: str | None = None
    _login: Login | None = None
    _asked: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def renew(self, answer: Answer, used: str | None) -> bool:
        """Get what the registry wants.

        Args:
            answer: with status 401 and a challenge.
            used: the header that was not enough.

        Returns:
            Whether there is something new to show.

        Raises:
            ImageError: the registry wants credentials and there are none, or they are refused.
        """
        with self._lock:
            if self.header != used:
                return True  # another thread was faster
            before = self.header
            self.header = self._authorization(answer.headers.get("WWW-Authenticate", ""))
            return self.header != before

    @property
    def login(self) -> Login | None:
        """The user's credentials for this registry."""
        if not self._asked:
            self._login, self._asked = self.find_login(), True
        return self._login

    def _authorization(self, challenge: str) -> str:
        wanted = _challenges(challenge)
        login = self.login
        if login is not None and login.access_token:
            return f"Bearer {login.access_token}"
        if "bearer" in wanted:
            return f"Bearer {self._token(wanted['bearer'])}"
        if "basic" not in wanted:
            raise ImageError(
                f"{self.host} asks for an authorisation of a kind that registries do not use:"
                f" {challenge.partition(' ')[0]!r}; is it the address of a registry?"
            )
        basic = _basic(login)
        if basic is None:
            raise ImageError(f"{self.host} wants a login; run: docker login {self.host}")
        return basic

    def _token(self, parameters: dict[str, str]) -> str:
        realm = parameters.get("realm", "")
        if not _is_url(realm):
            raise ImageError(f"{self.host}: its tokens come from {realm!r}, which is no URL")
        asked = set(parameters.get("scope", "").split())
        service = parameters.get("service", "")
        answer = self._ask_token(realm, service, self.scopes | asked)
        if answer.status in {400, 401, 403} and asked and asked != self.scopes:
            # Some refuse all of it where one part is not allowed.
            answer = self._ask_token(realm, service, asked)
        if answer.status != 200:
            who = "the login is refused" if self.login else "a login is wanted"
            raise ImageError(
                f"{self.host}: no token from {urlsplit(realm).netloc} (status {answer.status}):"
                f" {who}; run: docker login {self.host}"
            )
        try:
            content = json.loads(answer.body)
            token = content.get("token") or content["access_token"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            token = None
        if not isinstance(token, str) or not (token.isascii() and token.isprintable()):
            raise ImageError(f"{self.host}: {urlsplit(realm).netloc} answers without a token")
        return token

    def _ask_token(self, realm: str, service: str, scopes: set[str]) -> Answer:
        login = self.login
        if login is not None and login.identity_token:
            form = {
                "grant_type": "refresh_token",
                "client_id": _CLIENT,
                "service": service,
                "scope": " ".join(sorted(scopes)),
                "refresh_token": login.identity_token,
            }
            kind = {"Content-Type": "application/x-www-form-urlencoded"}
            return self.wire.ask("POST", realm, headers=kind, body=urlencode(form).encode())
        query = [("service", service)] if service else []
        query += [("scope", scope) for scope in sorted(scopes)]
        basic = _basic(login)
        if basic is not None and login is not None:
            query.append(("account", login.username))
        separator = "&" if "?" in realm else "?"
        headers = {} if basic is None else {"Authorization": basic}
        return self.wire.ask("GET", f"{realm}{separator}{urlencode(query)}", headers=headers)


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    return parts.scheme in {"http", "https"} and bool(parts.hostname)


def _basic(login: Login | None) -> str | None:
    if login is None or not login.username:
        return None
    return "Basic " + base64.b64encode(f"{login.username}:{login.password}".encode()).decode()


def _challenges(text: str) -> dict[str, dict[str, str]]:
    """The schemes that a registry offers, in lower case, with their parameters."""
    marks = [*_SCHEME.finditer(text)]
    bounds = [mark.start() for mark in marks] + [len(text)]
    found: dict[str, dict[str, str]] = {}
    for mark, end in zip(marks, bounds[1:], strict=True):
        parameters = _PARAMETER.findall(text[mark.end() : end])
        found[mark[1].lower()] = {name.lower(): quoted or bare for name, quoted, bare in parameters}
    return found
