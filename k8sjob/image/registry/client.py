"""A client of one registry under one login: authorization, redirects, refusals as errors.

A registry names what it wants in a challenge. One token may cover several repositories: that of the
base, to read, and that of the image, to write.
"""

from __future__ import annotations

import json
import re
import threading
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode, urljoin, urlsplit

from k8sjob.connections import basic
from k8sjob.errors import ImageError, redacted
from k8sjob.image.registry.http_client import TransportError, host_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from k8sjob.image.registry.credentials import Login
    from k8sjob.image.registry.http_client import HttpClient, Response, RetryPolicy, Zone
    from k8sjob.image.registry.manifest import ImageReference

_SCHEME: Final = r"(?i)(?:^|,)\s*(Basic|Bearer)\b"
_PARAMETER: Final = r'(?<!\w)(\w++)\s*+=\s*+(?:"((?:[^"\\]|\\.)*+)"|([^\s,"]++))'
_CLIENT_ID: Final = "k8sjob"
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS: Final = 5
_OVERLOADED: Final = "; the registry has failed or is overloaded: try again later"
_NEXT_STEPS: Final = {
    401: "; run: docker login {host}",
    403: "; ask for permission, or log in as another user: docker login {host}",
    404: "; check the name, and whether it exists",
    405: "; it does not accept uploads: it may be a mirror, or read-only",
    413: "; the registry rejects uploads of that size: raise its limit",
    429: "; too many requests: try again later",
}


class RegistryClient:
    """One registry, as one user sees it; threads may share it."""

    def __init__(
        self, http: HttpClient, registry: str, endpoint: str, find_login: Callable[[], Login | None]
    ) -> None:
        self.registry = registry
        self._http = http
        self._endpoint = endpoint
        self._authorizer = Authorizer(http, registry, find_login)
        self._base = ""

    @property
    def retry(self) -> RetryPolicy:
        """How often a caller should repeat what `send` does once."""
        return self._http.retry

    @property
    def is_plain(self) -> bool:
        """Whether the registry is used without TLS."""
        return urlsplit(self.url("")).scheme == "http"

    def add_scope(self, reference: ImageReference, actions: str) -> None:
        """Declare what will be done ("pull" or "pull,push"), so that one token is enough for it."""
        # A mount needs one token for two repositories: the base's to pull, the job's to push.
        self._authorizer.scopes.add(f"repository:{reference.repository}:{actions}")

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
    ) -> Response:
        """Make a request, with retries.

        The path is below the registry, or a URL that it has given; statuses that are not `ok` are
        errors; messages say what it is for (`doing`); stream: leave the answer's body to be read.

        Raises:
            ImageError: the registry refuses, or cannot be reached.
        """
        try:
            url = self.url(path)
            answer = self._authorized(method, url, headers, body=body, stream=stream)
            for _ in range(_MAX_REDIRECTS):
                location = answer.headers.get("Location")
                # Blobs are often in another storage (S3). Only what can be repeated is followed: an
                # upload could be led to another host.
                if method not in {"GET", "HEAD"} or answer.status not in _REDIRECTS or not location:
                    break
                target = self.url(location, answer)
                answer = self._authorized(method, target, headers, stream=stream)
            else:
                raise ImageError(
                    f"{self.registry} redirects in a loop; is it the address of a registry?"
                )
        except TransportError as error:
            raise ImageError(
                f"{doing}: {error}; check that it is reachable, and try again"
            ) from None
        if answer.status not in ok:
            raise self.refusal(answer, doing)
        return answer

    def send(
        self, method: str, url: str, *, headers: Mapping[str, str], body: Iterable[bytes]
    ) -> Response:
        """Send a stream of blocks once; the caller judges the answer.

        A token that has expired is renewed before the answer is returned.

        Raises:
            TransportError: the connection broke.
        """
        used, shown = self._shown(url, headers)
        answer = self._http.send(method, url, headers=shown, body=body)
        # A token is valid for some minutes, and a large upload takes longer. With a new one the
        # caller starts the upload again.
        if answer.status == 401 and self.owns(url) and not self._authorizer.renew(answer, used):
            raise self.refusal(answer, "uploading")
        return answer

    def url(self, location: str, answer: Response | None = None) -> str:
        """A path or URL that the registry gave in an answer (None: its root), complete."""
        # Not in the constructor: for a loopback registry the scheme is asked for by a request.
        if not self._base:
            self._base = self._http.base_url(self._endpoint)
        try:
            url = urljoin(answer.url if answer else f"{self._base}/", location)
        except ValueError:
            raise ImageError(
                f"{self.registry} redirects to {location!r}, which is not a URL; the registry, or a"
                " proxy in front of it, is broken"
            ) from None
        if self.owns(url):  # a registry behind a proxy often takes its own scheme for http
            return self._base + urlsplit(url)._replace(scheme="", netloc="").geturl()
        return url

    def refusal(self, answer: Response, doing: str) -> ImageError:
        """An answer of the registry as an error."""
        reason = f": {text}" if (text := _error_text(answer.body)) else ""
        step = _NEXT_STEPS.get(answer.status, _OVERLOADED if answer.status >= 500 else "")
        return ImageError(
            f"{doing}: {self.registry} returned {answer.status}{reason}"
            + step.format(host=self.registry)
        )

    def owns(self, url: str) -> bool:
        """Whether a URL is of the registry's host and port; others get no login."""
        return _same_host(url, self._base)

    def _authorized(
        self, method: str, url: str, headers: Mapping[str, str] | None, **options: Any
    ) -> Response:
        # The first answer brings the challenge, the second one is to a request with its token.
        for _ in range(2):
            used, shown = self._shown(url, headers)
            # A registry on the Internet must not lead to an address of this machine or its network.
            limit = None if self.owns(url) else self._http.zone(self._base)
            answer = self._http.request(method, url, headers=shown, limit=limit, **options)
            is_refused = answer.status == 401 and self.owns(url)
            if not is_refused or not self._authorizer.renew(answer, used):
                break
        return answer

    def _shown(
        self, url: str, headers: Mapping[str, str] | None
    ) -> tuple[str | None, dict[str, str]]:
        """The login's header, and all headers; no other host sees the login."""
        used = self._authorizer.header
        login = {"Authorization": used} if used and self.owns(url) else {}
        return used, {**(headers or {}), **login}


