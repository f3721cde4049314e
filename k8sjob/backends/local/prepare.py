"""Preparation of a local run: the job, its folders, and how each replica is started.

What differs from a run in a cluster becomes a warning of the job.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k8sjob.backends.api import LOCAL, TOO_FEW_GPUS
from k8sjob.backends.local.container import Launch
from k8sjob.backends.local.machine import check_packages, visible_gpus
from k8sjob.backends.local.mounts import refusal
from k8sjob.contract import (
    AGENT,
    CHECKPOINT_DIR_ENV,
    CONFIG_ENV,
    PATHS_ENV,
    RUNTIME_HOME,
    SOURCE_ENV,
    WORKDIR,
    Role,
    after_agent,
    counted,
)
from k8sjob.environment import variables
from k8sjob.errors import BackendError
from k8sjob.kube.objects import Object, containers, training
from k8sjob.rendering.dockerignore import Ignore, dockerignore, own_patterns
from k8sjob.rendering.merge import merge
from k8sjob.temporary import temporary_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from k8sjob.backends.api import Plan
    from k8sjob.backends.local.state_folder import Store
    from k8sjob.kube.objects import Json
    from k8sjob.spec import Volume
    from k8sjob.targets.api import Job, RoleReplicas

_PACKAGE: Final = Path(__file__).resolve().parents[2]
_ALWAYS_IGNORED: Final = "**/.git\n**/.venv\n**/__pycache__\n"
"""Left out even where a .dockerignore takes it in."""
_LARGE: Final = 200 * 1024**2
"""Bytes of one copy above which a message names what makes it so large."""
_MANY: Final = 5_000
"""Files of one copy above which a message names where they are."""
_TOO_MANY: Final = 50_000
"""Files of one copy that are refused: its reading and writing would take minutes, unseen."""
_MIN_FREE_BYTES: Final = 512 * 1024**2
"""Bytes of disk that a copy must leave free."""
_KERNEL: Final = ("/dev/", "/proc/", "/sys/")
_REFERENCE: Final = re.compile(r"\$\$|\$\(([^)]*)\)")


@dataclass(slots=True)
class Prepared:
    """A job, ready to be started.

    Attributes:
        job: the PyTorchJob, without metadata.uid and creationTimestamp.
        launches: how each replica is started.
        notices: what is different on this machine: reason and message.
    """

    job: Job
    launches: dict[str, Launch] = field(default_factory=dict)
    notices: list[tuple[str, str]] = field(default_factory=list)

    def notice(self, reason: str, message: str) -> None:
        """Note something once."""
        if (reason, message) not in self.notices:
            self.notices.append((reason, message))


def prepare(places: Places, draft: Path, *, fresh: bool = False, resume: bool = False) -> Prepared:
    """Everything but the start.

    `places.job` has the final name of the job's folder, which is called `draft` until then. A
    `fresh` job must not find checkpoints; with `resume` the user has named those to resume.

    Raises:
        BackendError: a package, a variable, a folder or the space for it is missing.
    """
    places.store.make()
    plan = places.plan
    prepared = Prepared(deepcopy(plan.job))
    prepared.job.metadata["namespace"] = LOCAL
    if plan.spec.kueue_queue and not plan.spec.policy.suspend:
        # Kueue would resume the job when it admits it, and there is no Kueue here.
        resumed = merge(prepared.job.document, prepared.job.target.suspension(value=False))
        prepared.job = prepared.job.with_document(resumed)
        prepared.notice(
            "NoQueue",
            f"queue {plan.spec.kueue_queue!r} exists only in the cluster: the job starts at once",
        )
    check_packages(plan.spec, plan.context)
    _check_checkpoints(places, prepared, fresh=fresh, resume=resume)
    replicas = {
        group.name(index): (group, index)
        for group in prepared.job.replicas
        for index in range(group.count)
    }
    gpus = _gpus(plan, list(replicas), prepared)
    refused = _mounts_are_refused(places, uses_gpus=any(gpus.values()))
    _note_fixed_paths(places, prepared, refused=refused)
    for name, (group, index) in replicas.items():
        launch = _launch(prepared, places, group, index, gpus[name])
        prepared.launches[name] = launch if refused else replace(launch, mounts=places.mounts(name))
    works = [draft / "replicas" / name / "work" for name in replicas]
    advice = copy_context(plan.context.resolve(), works, beside=places.store.root)
    if advice:
        prepared.notice("LargeContext", advice)
    _make_folders(places, list(replicas), draft)
    return prepared


def _mounts_are_refused(places: Places, *, uses_gpus: bool) -> bool:
    """Whether no replica can have its mounts at their own paths; see mounts.py."""
    mounts = places.mounts("master-0")
    if mounts and uses_gpus:
        # CUDA calls it at its first use, and as a setuid program it does nothing behind mounts.
        with suppress(OSError):
            subprocess.run(["nvidia-modprobe", "-u", "-c=0"], check=False)  # noqa: S607 - on PATH
    with temporary_folder("mounts") as empty:  # in place of the folders that the job will make
        tried = {at: to if Path(to).exists() else str(empty) for at, to in mounts.items()}
        return bool(mounts and refusal(tried))


def _note_fixed_paths(places: Places, prepared: Prepared, *, refused: bool) -> None:
    """Name the mounts whose paths stand in a script, where nothing can replace them."""
    run = places.plan.spec.run
    replaced = " ".join([*run.args, *run.env.values()])
    real = {} if refused else places.mounts("master-0")
    folders = places.of("master-0").items()
    mounts = {mount: to for mount, to in folders if mount != to and mount not in real}
    for name in (run.script, *(run.command or ())):
        file = places.plan.context / (name or "")
        is_script = file.suffix == ".py" and os.path.isfile(file)  # noqa: PTH113 - no limit of length
        code = file.read_text(errors="replace") if is_script else ""
        for mount in mounts.keys() - {WORKDIR, RUNTIME_HOME}:
            if mount not in replaced and re.search(rf"[\"']{re.escape(mount)}[\"'/]", code):
                prepared.notice(
                    "PathNotMapped",
                    f"{name} has the path {mount}, which is {mounts[mount]} on this machine and is"
                    " replaced only in run.args and run.env: pass it there, or write"
                    f" {os.path.relpath(mount, WORKDIR)}, which leads there in both places",
                )


def _check_checkpoints(places: Places, prepared: Prepared, *, fresh: bool, resume: bool) -> None:
    """Report which checkpoints are resumed; a folder of the user's is never emptied."""
    if places.plan.spec.checkpoint is None:
        if resume:
            raise BackendError(
                "the job has no `checkpoint`, so there is nothing to resume; write `checkpoint:"
                " {dir: /checkpoints}` in its job.yaml, or omit --resume"
            )
        return
    folder = Path(mapped(places.plan.spec.checkpoint.dir, places.of("master-0")) or "")
    if resume and places.checkpoints_are_the_users:
        raise BackendError(
            f"checkpoint.dir is {folder} on this machine, your own folder, which every run uses;"
            " omit --resume, or specify another folder in volumes[].local"
        )
    if not (folder.is_dir() and any(folder.iterdir())):
        return
    if fresh:
        raise BackendError(
            f"checkpoint.dir is {folder} on this machine, your own folder, which is not empty;"
            " empty it for a fresh start, or specify another one in volumes[].local"
        )
    hint = "" if places.checkpoints_are_the_users else "; --fresh starts from scratch"
    prepared.notice("Resumes", f"resumes the checkpoints of an earlier run, in {folder}{hint}")


