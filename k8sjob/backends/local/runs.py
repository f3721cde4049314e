"""The runs of one job name on this machine: which one is meant, and whose checkpoints are resumed.

A run is known by its id, the first eight characters of its uid: `digits@1a2b3c4d`. Checkpoints are
resumed only by a run from the folder that wrote them: two projects may use one name.
"""

from __future__ import annotations

import filecmp
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k8sjob.backends.conditions import is_true
from k8sjob.backends.local.store import read_json
from k8sjob.backends.local.truth import read_state
from k8sjob.contract import CHECKPOINT_DIR_ENV
from k8sjob.errors import BackendError, JobNotFound

if TYPE_CHECKING:
    from collections.abc import Iterable

    from k8sjob.backends.api import Plan
    from k8sjob.backends.local.store import JobFolder, Store

__all__ = [
    "Resumption",
    "checkpoints_of",
    "identity_of",
    "named",
    "resumption",
    "source_of",
]


@dataclass(frozen=True, slots=True)
class Resumption:
    """Which checkpoints a new run uses.

    Attributes:
        checkpoints: the name of their folder in checkpoints/NAME/.
        notice: what the user should know about those that are not used; may be empty.
    """

    checkpoints: str
    notice: str = ""


def named(store: Store, name: str) -> JobFolder:
    """The run that NAME or NAME@RUN means: the newest one, of this folder where folders differ.

    Raises:
        JobNotFound: there is none.
        BackendError: runs from several folders have the name, and none is from this one.
    """
    name, at, run = name.partition("@")
    folders = store.folders(name)
    if at:
        folders = [folder for folder in folders if run and folder.run.startswith(run[:8])]
    if not folders:
        raise JobNotFound(
            f"no job {name + at + run!r} on this machine; `k8sjob list` names those there are"
        )
    sources = {folder: source_of(folder) for folder in folders}
    if len({source for source in sources.values() if source}) > 1:
        here = [folder for folder in folders if sources[folder] == _working_folder()]
        if not here:
            raise BackendError(_ambiguous(name, sources.items()))
        return here[0]
    return folders[0]


def _working_folder() -> str:
    with suppress(FileNotFoundError):  # it was removed
        return str(Path.cwd())
    return "/nothing/there"


def _ambiguous(name: str, sources: Iterable[tuple[JobFolder, str]]) -> str:
    newest: dict[str, str] = {}
    for folder, source in sources:
        newest.setdefault(source, f"local/{name}@{folder.run} of {source or 'an unknown folder'}")
    return f"{name!r} is ambiguous; name one of {', '.join(newest.values())}"


def source_of(folder: JobFolder) -> str:
    """The folder that a run's job.yaml lay in; empty where that is not known."""
    return str(_launch(folder).get("source", ""))


def identity_of(folder: JobFolder) -> str:
    """The name of a run's checkpoints in checkpoints/NAME/; empty where that is not known."""
    return str(_launch(folder).get("checkpoints", ""))


def checkpoints_of(folder: JobFolder) -> Path | None:
    """The folder of a run's checkpoints; None where it has written none."""
    launches: dict[str, dict[str, Any]] = _launch(folder).get("replicas") or {}
    env = next(iter(launches.values()), {}).get("env") or {}
    found = Path(env.get(CHECKPOINT_DIR_ENV) or "/nothing/there")
    return found if _has_some(found) else None


def resumption(store: Store, plan: Plan, own: str, *, run: str = "") -> Resumption:
    """Which checkpoints a new run uses: those of its folder's last run, unless that succeeded.

    Args:
        store: the state folder.
        plan: the new run.
        own: the new run's uid, which names checkpoints of its own.
        run: the id of the run, or of kept checkpoints, that the user wants to resume; empty: none.

    Raises:
        JobNotFound: there is no such run, and no such checkpoints.
        BackendError: an earlier version did not record the folder of the last run, and its code is
            not that of the new one.
    """
    name, source = plan.spec.name, str(plan.folder.resolve())
    if run:
        return Resumption(_chosen(store, name, run))
    notice, of_others = "", set[str]()
    for folder in store.folders(name):
        launch, checkpoints = _launch(folder), identity_of(folder)
        if not checkpoints:
            continue  # damaged: its checkpoints are found by --resume alone
        if "source" not in launch and checkpoints in of_others:
            continue  # another folder has resumed them since
        resumable = not _succeeded(folder) and _has_some(store.checkpoints(name, checkpoints))
        if launch.get("source") == source or (
            "source" not in launch and (not resumable or _same_code(folder, plan))
        ):
            return Resumption(own if _succeeded(folder) else checkpoints)
        if "source" not in launch:
            raise BackendError(
                f"local/{name}@{folder.run} left checkpoints, but was run by an earlier version of"
                " k8sjob, which did not record its folder, and its code differs from that of this"
                f" job; resume them with `--resume {folder.run}`, or start from scratch with"
                " `--fresh`"
            )
        if resumable and not notice:
            notice = (
                f"the checkpoints of local/{name}@{folder.run} are not used, since it ran in"
                f" {launch['source']}; resume them with `--resume {folder.run}`"
            )
        of_others.add(checkpoints)
    return Resumption(own, notice)


def _chosen(store: Store, name: str, run: str) -> str:
    """The checkpoints of a run, or those that a deleted run left."""
    wanted = run.rpartition("@")[2][:8]
    found = {folder.run: identity_of(folder) for folder in store.folders(name)}
    kept = {path.name[:8]: path.name for path in store.checkpoints(name, "").glob("*")}
    checkpoints = found.get(wanted) or kept.get(wanted)
    if checkpoints is None or not _has_some(store.checkpoints(name, checkpoints)):
        raise JobNotFound(
            f"no checkpoints of a run {run!r} of {name!r} on this machine; runs are named by"
            " `k8sjob list -o wide`"
        )
    return checkpoints


def _launch(folder: JobFolder) -> dict[str, Any]:
    try:
        return read_json(folder.launch)
    except (BackendError, FileNotFoundError):
        return {}


def _succeeded(folder: JobFolder) -> bool:
    try:
        return is_true(read_state(folder).job.get("status") or {}, "Succeeded")
    except JobNotFound:
        return False


def _has_some(checkpoints: Path) -> bool:
    return checkpoints.is_dir() and any(checkpoints.iterdir())


def _same_code(folder: JobFolder, plan: Plan) -> bool:
    """Whether the program of a run is that of a plan, byte for byte."""
    run, copy = plan.spec.run, next(folder.path.glob("replicas/*/work"), Path("/nothing/there"))
    module = (run.module or "").replace(".", "/")
    for word in (run.script, f"{module}.py", f"{module}/__main__.py", *(run.command or ())):
        here, there = plan.context / (word or "."), copy / (word or ".")
        if here.is_file() and there.is_file():
            return filecmp.cmp(here, there, shallow=False)
    return False
