"""Explanations of an apiserver's errors: what was refused, why, and the next step.

Codes alone do not tell: a webhook's refusal is a 403 as a missing right is, and a missing operator
a 404 as a missing job is. So the server's message is looked at.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from k8sjob.errors import redacted
from k8sjob.kube.client.transport import ApiError
from k8sjob.kube.resources import ResourcePath

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from k8sjob.kube.client.transport import Transport
    from k8sjob.kube.objects import Json
    from k8sjob.kube.resources import Controller

__all__ = ["ExplainedErrors", "explained", "is_absent"]

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
_VERBS: Final = {
    "GET": "get",
    "POST": "create",
    "PUT": "update",
    "PATCH": "patch",
    "DELETE": "delete",
}


class ExplainedErrors:
    """A transport whose errors say what is wrong and what to do; see Transport.

    Args:
        transport: carries the requests.
        controllers: of the kinds of job, by their resource.
    """

    def __init__(self, transport: Transport, controllers: Mapping[str, Controller]) -> None:
        self._transport, self._controllers = transport, controllers
        self.context, self.namespace = transport.context, transport.namespace
        self.server = transport.server

    def request(self, method: str, path: str, **options: Any) -> Json:
        """One request; see Transport.request."""
        with self._explaining(method, path):
            return self._transport.request(method, path, **options)

    def stream(self, path: str, **options: Any) -> Iterator[bytes]:
        """The lines of an answer as they come; see Transport.stream."""
        with self._explaining("GET", path):
            yield from self._transport.stream(path, **options)

    @contextmanager
    def _explaining(self, method: str, path: str) -> Iterator[None]:
        try:
            yield
        except ApiError as error:
            about = ResourcePath.of(path)
            raise explained(error, method, about, self.context, self._controllers) from error


def explained(
    error: ApiError,
    method: str,
    target: ResourcePath,
    context: str,
    controllers: Mapping[str, Controller],
) -> ApiError:
    """The same error, with a message that says what to do next.

    Args:
        error: what a transport raised; where there was no answer, or the credentials were refused,
            its own message stays.
        method: of the request.
        target: what the request was about.
        context: the kubeconfig's context.
        controllers: of the kinds of job, by their resource.
    """
    failure = _Failure(error, method, target, context, controllers)
    message = _BY_CODE.get(error.code, _otherwise)(failure)
    said = redacted(error.said)  # proxies repeat the headers that they refuse
    return ApiError(
        redacted(message), code=error.code, reason=error.reason, said=said, causes=error.causes
    )


def is_absent(error: ApiError) -> bool:
    """Whether an object does not exist; false where the cluster does not know its kind."""
    return error.code == 404 and not _NO_SUCH_PATH.search(error.said)


@dataclass(frozen=True, slots=True)
class _Failure:
    """A request that failed."""

    error: ApiError
    method: str
    target: ResourcePath
    context: str
    controllers: Mapping[str, Controller]

    @property
    def said(self) -> str:
        return self.error.said

    @property
    def attempt(self) -> str:
        return f"cannot {_VERBS.get(self.method, self.method)} {self.target}"

    @property
    def what(self) -> str:
        return "job" if self.controller else self.target.resource.removesuffix("s") or "object"

    @property
    def controller(self) -> Controller | None:
        """Of the job that the request was about; None where it was about something else."""
        return self.controllers.get(self.target.resource)

    def webhook(self, name: str) -> str:
        """Whose webhook it is."""
        known = (one for one in self.controllers.values() if one.webhooks)
        owners = (one.name for one in known if name.endswith(one.webhooks))
        return next(owners, f"the webhook {name}")

    @property
    def doctor(self) -> str:
        place = f" -n {self.target.namespace}" if self.target.namespace else ""
        return f"`k8sjob doctor{place}` says what is missing"


def _as_it_is(failure: _Failure) -> str:
    return str(failure.error)


def _otherwise(failure: _Failure) -> str:
    return f"{failure.attempt}: the server answers {failure.error.code}: {failure.said}"


def _bad(failure: _Failure) -> str:
    found = _STRICT.search(failure.said)
    if not found:
        return _otherwise(failure)
    fields = _list(re.split(r", (?=unknown field|duplicate field)", found["why"]))
    return (
        f"the cluster does not accept the {failure.what} as it is written (k8sjob does not check"
        f" what `overlay` adds): {fields}"
    )


def _forbidden(failure: _Failure) -> str:
    said, namespace = failure.said, failure.target.namespace
    if denied := _DENIED.search(said):
        who = failure.webhook(denied["webhook"])
        return f"{who} refuses the {failure.what}: {_fields(denied['why'])}"
    if quota := _QUOTA.search(said):
        why = f"is used up: {quota['why']}" if quota["why"] else f"asks for more: {quota['must']}"
        return f"the quota of namespace {namespace} {why}; free some of it, or ask for more"
    if "being terminated" in said:
        return f"namespace {namespace} is being deleted; wait until it is gone"
    if missing := _NO_RIGHT.search(said):
        return _without_right(missing, failure)
    return f"{failure.attempt}: forbidden: {said}"


def _without_right(missing: re.Match[str], failure: _Failure) -> str:
    target = failure.target
    if missing["user"] == "system:anonymous":
        return (
            f"the apiserver does not know the user: context {failure.context} has no credentials;"
            " log in, or name another with --context"
        )
    who = missing["user"] or f"the user of context {failure.context}"
    what = f"{missing['verb']} {target.resource}/{target.subresource}".strip("/")
    if failure.controller and not target.namespace:
        return (
            f"{who} may not {what} in all namespaces; name one with -n: the roles of manifests/rbac"
            " are each for one namespace"
        )
    where = f"in namespace {target.namespace}" if target.namespace else "in all namespaces"
    return (
        f"{who} may not {what} {where}; {failure.doctor}, and manifests/rbac has the role to ask"
        " for"
    )


def _missing(failure: _Failure) -> str:
    context = failure.context
    if is_absent(failure.error):
        if gone := _NO_NAMESPACE.search(failure.said):
            return (
                f"there is no namespace {gone['name']!r} (context {context}); create it with"
                f" `kubectl create namespace {gone['name']}`, or name another with -n"
            )
        return f"{failure.attempt}: {failure.said}"
    if controller := failure.controller:
        return (
            f"the cluster of context {context} knows no {controller.kind}s: {controller.name} is"
            f" not installed there; {controller.missing}, or name another cluster with --context"
        )
    return f"the cluster of context {context} knows no {failure.target.resource}"


def _conflict(failure: _Failure) -> str:
    namespace = failure.target.namespace
    if taken := _TAKEN.search(failure.said):
        return f"there is already a {failure.what} {taken['name']!r} in namespace {namespace}"
    if quota := _QUOTA.search(failure.said):
        return f"the quota of namespace {namespace} is being changed: {quota[0]}; try again"
    return f"{_otherwise(failure)}; it was changed in the meantime, try again"


def _gone(failure: _Failure) -> str:
    return f"{failure.attempt}: the requested version is too old by now; try again"


def _invalid(failure: _Failure) -> str:
    causes = failure.error.causes
    if not causes:
        return _otherwise(failure)
    # "<nil>" means that more may be wrong.
    causes = [cause for cause in causes if cause[0] != "<nil>"] or causes
    fields = _list([": ".join(part for part in cause if part) for cause in causes])
    return f"the cluster refuses the {failure.what}: {fields}"


def _busy(failure: _Failure) -> str:
    return f"{failure.attempt}: the apiserver of context {failure.context} is busy; try again"


def _internal(failure: _Failure) -> str:
    down = _NO_WEBHOOK.search(failure.said)
    if not down:
        return _otherwise(failure)
    why = " ".join(down["why"].rpartition(": ")[2].split())
    return (
        f"{failure.webhook(down['webhook'])} does not answer ({why}), so no {failure.what} can be"
        f" created or changed; check that it runs, {failure.doctor}"
    )


def _not_ready(failure: _Failure) -> str:
    server = f"the apiserver of context {failure.context}"
    return f"{failure.attempt}: {server} is not ready: {failure.said}; try again"


_BY_CODE: Final[dict[int, Callable[[_Failure], str]]] = {
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


def _fields(why: str) -> str:
    """A webhook's errors: one, or several in brackets."""
    if why.startswith("[") and why.rstrip().endswith("]"):
        return _list(re.split(r", (?=spec|metadata)", why.strip()[1:-1]))
    return why


def _list(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else "".join(f"\n  {part}" for part in parts)
