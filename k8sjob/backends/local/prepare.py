"""From a plan to what the supervisor needs: the job, and how each of its replicas is started.

What a run on this machine does differently from one in a cluster is said aloud.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import k8sjob
from k8sjob.backends.api import LOCAL
from k8sjob.backends.local.container import Launch
from k8sjob.backends.local.context import copy_context
from k8sjob.backends.local.devices import share, visible_gpus
from k8sjob.backends.local.packages import check_packages
from k8sjob.backends.local.paths import Places, mapped
from k8sjob.contract import (
    AGENT,
    CHECKPOINT_DIR_ENV,
    CONFIG_ENV,
    CONTAINER_NAME,
    PATHS_ENV,
    RUNTIME_HOME,
    SOURCE_ENV,
    WORKDIR,
    Role,
    after_agent,
)
from k8sjob.errors import BackendError
from k8sjob.rendering import operator_env

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from k8sjob.backends.api import Json, Plan

__all__ = ["Prepared", "check_processes", "prepare"]

_PACKAGE: Final = Path(k8sjob.__file__).parent
_PROCESSES: Final = 32
"""So many processes may run on any machine, however few its cores."""
_PROCESSES_PER_CORE: Final = 4
_REFERENCE: Final = re.compile(r"\$(\$|\(([^)]*)\))?")


@dataclass(slots=True)
class Prepared:
    """A job, ready to be kept.

    Attributes:
        job: the PyTorchJob, without metadata.uid and creationTimestamp.
        launches: how each replica is started.
        notices: what is different on this machine: reason and message.
    """

    job: Json
    launches: dict[str, Launch] = field(default_factory=dict)
    notices: list[tuple[str, str]] = field(default_factory=list)

    def say(self, reason: str, message: str) -> None:
        """Note something once."""
        if (reason, message) not in self.notices:
            self.notices.append((reason, message))


def check_processes(count: int) -> None:
    """Refuse a job that would make this machine unusable.

    Raises:
        BackendError: it has far more processes than there are cores.
    """
    cores = os.cpu_count() or 1
    limit = max(_PROCESSES, _PROCESSES_PER_CORE * cores)
    if count > limit:
        raise BackendError(
            f"the job has {count} processes and this machine {cores} cores: more than {limit} would"
            " make it unusable; lower replicas.workers, or run it all the same with"
            " `k8sjob run --oversubscribe`"
        )


def prepare(places: Places, draft: Path, *, fresh: bool = False, resume: bool = False) -> Prepared:
    """Everything but the start.

    Args:
        places: the job, and where its folders will be; `places.job` has its final name.
        draft: the job's folder as it is called until then.
        fresh: the job must not find checkpoints.
        resume: the user has named the checkpoints to resume.

    Raises:
        BackendError: a package, a variable, a folder or the space for it is missing.
    """
    plan = places.plan
    prepared = Prepared(deepcopy(plan.manifest))
    prepared.job["metadata"]["namespace"] = LOCAL
    _start_at_once(plan, prepared)
    check_packages(plan.spec, plan.context)
    _tell_checkpoints(places, prepared, fresh=fresh, resume=resume)
    replicas = dict(_replicas(prepared.job))
    devices = _devices(plan, list(replicas), prepared)
    for name, (role, index) in replicas.items():
        prepared.launches[name] = _launch(prepared, places, role, index, devices[name])
    works = [draft / "replicas" / name / "work" for name in replicas]
    advice = copy_context(plan.context.resolve(), works, beside=places.store.root)
    if advice:
        prepared.say("LargeContext", advice)
    _make_folders(places, list(replicas), draft)
    return prepared


def _start_at_once(plan: Plan, prepared: Prepared) -> None:
    """Kueue would let a suspended job start; there is none here."""
    if plan.spec.kueue_queue and not plan.spec.policy.suspend:
        prepared.job["spec"]["runPolicy"]["suspend"] = False
        prepared.say(
            "NoQueue", f"queue {plan.spec.kueue_queue!r} is in the cluster alone: starts at once"
        )


def _tell_checkpoints(places: Places, prepared: Prepared, *, fresh: bool, resume: bool) -> None:
    """Whether the job goes on from earlier checkpoints; what is the user's is never emptied."""
    if places.plan.spec.checkpoint is None:
        if resume:
            raise BackendError(
                "the job has no `checkpoint`, so it cannot resume any; write `checkpoint: {dir:"
                " /checkpoints}` in its job.yaml, or leave --resume out"
            )
        return
    folder = Path(mapped(places.plan.spec.checkpoint.dir, places.of("master-0")) or "")
    if resume and places.checkpoints_are_the_users:
        raise BackendError(
            f"checkpoint.dir is {folder} on this machine, a folder of yours that every run uses;"
            " leave --resume out, or name another folder in volumes[].local"
        )
    if not (folder.is_dir() and any(folder.iterdir())):
        return
    if fresh:
        raise BackendError(
            f"checkpoint.dir is {folder} on this machine, a folder of yours that is not empty;"
            " empty it for a fresh start, or name another one in volumes[].local"
        )
    hint = "" if places.checkpoints_are_the_users else "; --fresh starts anew"
    prepared.say("Resumes", f"goes on from the checkpoints of an earlier run, in {folder}{hint}")