def _gpus(plan: Plan, replicas: list[str], prepared: Prepared) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of each replica; all are empty when there are too few GPUs."""
    resources = plan.spec.resources
    asked = {
        name: (resources.of_master if name.startswith("master") else resources).gpus
        for name in replicas
    }
    total = sum(asked.values())
    gpus = visible_gpus() if total else ()
    if total > len(gpus):
        prepared.notice(
            TOO_FEW_GPUS,
            f"the job requests {counted(total, 'GPU')} and this machine has {len(gpus)}:"
            " it runs on CPUs with gloo",
        )
        # All or none: ranks with and without a GPU cannot form an nccl group.
        return dict.fromkeys(replicas, "")
    indices = iter(gpus)
    return {name: ",".join(next(indices) for _ in range(count)) for name, count in asked.items()}


def _launch(
    prepared: Prepared, places: Places, group: RoleReplicas, index: int, gpus: str
) -> Launch:
    pod, replica = group.pod, group.name(index)
    container = training(pod["containers"])
    extras = [extra["name"] for extra in containers(pod) if extra is not container]
    if extras:
        message = f"not run on this machine: containers {', '.join(extras)}"
        prepared.notice("ContainersLeftOut", message)
    folders = places.of(replica)
    env = _own_env(prepared, container, replica)
    argv = [*(container.get("command") or []), *(container.get("args") or [])]
    argv = [_rewrite(prepared, _expand(word, env), folders) for word in argv]
    env = {
        name: ":".join(_rewrite(prepared, part, folders) for part in value.split(":"))
        # A list of paths, each of which may lie on a mount.
        if name.endswith("PATH")
        else _rewrite(prepared, value, folders)
        for name, value in env.items()
    }
    env |= _local_env(prepared, places, folders, gpus)
    # Last, as the operator's variables replace the user's.
    env |= prepared.job.injected_env(Role(group.role), index)
    # The name of the Master's Pod resolves only in a cluster.
    env |= dict.fromkeys({"MASTER_ADDR", "PET_MASTER_ADDR"} & env.keys(), "127.0.0.1")
    options = after_agent(argv)
    return Launch(
        # Run by this Python. Without an agent in the job it only runs the user's command.
        argv=[sys.executable, *AGENT[1:], *(["--exec", *argv] if options is None else options)],
        has_agent=options is not None,
        env=env,
        cwd=str(places.job / "replicas" / replica / "work"),
        grace=float(pod.get("terminationGracePeriodSeconds", 30)),
        fallback_to_logs=container.get("terminationMessagePolicy") == "FallbackToLogsOnError",
    )


def _own_env(prepared: Prepared, container: Json, replica: str) -> dict[str, str]:
    """The manifest's variables; those of secrets are inherited, so no file has their values."""
    env: dict[str, str] = {}
    missing = []
    for variable in container.get("env") or []:
        name, source = variable["name"], variable.get("valueFrom") or {}
        if "fieldRef" in source:
            path = Object(source).part("fieldRef")["fieldPath"]
            env[name] = _field(prepared.job, path, replica)
        elif source:
            reference = source.get("secretKeyRef") or source.get("configMapKeyRef") or {}
            # The supervisor inherits it from this terminal, so that no file holds the value.
            if name not in variables() and not reference.get("optional"):
                missing.append(name)
        else:
            env[name] = _expand(variable.get("value") or "", env)
    if missing:
        raise BackendError(
            f"{', '.join(missing)}: taken from a secret or a config map in the cluster; for a run"
            f" on this machine set the variables of the same name: export {missing[0]}=..."
        )
    for source in container.get("envFrom") or []:
        kind, reference = next((k, v) for k, v in source.items() if k.endswith("Ref"))
        prepared.notice(
            "EnvFrom",
            f"{kind.removesuffix('Ref')} {reference['name']!r} exists only in the cluster:"
            " variables of the same names in this terminal are used",
        )
    return env


