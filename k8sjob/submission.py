"""A job.yaml becomes a job in a cluster: planned, its code in the registry, sent.

The way is sending's; here is what goes on it.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from k8sjob import document
from k8sjob.backends.api import LOCAL, JobRef, Plan
from k8sjob.backends.connect import connect
from k8sjob.contract import RUNTIME_HOME
from k8sjob.errors import BackendError, Problem, SpecError
from k8sjob.rendering import check_script, render
from k8sjob.sending import send
from k8sjob.spec import JobSpec, load
from k8sjob.spec.rules import longest_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8sjob.backends.cluster import ClusterBackend
    from k8sjob.image.build import Built
    from k8sjob.image.push import Pushed
    from k8sjob.origin import Origin

__all__ = ["plan", "plan_submission", "push_code", "remarks", "submit"]

_SUFFIX: Final = "bcdfghjklmnpqrstvwxz2456789"
"""What Kubernetes makes generated names of: letters and digits that form no words."""
_RANDOM: Final = 5
"""So many of them stand behind a dash."""


def plan(
    spec: JobSpec,
    folder: str | Path = ".",
    *,
    image: str | None = None,
    origin: Origin | None = None,
) -> Plan:
    """All that is about to happen, before anything does.

    Args:
        spec: the job.
        folder: what relative paths of the spec (context, volumes[].local) start from.
        image: what the replicas run, with its digest; None: as the spec names it.
        origin: what that image was made of, where that is known.

    Raises:
        SpecError: the overlay does not fit the manifest.
    """
    reference = spec.image_reference if image is None else image
    manifest = render(spec, reference, origin=origin)
    return Plan(spec, manifest, reference, Path(folder).absolute())


def submit(
    spec: JobSpec | str | Path,
    *,
    image: str | None = None,
    namespace: str | None = None,
    context: str | None = None,
    replace: bool = False,
    generate_name: bool = False,
    build: bool = False,
    dry_run: Literal["server"] | None = None,
    backend: ClusterBackend | None = None,
) -> JobRef:
    """Make a job in a cluster, or attach to the same one that is there and has not ended.

        >>> ref = submit("job.yaml", image="registry/x@sha256:...")  # doctest: +SKIP

    Args:
        spec: a JobSpec, or the path of a job.yaml or of the folder that it lies in.
        image: what the replicas run, best with its digest; None: as the spec names it, and where
            it has a base, the job's code is put on that in the registry.
        namespace: where to; None: the spec's, else the context's.
        context: of the kubeconfig; None: the current one.
        replace: delete a job of that name that is there and make it anew.
        generate_name: add five random characters to the name.
        build: make the image with what the job installs first, where it is not there yet.
        dry_run: "server": ask the cluster whether it would take the job, and make none.
        backend: the cluster, where it is connected already; then `namespace` and `context` are its.

    Returns:
        The job.

    Raises:
        SpecError: the spec is not valid.
        ImageError: the image cannot be made of the code alone, or a registry refuses.
        JobExists: another job, or the same one that has ended, has the name; see `replace` and
            `generate_name`.
        BackendError: the cluster refuses the job, or cannot be reached.
    """
    folder: Path | str = "."
    if not isinstance(spec, JobSpec):
        path = Path(spec)
        folder, spec = (path if path.is_dir() else path.parent), load(path)
    if backend is not None:
        namespace = backend.namespace
    made = plan_submission(
        spec, folder, image=image, namespace=namespace, generate_name=generate_name
    )
    cluster = backend or connect(context=context, namespace=made.spec.namespace or namespace)
    dry = dry_run == "server"
    if spec.builds_image and image is None:
        made, _ = push_code(spec, made, cluster, dry_run=dry, build=_build if build else None)
    return send(made, cluster, replace=replace, dry_run=dry).ref


def plan_submission(
    spec: JobSpec,
    folder: str | Path = ".",
    *,
    image: str | None = None,
    namespace: str | None = None,
    generate_name: bool = False,
) -> Plan:
    """What would be submitted; see submit. An image that is to be made has no digest yet.

    Raises:
        SpecError: two namespaces are asked for, or the name leaves no room for more characters.
    """
    problems = []
    if namespace and spec.namespace and namespace != spec.namespace:
        message = f"the job is of {spec.namespace!r}, and {namespace!r} is asked for; name one only"
        problems.append(Problem("namespace", message))
    if LOCAL in (namespace, spec.namespace):
        message = f"{LOCAL!r} stands for this machine, where `k8sjob run` runs jobs; name another"
        problems.append(Problem("namespace", message))
    room = longest_name(spec) - _RANDOM - 1
    if generate_name and len(spec.name) > room:
        message = (
            f"{spec.name!r} has {len(spec.name)} characters, and a generated name adds"
            f" {_RANDOM + 1}; shorten it to at most {room}"
        )
        problems.append(Problem("name", message))
    if problems:
        raise SpecError(problems)
    if generate_name:
        suffix = "".join(secrets.choice(_SUFFIX) for _ in range(_RANDOM))
        spec = spec.with_(name=f"{spec.name}-{suffix}")
    return plan(spec, folder, image=image)


def _build(spec: JobSpec, folder: Path) -> Built:
    from k8sjob.image import build  # noqa: PLC0415 - see push_code

    return build.build(spec, folder)


def push_code(
    spec: JobSpec,
    made: Plan,
    backend: ClusterBackend,
    *,
    dry_run: bool = False,
    build: Callable[[JobSpec, Path], object] | None = None,
    **options: Any,
) -> tuple[Plan, Pushed]:
    """Put the job's code into the registry, for a spec whose image is to be made of it.

    Nothing is sent before the cluster has said that it would take the job.

    Args:
        spec: the job, under the name of its file: that of a plan may be generated.
        made: its plan, see plan_submission.
        backend: the cluster.
        dry_run: send nothing; the digest is known all the same.
        build: makes the image that the code is put on, before the code is packed.
        options: see k8sjob.image.push.push.

    Returns:
        The plan with the image, and what was pushed.

    Raises:
        SpecError: the script is not in the context.
        BackendError: the cluster refuses the job or cannot be reached, or no node runs the image.
        ImageError: the image cannot be made of the code alone, or a registry refuses.
    """
    from k8sjob.image.push import push  # noqa: PLC0415 - a tenth of a second that few need

    check_script(spec, made.folder)
    backend.dry_run(document.parse(made.manifest).data, name_free=True)
    if build is not None and not dry_run:
        build(spec, made.folder)
    pushed = push(spec, made.folder, dry_run=dry_run, **options)
    _check_processors(spec, pushed.platform, backend)
    return plan(made.spec, made.folder, image=pushed.reference, origin=pushed.origin), pushed


def _check_processors(spec: JobSpec, platform: str, backend: ClusterBackend) -> None:
    """Refuse an image that no node can run: its pods would end with "exec format error".

    Where image.platform is set, pods wait for nodes of that kind, which an autoscaler may add.
    """
    if not isinstance(spec.image, str) and spec.image.platform:
        return
    device = spec.resources.gpu_resource if spec.resources.gpus else ""
    there = backend.architectures(spec.node_selector, device)
    own = platform.split("/")[1]
    if there and own not in there:
        raise BackendError(
            f"image.base: it is for {platform}, and the nodes of the job are for"
            f" {', '.join(sorted(there))}; set image.platform to linux/{min(there)} and a base for"
            " that, or select other nodes by node_selector"
        )


def remarks(made: Plan) -> list[str]:
    """What may not be meant, though the cluster takes it."""
    said = list(made.spec.remarks)
    still_made = made.spec.builds_image and made.image == made.spec.image_reference
    if "@sha256:" not in made.image and not still_made:
        said.append(
            f"the image {made.image} has no digest, so a pod that is made later may run another one"
            " of that name; best name it as REPOSITORY@sha256:..."
        )
        if made.spec.uses_agent and not made.spec.builds_image:
            said.append(
                f"the image {made.image} is used as it is, and must contain k8sjob's runtime, which"
                f" starts the script, at {RUNTIME_HOME}; with"
                " `image: {repository: ..., base: ...}` k8sjob puts it in"
            )
    return said