def _replicas(job: Json) -> Iterator[tuple[str, tuple[Role, int]]]:
    specs = job["spec"]["pytorchReplicaSpecs"]
    for role in Role:
        for index in range(specs[role].get("replicas", 1) if role in specs else 0):
            yield f"{role.lower()}-{index}", (role, index)


def _devices(plan: Plan, replicas: list[str], prepared: Prepared) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of each replica; all are empty when there are too few."""
    resources = plan.spec.resources
    asked = {
        name: (resources.of_master if name.startswith("master") else resources).gpus
        for name in replicas
    }
    total = sum(asked.values())
    gpus = visible_gpus() if total else ()
    shares = share(gpus, asked)
    if shares is None:
        prepared.say(
            "TooFewGPUs",
            f"the job asks for {total} GPUs and this machine has {len(gpus)}: it runs on CPUs with"
            " gloo",
        )
    return shares or dict.fromkeys(replicas, "")


def _launch(prepared: Prepared, places: Places, role: Role, index: int, gpus: str) -> Launch:
    template = prepared.job["spec"]["pytorchReplicaSpecs"][role]["template"]["spec"]
    others = [c["name"] for c in template["containers"] if c["name"] != CONTAINER_NAME]
    others += [c["name"] for c in template.get("initContainers") or []]
    if others:
        prepared.say(
            "ContainersLeftOut", f"not run on this machine: containers {', '.join(others)}"
        )
    container = next(c for c in template["containers"] if c["name"] == CONTAINER_NAME)
    folders = places.of(f"{role.lower()}-{index}")
    env = _own_env(prepared, container, role, index)
    argv = [*(container.get("command") or []), *(container.get("args") or [])]
    argv = [_rewrite(prepared, _expand(word, env), folders) for word in argv]
    env = {
        name: ":".join(_rewrite(prepared, part, folders) for part in value.split(":"))
        if name.endswith("PATH")
        else _rewrite(prepared, value, folders)
        for name, value in env.items()
    }
    env |= _local_env(prepared, places, folders, gpus)
    env |= _loopback(operator_env(prepared.job, role, index))
    return Launch(
        argv=_started(argv),
        has_agent=after_agent(argv) is not None,
        env=env,
        cwd=str(places.job / "replicas" / f"{role.lower()}-{index}" / "work"),
        grace=float(template.get("terminationGracePeriodSeconds", 30)),
        fallback_to_logs=container.get("terminationMessagePolicy") == "FallbackToLogsOnError",
    )


def _started(argv: list[str]) -> list[str]:
    """The agent by this very Python; it keeps a command of the user's own too, as a mere keeper."""
    agent = [sys.executable, *AGENT[1:]]
    own = after_agent(argv)
    return [*agent, "--exec", *argv] if own is None else [*agent, *own]