def _field(job: Job, path: str, replica: str) -> str:
    fields = {
        "metadata.name": f"{job.name}-{replica}",
        "metadata.namespace": job.namespace,
        "spec.nodeName": socket.gethostname(),
        "status.podIP": "127.0.0.1",
        "status.hostIP": "127.0.0.1",
    }
    if path not in fields:
        raise BackendError(
            f"fieldRef {path!r} has no meaning on this machine; use one of {', '.join(fields)}"
        )
    return fields[path]


def _local_env(
    prepared: Prepared, places: Places, folders: Mapping[str, str], gpus: str
) -> dict[str, str]:
    """The variables added by the back end: contract.py and docs/explanation/local-backend.md."""
    spec = places.plan.spec
    env = {
        "CUDA_VISIBLE_DEVICES": gpus,
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        PATHS_ENV: json.dumps(folders),
        SOURCE_ENV: str(places.plan.source.absolute()),
    }
    if "PYTHONPATH" not in spec.run.env:  # as the image's own
        path = (folders[RUNTIME_HOME], folders[WORKDIR], variables().get("PYTHONPATH", ""))
        env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    if spec.checkpoint:
        env[CHECKPOINT_DIR_ENV] = mapped(spec.checkpoint.dir, folders) or ""
    # Each process would otherwise take all cores of the machine.
    if "OMP_NUM_THREADS" not in spec.run.env and "OMP_NUM_THREADS" not in variables():
        env["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // spec.world_size))
    config = json.loads(spec.runtime_config.encode())
    changes: Json = {}
    if spec.preflight:  # this machine has what it has
        changes["preflight"] = {**config["preflight"], "asks": [{}, {}]}
    if not gpus and spec.strategy.backend == "nccl":
        changes["backend"] = "gloo"
        prepared.notice("NoNccl", "strategy.backend is nccl, which needs GPUs: gloo is used")
    if changes:
        env[CONFIG_ENV] = json.dumps({**config, **changes})
    return env


def _expand(text: str, env: Mapping[str, str]) -> str:
    """$(NAME) and $$ as Kubernetes replaces them; an unknown name stays as it is."""
    return _REFERENCE.sub(
        lambda match: "$" if match[0] == "$$" else env.get(match[1], match[0]), text
    )


def _rewrite(prepared: Prepared, text: str, folders: Mapping[str, str]) -> str:
    """A path inside the container as one of this machine."""
    local = mapped(text, folders)
    if local is None:
        return text
    prepared.notice("PathMapped", f"{text} is {local} on this machine")
    return local


def _make_folders(places: Places, replicas: list[str], draft: Path) -> None:
    """Make the folders that the replicas find mounted; the job's own ones in its draft folder."""
    for replica in replicas:
        (draft / "replicas" / replica / "logs").mkdir(parents=True)
        for folder in places.of(replica).values():
            path = Path(folder)
            # The job's folder has its final name only when it is published.
            if path.is_relative_to(places.job):
                path = draft / path.relative_to(places.job)
            if not path.exists():  # a single file may be mounted too
                path.mkdir(parents=True)
        _link_mounts(places, replica, draft)
    # Before the user's code, as in an image: a k8sjob.py there must not hide the runtime.
    runtime = draft / Path(places.of(replicas[0])[RUNTIME_HOME]).relative_to(places.job)
    (runtime / _PACKAGE.name).symlink_to(_PACKAGE)


def _link_mounts(places: Places, replica: str, draft: Path) -> None:
    """Let relative paths of the script lead to the mounts, as they do from WORKDIR in an image."""
    home = draft / "replicas" / replica
    folders = places.of(replica)
    for mount, folder in reversed(folders.items()):  # shorter paths first
        link = Path(os.path.normpath(home / "work" / os.path.relpath(mount, WORKDIR)))
        around = link.parent.resolve()
        if mount in {WORKDIR, RUNTIME_HOME} or not around.is_relative_to(home.resolve()):
            continue
        if link.is_relative_to(home / "work"):  # a mount hides what the image has there
            if link.is_dir() and not link.is_symlink():
                shutil.rmtree(link)
            else:
                link.unlink(missing_ok=True)
        if not os.path.lexists(link):
            around.mkdir(parents=True, exist_ok=True)
            link.symlink_to(folder)


# --- folders --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Places:
    """The folders that a job uses on this machine.

    Attributes:
        plan: the job, and the folder that relative paths of its spec start from.
        job: the job's folder in the state folder.
        checkpoints: the folder for checkpoint.dir, unless the user has named one.
        store: the state folder.
        hides: whether a mount may hide what this machine has at its path.
    """

    plan: Plan
    job: Path
    checkpoints: Path
    store: Store
    hides: bool = False

    def of(self, replica: str) -> dict[str, str]:
        """Each mount path that a replica sees, with its folder here; longer paths first.

        The folders are made where they are missing.

        Raises:
            BackendError: a volume has no counterpart on this machine.
        """
        home = self.job / "replicas" / replica
        folders = {WORKDIR: home / "work", RUNTIME_HOME: self.job / "runtime"}
        for index, volume in enumerate(self.plan.spec.volumes):
            folders[volume.mount] = self._folder(index, volume, home)
        if self.plan.spec.checkpoint and not self.checkpoints_are_the_users:
            # After the volumes: the folder of the run takes the place of a claim's.
            folders[self.plan.spec.checkpoint.dir] = self.checkpoints
        longest_first = sorted(folders.items(), key=lambda item: -len(item[0]))
        return {mount: str(folder) for mount, folder in longest_first}

    def mounts(self, replica: str) -> dict[str, str]:
        """The mounts that a replica shall have at their own paths.

        None where each `local` volume is at its path anyway, and nothing is to be hidden.
        """
        folders = self.of(replica)
        local = (volume.mount for volume in self.plan.spec.volumes if volume.local)
        if not self.hides and all(folders[mount] == mount for mount in local):
            return {}
        taken = {WORKDIR, RUNTIME_HOME}
        suits = self._can_hide if self.hides else _is_free
        return {at: to for at, to in folders.items() if at not in taken and suits(at)}

    def _can_hide(self, path: str) -> bool:
        """Whether a process starts without what this machine has at a path."""
        needed = (Path(sys.prefix), Path(sys.base_prefix), _PACKAGE, self.job)
        real = Path(path).resolve()
        return not path.startswith(_KERNEL) and not any(at.is_relative_to(real) for at in needed)

    @property
    def checkpoints_are_the_users(self) -> bool:
        """Whether checkpoint.dir is on a volume for which the user has named a folder here."""
        volume = self.plan.spec.checkpoint_volume
        return volume is not None and volume.local is not None

    def _folder(self, index: int, volume: Volume, home: Path) -> Path:
        if volume.local is not None:
            folder = (self.plan.folder / Path(volume.local).expanduser()).absolute()
            if not folder.exists():
                raise BackendError(
                    f"volumes[{index}].local: {folder} does not exist; create it, or correct the"
                    " path"
                )
        elif volume.source in ("config_map", "secret"):
            raise BackendError(
                f"volumes[{index}]: the {volume.source} of {volume.name!r} exists only in the"
                " cluster; add `local: PATH`, a folder with the same files, for runs on this"
                " machine"
            )
        elif volume.pvc is not None:
            folder = self.store.claim(volume.pvc)
        elif volume.empty_dir is not None:
            folder = home / "volumes" / volume.name
        else:
            folder = self.job / "volumes" / volume.name
        return folder / volume.sub_path if volume.sub_path else folder


def _is_free(path: str) -> bool:
    """Whether a folder may be mounted there: nothing is, or an empty folder, and not a device."""
    if path.startswith(_KERNEL):
        return False
    try:
        return not any(Path(path).iterdir())
    except OSError as error:  # it is a file, or below one
        return isinstance(error, FileNotFoundError)


def mapped(path: str, places: Mapping[str, str]) -> str | None:
    """The path on this machine of one inside the container; None if nothing is mounted there.

    Args:
        path: a path, or text with one behind its first "=", as in "--data=/data/train".
        places: mount path -> folder, longer mount paths first.
    """
    head, equals, tail = path.rpartition("=") if path.startswith("-") else ("", "", path)
    for mount, folder in places.items():
        if tail == mount or tail.startswith(mount.rstrip("/") + "/"):
            return head + equals + folder + tail[len(mount.rstrip("/")) :]
    return None


def copy_context(source: Path, targets: Sequence[Path], *, beside: Path) -> str:
    """Copy a context into the working folder of each replica, as an image would hold it.

    Args:
        source: the context.
        targets: the working folders, which are made.
        beside: the state folder, which is left out if it is inside the context; the copy of an
            earlier run is in it.

    Returns:
        A warning, or empty.

    Raises:
        BackendError: the context is not a folder, or the copies do not fit on the disk.
        ImageError: its .dockerignore cannot be read.
    """
    if not source.is_dir():
        raise BackendError(
            f"image.context: {source} is not a folder; specify the one with your code"
        )
    user_patterns = own_patterns(source / ".dockerignore")
    patterns = dockerignore() if user_patterns is None else user_patterns
    files = (
        name
        for name in Ignore(f"{patterns}\n{_ALWAYS_IGNORED}").walk(source)
        # A context within the state folder is the copy of an earlier run, as for `k8sjob rerun`.
        if source.is_relative_to(beside) or not (source / name).is_relative_to(beside)
    )
    # A folder such as / is not walked to its end.
    names = list(islice(files, _TOO_MANY + 1))
    sizes = Counter({name: (source / name).lstat().st_size for name in names})
    advice = _check_size(source, sizes, len(targets), shutil.disk_usage(beside).free)
    for target in targets:
        target.mkdir(parents=True)
        for name in names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            # A link is copied as a link, as in an image.
            shutil.copy2(source / name, target / name, follow_symlinks=False)
    return advice


def _check_size(source: Path, sizes: Counter[str], copies: int, free: int) -> str:
    total, count = sizes.total(), len(sizes)
    if total < _LARGE and count <= _MANY:
        return ""
    tops: Counter[str] = Counter()
    for name, size in sizes.items():
        tops[name.partition("/")[0]] += 1 if count > _TOO_MANY else size
    if count > _TOO_MANY:
        most = ", ".join(f"{name} {number:,}" for name, number in tops.most_common(3))
        extent = f"more than {_TOO_MANY:,} files (of the first, {most})"
    else:
        most = ", ".join(f"{name} {size >> 20:,} MiB" for name, size in tops.most_common(3))
        extent = f"{count:,} files of {total >> 20:,} MiB ({most})"
    advice = (
        f"the context {source} has {extent}, and each of {copies} replicas gets a copy; list what"
        " the code does not need in .dockerignore, or mount it as a volume"
    )
    if count > _TOO_MANY:
        raise BackendError(advice)
    if total * copies > free - _MIN_FREE_BYTES:
        raise BackendError(f"{advice}; only {free >> 20:,} MiB are free")
    return advice
