"""Requests to an apiserver for the facts of all checks, several at a time."""

from __future__ import annotations

import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from k8sjob.checks.doctor.check import Answer, ClusterFacts
from k8sjob.checks.doctor.permissions import all_permissions
from k8sjob.kube.api_resources import path as resource_path
from k8sjob.kube.capacity import add, requested_by_node
from k8sjob.kube.client.transport import ApiError
from k8sjob.kube.gangs import queue_name
from k8sjob.kube.kueue import cluster_queue
from k8sjob.kube.objects import MANAGED_BY, QUEUE, Object
from k8sjob.rendering.merge import merge
from k8sjob.targets.jobs import DEFAULT, PREFERRED, job_path, keyed, namesake, references

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from concurrent.futures import Executor, Future

    from k8sjob.checks.doctor.check import Permission
    from k8sjob.kube.capacity import Amounts
    from k8sjob.kube.client.transport import Transport
    from k8sjob.kube.objects import Json
    from k8sjob.targets.api import Job, Target

_AT_ONCE: Final = 8
_NEEDS_TIMEOUT: Final = 3.0
"""Seconds that a submission waits for an answer that only warns."""
_PAGE: Final = 500
"""Pods an answer; thousands at once would take hundreds of megabytes."""
_QUESTIONS: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "nodes": ("/api/v1/nodes", {}),
    "storage classes": ("/apis/storage.k8s.io/v1/storageclasses", {}),
    "namespace": ("/api/v1/namespaces/{namespace}", {}),
    # Of jobs with a preflight, which are ours.
    "pods": (
        "/api/v1/namespaces/{namespace}/pods",
        {"labelSelector": f"{MANAGED_BY}=k8sjob", "limit": str(_PAGE)},
    ),
    "quotas": ("/api/v1/namespaces/{namespace}/resourcequotas", {}),
    "limit ranges": ("/api/v1/namespaces/{namespace}/limitranges", {}),
}
_DRY_RUN: Final = {"dryRun": "All", "fieldValidation": "Strict"}


def gather(
    transport: Transport, namespace: str, job: Job | None = None, *, target: Target = DEFAULT
) -> ClusterFacts:
    """Everything about a cluster that a submission depends on; nothing in it is changed.

    The rendered job is the one to be submitted; without one, `target` is the kind that is meant.
    """
    target = job.target if job else target
    start = time.monotonic()
    version = _ask(transport, "GET", "/version")
    facts = ClusterFacts(
        context=transport.context,
        server=transport.server,
        namespace=namespace,
        seconds=time.monotonic() - start,
        answers={"version": version},
        target=target,
        job=job,
    )
    place = quote(namespace, safe="")
    if isinstance(version, ApiError):
        return facts
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        # The longest first.
        usage = pool.submit(_usage, transport)
        questions = {
            name: pool.submit(_ask, transport, "GET", where.format(namespace=place), query=query)
            for name, (where, query) in {**_QUESTIONS, **dict(_about_controller(target))}.items()
        }
        questions |= _ask_needs(pool, transport, namespace, job)
        good, bad = minimal_job(target), minimal_job(target, refused=True)
        for name, asked_for in (("dry run", job or good), ("bad dry run", bad)):
            questions[name] = pool.submit(_dry_run, transport, asked_for, namespace)
        rights = all_permissions(target)
        reviews = [pool.submit(review, transport, right, namespace) for right in rights]
        user = pool.submit(_user, transport)
        allowed = zip(rights, [asked.result() for asked in reviews], strict=True)
        return replace(
            facts,
            user=user.result(),
            answers={"version": version}
            | {name: asked.result() for name, asked in questions.items()},
            allowed={right: may for right, may in allowed if may is not None},
            usage=usage.result(),
        )


def _dry_run(transport: Transport, job: Job, namespace: str) -> Answer:
    """The apiserver's answer to a job, or to its companion if it refuses that."""
    where = job_path(job.target, namespace)
    if (companion := keyed(job.target)) and job.companion:
        body = _in_namespace(job.companion, namespace)
        answer = _ask(transport, "POST", companion.path(namespace), query=_DRY_RUN, body=body)
        if isinstance(answer, ApiError) and answer.code != 409:
            return answer
    return _ask(transport, "POST", where, query=_DRY_RUN, body=_in_namespace(job.raw, namespace))


def _about_controller(target: Target) -> Iterator[tuple[str, tuple[str, Mapping[str, str]]]]:
    """The questions about who works on the jobs, where that is no part of every cluster."""
    yield "jobs api", (f"/apis/{target.api_version}", {})
    if target is DEFAULT:
        yield "other api", (f"/apis/{PREFERRED[1].api_version.partition('/')[0]}", {})
    if child := namesake(target):
        yield "made api", (f"/apis/{child.api_version}", {})
    if target.pods.init_container:
        query = {"labelSelector": target.pods.job_label, "limit": "100"}
        yield "workers", ("/api/v1/namespaces/{namespace}/pods", query)
    if labels := target.controller.deployment:
        query = {"labelSelector": labels}
        yield "operator", (resource_path("deployments"), query)
        path = resource_path("deployments", target.controller.namespace)
        yield "operator's own namespace", (path, query)