def _own_env(prepared: Prepared, container: Json, role: Role, index: int) -> dict[str, str]:
    """The manifest's variables. Values of secrets stay in this process's environment.

    The supervisor inherits that, so nothing secret is written down.
    """
    env: dict[str, str] = {}
    missing = []
    for variable in container.get("env") or []:
        name, source = variable["name"], variable.get("valueFrom") or {}
        if "fieldRef" in source:
            path = source["fieldRef"]["fieldPath"]
            env[name] = _field(prepared.job, path, role, index)
        elif source:
            reference = source.get("secretKeyRef") or source.get("configMapKeyRef") or {}
            if name not in os.environ and not reference.get("optional"):
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
        prepared.say(
            "EnvFrom",
            f"{kind.removesuffix('Ref')} {reference['name']!r} is in the cluster alone: its"
            " variables are those of the same name in this terminal",
        )
    return env


def _field(job: Json, path: str, role: Role, index: int) -> str:
    meta = job["metadata"]
    known: dict[str, str] = {
        "metadata.name": f"{meta['name']}-{role.lower()}-{index}",
        "metadata.namespace": meta["namespace"],
        "spec.nodeName": socket.gethostname(),
        "status.podIP": "127.0.0.1",
        "status.hostIP": "127.0.0.1",
    }
    if path not in known:
        raise BackendError(
            f"fieldRef {path!r} means nothing on this machine; known are {', '.join(known)}"
        )
    return known[path]


def _local_env(
    prepared: Prepared, places: Places, folders: Mapping[str, str], gpus: str
) -> dict[str, str]:
    """What the back end adds: see contract.py, and docs/explanation/local-backend.md."""
    spec = places.plan.spec
    env = {
        "CUDA_VISIBLE_DEVICES": gpus,
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        PATHS_ENV: json.dumps(folders),
        SOURCE_ENV: str(places.plan.context.absolute()),
    }
    if "PYTHONPATH" not in spec.run.env:  # as the image's own
        path = (folders[RUNTIME_HOME], folders[WORKDIR], os.environ.get("PYTHONPATH", ""))
        env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    if spec.checkpoint:
        env[CHECKPOINT_DIR_ENV] = mapped(spec.checkpoint.dir, folders) or ""
    if "OMP_NUM_THREADS" not in spec.run.env and "OMP_NUM_THREADS" not in os.environ:
        env["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // spec.world_size))
    if not gpus and spec.strategy.backend == "nccl":
        config = {**json.loads(spec.runtime_config.encode()), "backend": "gloo"}
        env[CONFIG_ENV] = json.dumps(config)
        prepared.say("NoNccl", "strategy.backend is nccl, which needs GPUs: gloo is used")
    return env


def _loopback(env: dict[str, str]) -> dict[str, str]:
    addresses = {"MASTER_ADDR", "PET_MASTER_ADDR"} & env.keys()
    return {**env, **dict.fromkeys(addresses, "127.0.0.1")}


def _expand(text: str, env: Mapping[str, str]) -> str:
    """$(NAME) and $$ as Kubernetes replaces them; an unknown name stays as it is."""

    def replaced(match: re.Match[str]) -> str:
        if match.group(1) == "$":
            return "$"
        name = match.group(2)
        return match.group() if name is None else env.get(name, match.group())

    return _REFERENCE.sub(replaced, text)


def _rewrite(prepared: Prepared, text: str, folders: Mapping[str, str]) -> str:
    """A path inside the container as one of this machine."""
    here = mapped(text, folders)
    if here is None:
        return text
    prepared.say("PathMapped", f"{text} is {here} on this machine")
    return here


def _make_folders(places: Places, replicas: list[str], draft: Path) -> None:
    """Make what the replicas will find mounted; what belongs to the job under its draft name."""
    for replica in replicas:
        (draft / "replicas" / replica / "logs").mkdir(parents=True)
        for folder in places.of(replica).values():
            path = Path(folder)
            if path.is_relative_to(places.job):
                path = draft / path.relative_to(places.job)
            if not path.exists():  # a single file may be mounted too
                path.mkdir(parents=True)
    # In front of the user's code, as in an image: a k8sjob.py there must not hide the runtime.
    runtime = draft / Path(places.of(replicas[0])[RUNTIME_HOME]).relative_to(places.job)
    (runtime / _PACKAGE.name).symlink_to(_PACKAGE)
