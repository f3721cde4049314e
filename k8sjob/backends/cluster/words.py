"""What an apiserver refuses, in plain words with the next step: a transport around another one.

The server's words are for those who wrote it: a webhook's refusal is a 403 as a missing right is,
and a missing operator a 404. Here each is told apart by what the server really says.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from k8sjob.backends.paths import JOBS, Target
from k8sjob.backends.transport import ApiError
from k8sjob.errors import redacted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from threading import Event

    from k8sjob.backends.api import Json
    from k8sjob.backends.transport import Transport

__all__ = ["InWords", "in_words", "is_absent"]

_NO_SUCH_PATH: Final = re.compile(r"could not find the requested resource|404 page not found")
_NO_NAMESPACE: Final = re.compile(r'namespaces? "(?P<name>[^"]+)" not found')
_TAKEN: Final = re.compile(r'"(?P<name>[^"]+)" already exists')
_NO_RIGHT: Final = re.compile(r'(?:User "(?P<user>[^"]+)" )?cannot (?P<verb>\w+) resource')
_DENIED: Final = re.compile(
    r'admission webhook "(?P<webhook>[^"]+)" denied the request: (?P<why>.*)', re.DOTALL
)
_QUOTA: Final = re.compile(r"exceeded quota: (?P<why>.*)|failed quota: (?P<must>.*)", re.DOTALL)
_NO_WEBHOOK: Final = re.compile(
    r'failed calling webhook "(?P<webhook>[^"]+)": (?P<why>.*)', re.DOTALL
)
_STRICT: Final = re.compile(r"strict decoding error: (?P<why>.*)", re.DOTALL)
_OPERATORS: Final = "training-operator.kubeflow.org"
"""How the names of the training operator's webhooks end."""
_VERBS: Final = {
    "GET": "get",
    "POST": "create",
    "PUT": "update",
    "PATCH": "patch",
    "DELETE": "delete",
}