def gather_needs(
    transport: Transport,
    namespace: str,
    job: Job,
    own_namespace: Callable[[float], Answer] | None = None,
) -> ClusterFacts:
    """Gather the facts for a submission: the objects that the job names, and its schedulers.

    All at once, a few seconds at most; what may not be read, or does not respond, is left out.
    `own_namespace` returns the namespace within some seconds, where it may be known already.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        asked = _ask_needs(pool, transport, namespace, job, timeout=_NEEDS_TIMEOUT)
        where = resource_path("namespaces", name=namespace)
        ask = own_namespace or (lambda timeout: _ask(transport, "GET", where, timeout=timeout))
        asked["namespace"] = pool.submit(ask, _NEEDS_TIMEOUT)
        answers = {name: question.result() for name, question in asked.items()}
    kind = job.target
    return ClusterFacts(
        context=transport.context, namespace=namespace, answers=answers, target=kind, job=job
    )


def _ask_needs(
    pool: Executor, transport: Transport, namespace: str, job: Job | None, timeout: float = 30.0
) -> dict[str, Future[Answer]]:
    """The questions about what a job names: objects, its queue, its gang scheduler."""
    named = references(job) if job else []
    questions, ask = {}, partial(_ask, transport, timeout=timeout)
    for reference in named:
        path = reference.path(namespace)
        # Of a secret or a config map not what is in it.
        bare = reference.kind not in {"claim", "queue"}
        questions[str(reference)] = pool.submit(ask, "GET", path, metadata_only=bare)
    if job is None or not (QUEUE in job.labels or job.gang is not None):
        return questions
    questions["apis"] = pool.submit(ask, "GET", "/apis")
    if job.gang is not None:
        where = resource_path("queues", name=queue_name(job.gang))
        questions["gang queue"] = pool.submit(ask, "GET", where)
        labels = {"labelSelector": "app=volcano-scheduler"}
        questions["volcano"] = pool.submit(ask, "GET", resource_path("deployments"), query=labels)
    path = job_path(job.target, namespace)
    if queue := next((reference for reference in named if reference.kind == "queue"), None):
        # After the LocalQueue, which is asked for before it, so that it never waits in vain.
        local = questions[str(queue)]
        questions["cluster queue"] = pool.submit(_cluster_queue, transport, local, timeout)
        body = _in_namespace(_started(job), namespace)
        questions["queue dry run"] = pool.submit(
            ask, "POST", path, query={"dryRun": "All"}, body=body
        )
    return questions


def _cluster_queue(transport: Transport, local: Future[Answer], timeout: float) -> Answer:
    answer = local.result()
    if isinstance(answer, ApiError) or not (name := cluster_queue(answer)):
        return ApiError("its LocalQueue is unknown")
    path = resource_path("clusterqueues", name=name)
    return _ask(transport, "GET", path, timeout=timeout)


def _started(job: Job) -> Json:
    """The same job under a name of its own and not suspended: Kueue suspends what it manages."""
    meta = {**job.metadata, "name": f"k8sjob-doctor-{secrets.token_hex(4)}"}
    target = job.target
    started: Json = merge(job.raw, target.suspension(value=False))
    return {**started, "metadata": meta, "spec": {**Object(started).spec, **target.kueue_patch}}


def minimal_job(target: Target, *, refused: bool = False) -> Job:
    """The smallest job of a kind that a cluster accepts, or that its own webhook refuses."""
    container = {"name": "pytorch", "image": "k8sjob.invalid/doctor", "command": ["true"]}
    name = f"k8sjob-doctor-{secrets.token_hex(4)}"
    make = target.refused if refused else target.minimal
    return make(name, {"containers": [container]})


def _in_namespace(item: Json, namespace: str) -> Json:
    return {**item, "metadata": {**Object(item).metadata, "namespace": namespace}}


def _ask(
    transport: Transport, method: str, path: str, *, timeout: float = 30.0, **request: Any
) -> Answer:
    try:
        return transport.request(method, path, timeout=timeout, **request)
    except ApiError as error:
        return error


def review(transport: Transport, permission: Permission, namespace: str) -> bool | None:
    """Whether the user may do it; None if the apiserver does not say."""
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    answer = _ask(transport, "POST", path, body=permission.review(namespace))
    return None if isinstance(answer, ApiError) else bool(Object(answer).status.get("allowed"))


def _user(transport: Transport) -> str:
    path = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    answer = _ask(transport, "POST", path, body=body)
    if isinstance(answer, ApiError):
        return ""
    return str(Object(answer).part("status", "userInfo").get("username", ""))


def _usage(transport: Transport) -> dict[str, Amounts] | None:
    """The amounts used by the Pods of all namespaces; None if they may not be read."""
    usage: dict[str, Amounts] = {}
    # Pods that wait for a node take nothing from any.
    query = {"limit": str(_PAGE), "fieldSelector": "spec.nodeName!="}
    while True:
        answer = _ask(transport, "GET", "/api/v1/pods", query=query)
        if isinstance(answer, ApiError):
            return None
        for node, amounts in requested_by_node(answer.get("items") or ()).items():
            add(usage.setdefault(node, {}), amounts)
        resume = Object(answer).metadata.get("continue")
        if not resume:
            return usage
        query = {**query, "continue": resume}
