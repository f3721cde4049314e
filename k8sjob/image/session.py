"""Requests to one registry under one login, and its refusals in words."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final
from urllib.parse import urljoin, urlsplit

from k8sjob.errors import ImageError, redacted
from k8sjob.image.access import Access
from k8sjob.image.pools import host_of
from k8sjob.image.wire import Broken

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from k8sjob.image.credentials import Login
    from k8sjob.image.reference import Reference
    from k8sjob.image.wire import Answer, Patience, Wire

__all__ = ["Session"]

_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_MOST_REDIRECTS: Final = 5
_UNSURE: Final = "; the registry is out of order or overloaded: try again later"
_NEXT_STEPS: Final = {
    401: "; run: docker login {host}",
    403: "; ask for the right to do so, or log in as another: docker login {host}",
    404: "; check the name, and whether it is there",
    405: "; it takes no uploads: it may be a mirror, or set to read alone",
    413: "; the registry takes nothing of that size: raise its limit",
    429: "; it has had too many requests: try again later",
}


class Session:
    """One registry, as one user sees it. May be shared by threads."""

    def __init__(
        self, wire: Wire, registry: str, endpoint: str, find_login: Callable[[], Login | None]
    ) -> None:
        self.registry = registry
        self._wire = wire
        self._endpoint = endpoint
        self._access = Access(wire, registry, find_login)
        self._base = ""

    @property
    def patience(self) -> Patience:
        """How often a caller should try what `send` does once."""
        return self._wire.patience

    @property
    def is_plain(self) -> bool:
        """Whether the registry is spoken to without TLS."""
        return urlsplit(self.url("")).scheme == "http"

    def will(self, reference: Reference, actions: str) -> None:
        """Say beforehand what is to be done, so that one token is enough for all of it.

        Args:
            reference: names the repository.
            actions: "pull" or "pull,push".
        """
        self._access.scopes.add(f"repository:{reference.repository}:{actions}")

    def request(
        self,
        method: str,
        path: str,
        *,
        ok: Collection[int],
        doing: str,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        stream: bool = False,
    ) -> Answer:
        """Make a request, as often as it takes.

        Args:
            method: of HTTP.
            path: below the registry, or a URL that it has given.
            ok: the statuses that are answers.
            doing: what it is for, as messages say it.
            headers: of the request.
            body: whole.
            stream: leave the answer's body to be read.

        Raises:
            ImageError: the registry refuses, or cannot be reached.
        """
        try:
            url = self.url(path)
            answer = self._authorised(method, url, headers, body, stream=stream)
            if method in {"GET", "HEAD"}:
                answer = self._followed(method, answer, headers, stream=stream)
        except Broken as broken:
            raise ImageError(f"{doing}: {broken}; is the registry there? try again") from None
        if answer.status not in ok:
            raise self.refusal(answer, doing)
        return answer

    def send(
        self, method: str, url: str, *, headers: Mapping[str, str], body: Iterable[bytes]
    ) -> Answer:
        """Make a request with a stream of blocks once; what it says is the caller's to judge.

        A token that is not good any more is renewed before the answer is given.

        Raises:
            Broken: the connection did.
        """
        used, own = self._access.header, self._is_own(url)
        shown = {**headers, "Authorization": used} if used and own else headers
        answer = self._wire.send(method, url, headers=shown, body=body)
        if answer.status == 401 and own and not self._access.renew(answer, used):
            raise self.refusal(answer, "uploading")
        return answer

    def url(self, location: str, answer: Answer | None = None) -> str:
        """A location that the registry gave, complete.

        Args:
            location: path or URL.
            answer: in which it stood; None: the registry's root.
        """
        if not self._base:
            self._base = self._wire.base(self._endpoint)
        try:
            url = urljoin(answer.url if answer else f"{self._base}/", location)
        except ValueError:
            raise ImageError(
                f"{self.registry} leads to {location!r}, which is no URL; it is out of order, or a"
                " proxy before it is"
            ) from None
        if self._is_own(url):  # a registry behind a proxy often takes its own scheme for http
            return self._base + urlsplit(url)._replace(scheme="", netloc="").geturl()
        return url

    def refusal(self, answer: Answer, doing: str) -> ImageError:
        """What the registry said, as an error."""
        said = f": {words}" if (words := _words(answer.body)) else ""
        step = _NEXT_STEPS.get(answer.status, _UNSURE if answer.status >= 500 else "")
        return ImageError(
            f"{doing}: {self.registry} answers {answer.status}{said}"
            + step.format(host=self.registry)
        )

    def _is_own(self, url: str) -> bool:
        return host_of(url) == host_of(self._base)

    def _authorised(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None,
        body: bytes | None,
        *,
        stream: bool,
    ) -> Answer:
        own = self._is_own(url)
        for _ in range(2):
            used = self._access.header
            shown = {**(headers or {}), **({"Authorization": used} if used and own else {})}
            answer = self._wire.ask(method, url, headers=shown, body=body, stream=stream)
            if answer.status != 401 or not own or not self._access.renew(answer, used):
                break
        return answer

    def _followed(
        self, method: str, answer: Answer, headers: Mapping[str, str] | None, *, stream: bool
    ) -> Answer:
        """Where the registry sends one for the content; that host is not shown the login."""
        for _ in range(_MOST_REDIRECTS):
            location = answer.headers.get("Location")
            if answer.status not in _REDIRECTS or not location:
                return answer
            target = self.url(location, answer)
            answer = self._authorised(method, target, headers, None, stream=stream)
        raise ImageError(f"{self.registry} redirects in a circle; is it the address of a registry?")


def _words(body: bytes) -> str:
    """What an error of the registry says: the OCI form, else nothing."""
    try:
        errors = json.loads(body)["errors"]
        said = [
            " ".join(str(error.get(key) or "") for key in ("code", "message")).strip()
            for error in errors[:3]
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""
    return redacted(", ".join(said)[:300])