def _same_host(*urls: str) -> bool:
    # https://host and https://host:443 are one.
    hosts = {
        host_of(address).removesuffix(":443" if address.lower().startswith("https:") else ":80")
        for address in urls
    }
    return len(hosts) == 1


def _error_text(body: bytes) -> str:
    """The errors in OCI's form; empty for any other."""
    try:
        errors = json.loads(body)["errors"]
        texts = [
            " ".join(" ".join(str(error.get(key) or "") for key in ("code", "message")).split())
            for error in errors[:3]
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""
    return redacted(", ".join(texts)[:300])


class Authorizer:
    """The Authorization header for one registry; threads may share it.

    Attributes:
        scopes: what will be done there, as `repository:NAME:pull,push`.
        header: None before the registry has asked for one.
    """

    def __init__(self, http: HttpClient, host: str, find_login: Callable[[], Login | None]) -> None:
        self.scopes: set[str] = set()
        self.header: str | None = None
        self._http = http
        self._host = host
        self._find_login = find_login
        self._lock = threading.Lock()

    def renew(self, answer: Response, used: str | None) -> bool:
        """Get what a challenge wants where a header was not enough; whether there is a new one.

        Raises:
            ImageError: the registry wants credentials and there are none, or they are refused.
        """
        with self._lock:
            if self.header != used:
                return True  # another thread was faster
            before = self.header
            self.header = self._authorization(answer)
            return self.header != before

    @cached_property
    def login(self) -> Login | None:
        """The user's credentials for this registry; looked for when they are first needed."""
        return self._find_login()

    def _authorization(self, answer: Response) -> str:
        challenge = answer.headers.get("WWW-Authenticate", "")
        challenges = parse_challenges(challenge)
        login = self.login
        # Where both are offered: only a Bearer token is for certain repositories and actions.
        if "bearer" in challenges:
            return f"Bearer {self._token(challenges['bearer'], answer.url)}"
        if "basic" not in challenges:
            raise ImageError(
                f"{self._host} asks for a kind of authorization that registries do not use:"
                f" {challenge.partition(' ')[0]!r}; is it the address of a registry?"
            )
        header = _basic(login)
        if header is None:
            raise ImageError(f"{self._host} requires a login; run: docker login {self._host}")
        return header

    def _token(self, parameters: dict[str, str], asked: str) -> str:
        """A token for what the registry wants in its answer at the URL `asked`."""
        realm = parameters.get("realm", "")
        if not host_of(realm):
            raise ImageError(f"{self._host}: its tokens come from {realm!r}, which is not a URL")
        # The realm gets the login, so it may be of another host, but never less protected.
        if urlsplit(realm).scheme != "https" and urlsplit(asked).scheme == "https":
            raise ImageError(
                f"{self._host}: its tokens come from {redacted(realm)!r}, without TLS, which the"
                " registry itself has; ask its administrator to correct the address"
            )
        limit = None if _same_host(realm, asked) else self._http.zone(asked)
        scopes = set(parameters.get("scope", "").split())
        service = parameters.get("service", "")
        answer = self._request_token(realm, service, self.scopes | scopes, limit)
        if answer.status in {400, 401, 403} and scopes and scopes != self.scopes:
            # Some refuse all of it where one part is not allowed.
            answer = self._request_token(realm, service, scopes, limit)
        if answer.status != 200:
            who = "the login is refused" if self.login else "a login is required"
            raise ImageError(
                f"{self._host}: no token from {host_of(realm)} (status {answer.status}):"
                f" {who}; run: docker login {self._host}"
            )
        try:
            content = json.loads(answer.body)
            # Docker calls it token, OAuth2 access_token; a registry may give both.
            token = content.get("token") or content["access_token"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            token = None
        if not isinstance(token, str) or not (token.isascii() and token.isprintable()):
            raise ImageError(f"{self._host}: {host_of(realm)} returned no token")
        return token

    def _request_token(
        self, realm: str, service: str, scopes: set[str], limit: Zone | None
    ) -> Response:
        login = self.login
        # A refresh token, as `docker login` keeps it for some clouds: by OAuth2 it is exchanged
        # with a POST.
        if login is not None and login.identity_token:
            form = {
                "grant_type": "refresh_token",
                "client_id": _CLIENT_ID,
                "service": service,
                "scope": " ".join(sorted(scopes)),
                "refresh_token": login.identity_token,
            }
            kind = {"Content-Type": "application/x-www-form-urlencoded"}
            data = urlencode(form).encode()
            return self._http.request("POST", realm, headers=kind, body=data, limit=limit)
        query = [("service", service)] if service else []
        # Sorted, so that the same scopes always make the same URL.
        query += [("scope", scope) for scope in sorted(scopes)]
        header = _basic(login)
        if header is not None and login is not None:
            query.append(("account", login.username))
        separator = "&" if "?" in realm else "?"
        headers = {} if header is None else {"Authorization": header}
        url = f"{realm}{separator}{urlencode(query)}"
        return self._http.request("GET", url, headers=headers, limit=limit)


def _basic(login: Login | None) -> str | None:
    if login is None or not login.username:
        return None
    return basic(f"{login.username}:{login.password}")


def parse_challenges(text: str) -> dict[str, dict[str, str]]:
    """The schemes in a WWW-Authenticate header, in lower case, with their parameters."""
    # One header may hold several challenges, with commas between them and between their parameters.
    marks = [*re.finditer(_SCHEME, text)]
    bounds = [mark.start() for mark in marks] + [len(text)]
    schemes: dict[str, dict[str, str]] = {}
    for mark, end in zip(marks, bounds[1:], strict=True):
        parameters = re.findall(_PARAMETER, text[mark.end() : end])
        schemes[mark[1].lower()] = {
            name.lower(): quoted or bare for name, quoted, bare in parameters
        }
    return schemes
