"""Explanations of an apiserver's errors: what was refused, why, and the next step.

Codes alone are ambiguous: a webhook's refusal is a 403 as a missing right is, and a missing
operator a 404 as a missing job is. So the rules look at the server's message, too.
"""

from __future__ import annotations

import re
import shlex
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from k8sjob.errors import redacted
from k8sjob.kube.api_resources import ResourcePath
from k8sjob.kube.client.transport import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from k8sjob.kube.api_resources import Controller
    from k8sjob.kube.client.transport import Transport
    from k8sjob.kube.objects import Json

_NO_SUCH_PATH: Final = "could not find the requested resource|404 page not found"
_ANSWERS: Final = "{attempt}: the server returned {code}: {detail}"
_ROLE: Final = "manifests/rbac has the role to ask for"
_ONE_NAMESPACE: Final = (
    "specify one with -n: the roles of manifests/rbac are each for one namespace"
)
_NO_CONTROLLER: Final = (
    "{0.kind}s: {0.name} is not installed there; {0.missing}, or specify another cluster with"
    " --context"
)


@cache
def _rules() -> list[dict[str, Any]]:
    """The rules of errors.toml; they are read when the first error comes."""
    import tomllib  # noqa: PLC0415 - most answers are no errors

    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    rules: list[dict[str, Any]] = tomllib.loads(text)["rule"]
    return rules


class ExplainedErrors:
    """A transport whose errors explain what is wrong and what to do; see Transport.

    It knows the controllers of the kinds of job by ResourcePath.plural.
    """

    def __init__(self, transport: Transport, controllers: Mapping[str, Controller]) -> None:
        self._transport, self._controllers = transport, controllers
        self.context, self.namespace = transport.context, transport.namespace
        self.server = transport.server

    @property
    def skew(self) -> float:
        """See Transport.skew."""
        return self._transport.skew

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
            raise self.explained(error, method, path) from error

    def explained(self, error: ApiError, method: str, path: str) -> ApiError:
        """An error of the transport inside, which this request got, with an explanation."""
        about = ResourcePath.of(path)
        return explained(error, method, about, self.context, self._controllers)


def explained(
    error: ApiError,
    method: str,
    target: ResourcePath,
    context: str,
    controllers: Mapping[str, Controller],
) -> ApiError:
    """The same error, with a message that says what to do next.

    Where there was no answer, or the credentials were refused, its own message stays.
    """
    text = _ANSWERS
    match: re.Match[str] | None = None
    # The first rule that fits counts: the file has the specific ones before the general ones.
    for rule in _rules():
        pattern = rule.get("pattern", "")
        if rule["code"] == error.code and (match := re.search(pattern, error.detail, re.DOTALL)):
            text = rule["text"]
            break
    words = match.groupdict("") if match else {}
    controller, namespace = controllers.get(target.plural), target.namespace
    # Messages speak of jobs, whichever of the kinds the user has.
    noun = "job" if controller else target.resource.removesuffix("s") or "object"
    # Validation by Kubernetes, or by the schema of a CRD, names causes; a webhook puts its errors
    # into one sentence (403).
    if error.causes and error.code == 422:
        # "<nil>" means that more may be wrong.
        causes = [cause for cause in error.causes if cause[0] != "<nil>"] or error.causes
        text = "the cluster refuses the {what}: {fields}"
        words["fields"] = _list([": ".join(filter(None, cause)) for cause in causes])
    elif controller and (field := re.search(f'field "({controller.newest})"', error.detail)):
        lacks = f"{controller.kind}s there have no {field[1]}: {controller.name} is too old"
        text, words["fields"] = "the {fields}", f"{lacks}; {controller.missing}"
    elif "fields" in words:
        words["fields"] = _fields(words["fields"], strict=error.code == 400)
    if "why" in words:
        words["why"] = " ".join(words["why"].split())
    webhook = words.get("webhook", "")
    kinds = controllers.values()
    # A webhook's name is all that the server says of who has refused.
    owners = (kind.name for kind in kinds if kind.webhooks and webhook.endswith(kind.webhooks))
    # A refused TrainingRuntime is a matter of the TrainJob that it belongs to.
    beside = (kind for kind in kinds if kind.companions == target.resource)
    kind = controller or next(beside, None)
    options = f" -n {shlex.quote(namespace)}" if namespace else ""
    options += f" --target {kind.target}" if kind and kind.target else ""
    doctor = f"`k8sjob doctor{options}` shows what is missing"
    message = text.format_map(
        {
            "attempt": f"cannot {'create' if method == 'POST' else method.lower()} {target}",
            "code": error.code,
            "context": context,
            "detail": error.detail,
            "doctor": doctor,
            "kind": f"{target.resource}/{target.subresource}".strip("/"),
            "message": str(error),
            "namespace": namespace,
            "owner": next(owners, f"the webhook {webhook}"),
            "quoted": shlex.quote(words.get("name", "")),
            "role": _ONE_NAMESPACE if controller and not namespace else f"{doctor}, and {_ROLE}",
            "unknown": _NO_CONTROLLER.format(controller) if controller else target.resource,
            "what": noun,
            "where": f"in namespace {namespace}" if namespace else "in all namespaces",
            "who": words.get("user") or f"the user of context {context}",
            **words,
        }
    )
    return ApiError(
        redacted(message),
        code=error.code,
        reason=error.reason,
        detail=redacted(error.detail),  # proxies repeat the headers that they refuse
        causes=error.causes,
    )


def is_absent(error: ApiError) -> bool:
    """Whether an object does not exist; false where the cluster does not know its kind."""
    # The apiserver answers 404 to both: for an unknown kind in words of its own, or in Go's as
    # plain text.
    return error.code == 404 and not re.search(_NO_SUCH_PATH, error.detail)


def _fields(why: str, *, strict: bool) -> str:
    """A webhook's errors, several in brackets, or those of a strict decoder."""
    # A sentence of a webhook may have ", unknown field" in it, too, so only a strict decoder's is
    # split there.
    if strict:
        return _list(re.split(r", (?=unknown field|duplicate field)", why))
    # apimachinery prints several errors in brackets, separated by ", " as words of one error are.
    # Each begins with the path of a field.
    if why.startswith("[") and why.rstrip().endswith("]"):
        return _list(re.split(r", (?=spec|metadata)", why.strip()[1:-1]))
    return why


def _list(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else "".join(f"\n  {part}" for part in parts)
