"""The plan of a job: its spec, its manifest and its image, before anything is created."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k8sjob.backends.api import LOCAL, Plan
from k8sjob.errors import SpecError
from k8sjob.findings import invalid
from k8sjob.rendering.dockerfile import check_script
from k8sjob.rendering.manifest import image_warnings, manifest, remarks
from k8sjob.spec import JobSpec, load
from k8sjob.spec.job import longest_name
from k8sjob.spec.load import folder_of
from k8sjob.targets.jobs import DEFAULT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.findings import Finding
    from k8sjob.provenance import Provenance

_SUFFIX_LETTERS: Final = "bcdfghjklmnpqrstvwxz2456789"
"""The characters of names that Kubernetes generates: they form no words."""
_SUFFIX_LENGTH: Final = 5


def load_spec(
    spec: JobSpec | str | Path, folder: str | Path | None = None, *, local: bool = False
) -> tuple[JobSpec, Path | str]:
    """A spec, and the folder that its relative paths start from.

    Args:
        spec: a JobSpec, or the path of a job.yaml, of its folder, or of a script.
        folder: used instead of the folder of the job.yaml, or of the working folder.
        local: the job runs on this machine; see k8sjob.spec.load.

    Raises:
        SpecError: it is neither, or no valid spec.
    """
    if isinstance(spec, JobSpec):
        return spec, folder or "."
    if not isinstance(spec, str | Path):
        kind = type(spec).__name__
        step = "name a job.yaml, or make a spec by JobSpec(name=..., image=..., run=...)"
        raise SpecError([invalid((), f"a {kind} is neither a JobSpec nor a path", step)])
    return load(spec, local=local), folder or folder_of(spec)


def plan_job(
    spec: JobSpec,
    folder: str | Path = ".",
    *,
    image: str | None = None,
    provenance: Provenance | None = None,
) -> Plan:
    """The plan of a job on any back end.

    Args:
        spec: the job.
        folder: what relative paths of the spec (context, volumes[].local) start from.
        image: what the replicas run, with its digest; None: as the spec names it.
        provenance: what that image was made of, where that is known.

    Raises:
        SpecError: the overlay does not fit the manifest.
    """
    reference = spec.image_reference if image is None else image
    job = manifest(spec, reference, provenance=provenance)
    return Plan(spec, job, reference, Path(folder).absolute())


def plan_run(spec: JobSpec, folder: str | Path = ".") -> Plan:
    """The plan of a job on this machine.

    Raises:
        SpecError: the overlay does not fit the manifest, or the script is not in the context.
    """
    # This machine keeps jobs as the training operator does, whatever they become in a cluster.
    local: dict[str, str] = {"target": DEFAULT.name}
    if spec.security == "openshift":
        # The user has a home here, with the caches of earlier runs.
        local["security"] = "restricted"
    plan = plan_job(spec.without_runtime.model_copy(update=local), folder)
    check_script(spec, Path(folder), local=True)
    return plan


def plan_submission(
    spec: JobSpec,
    folder: str | Path = ".",
    *,
    image: str | None = None,
    namespace: str | None = None,
    generate_name: bool = False,
) -> Plan:
    """The plan of a job in a cluster; an image that is not built yet has no digest.

    See `submit` for the arguments.

    Raises:
        SpecError: two namespaces are given, or the name is too long to add a suffix to it.
    """
    if problems := list(_problems(spec, namespace, generate_name=generate_name)):
        raise SpecError(problems)
    if generate_name:
        suffix = "".join(secrets.choice(_SUFFIX_LETTERS) for _ in range(_SUFFIX_LENGTH))
        spec = spec.with_(name=f"{spec.name}-{suffix}")
    return plan_job(spec, folder, image=image)


def _problems(spec: JobSpec, namespace: str | None, *, generate_name: bool) -> Iterator[Finding]:
    if namespace and spec.namespace and namespace != spec.namespace:
        yield invalid(
            ("namespace",),
            f"the spec says {spec.namespace!r}, and {namespace!r} is requested",
            "give only one",
        )
    if LOCAL in (namespace, spec.namespace):
        yield invalid(
            ("namespace",),
            f"{LOCAL!r} stands for this machine, where `k8sjob run` runs jobs",
            "use another name",
        )
    longest = longest_name(spec) - _SUFFIX_LENGTH - 1
    if generate_name and len(spec.name) > longest:
        yield invalid(
            ("name",),
            f"{spec.name!r} has {len(spec.name)} characters, and a generated name adds"
            f" {_SUFFIX_LENGTH + 1}",
            f"shorten it to at most {longest}",
        )


def warnings(plan: Plan) -> list[str]:
    """Warnings about a plan that the cluster accepts, but that may not be intended."""
    messages = remarks(plan.spec)
    not_built_yet = plan.spec.builds_image and plan.image == plan.spec.image_reference
    # An image that is still to be pushed gets its digest then.
    if "@sha256:" in plan.image or not_built_yet:
        return messages
    messages.append(
        f"the image {plan.image} has no digest, so pods created later may run another image of that"
        " name; prefer REPOSITORY@sha256:..."
    )
    return messages + image_warnings(plan.spec, plan.image)