class InWords:
    """A transport whose errors say in plain words what is wrong; see Transport.

    Args:
        transport: carries the requests.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.context, self.namespace = transport.context, transport.namespace
        self.server = transport.server

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
        metadata_only: bool = False,
        timeout: float = 30.0,
    ) -> Json:
        """One request; see Transport.request."""
        with self._told(method, path):
            return self._transport.request(
                method,
                path,
                query=query,
                body=body,
                content_type=content_type,
                metadata_only=metadata_only,
                timeout=timeout,
            )

    def stream(
        self,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        idle: float = 300.0,
        stop: Event | None = None,
    ) -> Iterator[bytes]:
        """The lines of an answer as they come; see Transport.stream."""
        with self._told("GET", path):
            yield from self._transport.stream(path, query=query, idle=idle, stop=stop)

    @contextmanager
    def _told(self, method: str, path: str) -> Iterator[None]:
        try:
            yield
        except ApiError as error:
            raise in_words(error, method, Target.of(path), self.context) from error


def in_words(error: ApiError, method: str, target: Target, context: str) -> ApiError:
    """The same error, with a message that says what to do next.

    Args:
        error: what a transport raised; of no answer and of credentials it tells best itself.
        method: of the request.
        target: what the request was about.
        context: the kubeconfig's context.
    """
    told = _BY_CODE.get(error.code, _otherwise)
    message = redacted(told(error, method, target, context))
    said = redacted(error.said)  # proxies repeat the headers that they refuse
    return ApiError(message, code=error.code, reason=error.reason, said=said, causes=error.causes)


def is_absent(error: ApiError) -> bool:
    """Whether an object is not there; also the cluster may not know any of its kind."""
    return error.code == 404 and not _NO_SUCH_PATH.search(error.said)


def _as_it_is(error: ApiError, _method: str, _target: Target, _context: str) -> str:
    return str(error)


def _otherwise(error: ApiError, method: str, target: Target, _context: str) -> str:
    return f"{_attempt(method, target)}: the server answers {error.code}: {error.said}"


def _bad(error: ApiError, method: str, target: Target, context: str) -> str:
    found = _STRICT.search(error.said)
    if not found:
        return _otherwise(error, method, target, context)
    fields = _list(re.split(r", (?=unknown field|duplicate field)", found["why"]))
    return (
        f"the cluster does not take the {_what(target)} as it is written; what `overlay` adds is"
        f" not checked before: {fields}"
    )


def _forbidden(error: ApiError, method: str, target: Target, context: str) -> str:
    said = error.said
    if denied := _DENIED.search(said):
        own = denied["webhook"].endswith(_OPERATORS)
        who = "the training operator" if own else f"the webhook {denied['webhook']}"
        return f"{who} refuses the {_what(target)}: {_fields(denied['why'])}"
    if quota := _QUOTA.search(said):
        why = f"is used up: {quota['why']}" if quota["why"] else f"asks for more: {quota['must']}"
        return f"the quota of namespace {target.namespace} {why}; free some of it, or ask for more"
    if "being terminated" in said:
        return f"namespace {target.namespace} is being deleted; wait until it is gone"
    if missing := _NO_RIGHT.search(said):
        return _without_right(missing, target, context)
    return f"{_attempt(method, target)}: forbidden: {said}"


def _without_right(missing: re.Match[str], target: Target, context: str) -> str:
    if missing["user"] == "system:anonymous":
        return (
            f"the apiserver does not know who speaks: context {context} has no credentials; log"
            " in, or name another with --context"
        )
    who = missing["user"] or f"the user of context {context}"
    what = f"{missing['verb']} {target.resource}/{target.subresource}".strip("/")
    if target.resource == JOBS and not target.namespace:
        return (
            f"{who} may not {what} in all namespaces; name one with -n: the roles of manifests/rbac"
            " are each for one namespace"
        )
    where = f"in namespace {target.namespace}" if target.namespace else "in all namespaces"
    return (
        f"{who} may not {what} {where}; {_doctor(target)}, and manifests/rbac has the role to ask"
        " for"
    )


def _missing(error: ApiError, method: str, target: Target, context: str) -> str:
    if is_absent(error):
        gone = _NO_NAMESPACE.search(error.said)
        if gone:
            return (
                f"there is no namespace {gone['name']!r} (context {context}); create it with"
                f" `kubectl create namespace {gone['name']}`, or name another with -n"
            )
        return f"{_attempt(method, target)}: {error.said}"
    if target.resource == JOBS:
        return (
            f"the cluster of context {context} knows no PyTorchJobs: the training operator is not"
            " installed there; ask for it (v1.9), or name another cluster with --context"
        )
    return f"the cluster of context {context} knows no {target.resource}"


def _conflict(error: ApiError, method: str, target: Target, context: str) -> str:
    if taken := _TAKEN.search(error.said):
        return (
            f"there is a {_what(target)} {taken['name']!r} in namespace {target.namespace} already"
        )
    if quota := _QUOTA.search(error.said):
        return f"the quota of namespace {target.namespace} is being changed: {quota[0]}; try again"
    return _otherwise(error, method, target, context) + "; somebody changed it meanwhile, try again"


def _gone(_error: ApiError, method: str, target: Target, _context: str) -> str:
    return f"{_attempt(method, target)}: what was asked for is too old by now; ask again"


def _invalid(error: ApiError, method: str, target: Target, context: str) -> str:
    if not error.causes:
        return _otherwise(error, method, target, context)
    # "<nil>" says that more may be wrong.
    causes = [cause for cause in error.causes if cause[0] != "<nil>"] or error.causes
    fields = _list([": ".join(part for part in cause if part) for cause in causes])
    return f"the cluster refuses the {_what(target)}: {fields}"


def _busy(_error: ApiError, method: str, target: Target, context: str) -> str:
    return f"{_attempt(method, target)}: the apiserver of context {context} is busy; try again"


def _internal(error: ApiError, method: str, target: Target, context: str) -> str:
    down = _NO_WEBHOOK.search(error.said)
    if not down:
        return _otherwise(error, method, target, context)
    own = down["webhook"].endswith(_OPERATORS)
    who = "the training operator" if own else f"the webhook {down['webhook']}"
    why = " ".join(down["why"].rpartition(": ")[2].split())
    return (
        f"{who} does not answer ({why}), so no {_what(target)} can be made or changed; see that it"
        f" runs, {_doctor(target)}"
    )


def _not_ready(error: ApiError, method: str, target: Target, context: str) -> str:
    attempt = _attempt(method, target)
    return f"{attempt}: the apiserver of context {context} is not ready: {error.said}; try again"


_BY_CODE: Final[dict[int, Callable[[ApiError, str, Target, str], str]]] = {
    0: _as_it_is,
    401: _as_it_is,
    400: _bad,
    403: _forbidden,
    404: _missing,
    409: _conflict,
    410: _gone,
    422: _invalid,
    429: _busy,
    500: _internal,
    503: _not_ready,
    504: _not_ready,
}


def _doctor(target: Target) -> str:
    place = f" -n {target.namespace}" if target.namespace else ""
    return f"`k8sjob doctor{place}` says what is missing"


def _attempt(method: str, target: Target) -> str:
    return f"cannot {_VERBS.get(method, method)} {target}"


def _what(target: Target) -> str:
    return "job" if target.resource == JOBS else target.resource.removesuffix("s") or "object"


def _fields(why: str) -> str:
    """A webhook's errors: one, or several in brackets."""
    if why.startswith("[") and why.rstrip().endswith("]"):
        return _list(re.split(r", (?=spec|metadata)", why.strip()[1:-1]))
    return why


def _list(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else "".join(f"\n  {part}" for part in parts)
