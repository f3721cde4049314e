"""Fields of a job spec guessed from a job; what the guess misses goes to the overlay."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from k8sjob.adopt.equivalence import default_pull_policy, pods, same
from k8sjob.contract import CONFIG_ENV, Role, after_agent
from k8sjob.kube.capacity import counts_gpus
from k8sjob.kube.objects import (
    ISTIO,
    MANAGED_BY,
    NOTIFY,
    PODSET_GROUP,
    PRIORITY,
    QUEUE,
    TOPOLOGY,
    Json,
    Object,
    mappings,
    training,
)
from k8sjob.rendering.manifest import literal
from k8sjob.rendering.merge import merge
from k8sjob.targets.jobs import job_of, settings_of
from k8sjob.targets.readers import reader_of

if TYPE_CHECKING:
    from collections.abc import Iterable

_OWN_LABELS: Final = (MANAGED_BY, QUEUE, PRIORITY)
_DEV_SHM: Final = "/dev/shm"  # noqa: S108 - a mount point, not a temporary file
NO_COMMAND: Final = [
    "sh",
    "-c",
    "echo 'only the image or the overlay defines what runs here; see run.command' >&2; exit 2",
]
"""The placeholder for an entrypoint that only the image knows; the overlay removes it."""


def fields(manifest: Json) -> Json:
    """Data for JobSpec, without overlay.

    Args:
        manifest: a job in normal form, which its controller accepts.
    """
    job, reader = Object(manifest), reader_of(manifest)
    of_kind = reader.fields(manifest)
    by_role = dict(pods(manifest))
    all_pods = list(by_role.values())
    lead = by_role.get(Role.MASTER) or by_role[Role.WORKER]
    queue, notify = job.labels.get(QUEUE), job.annotations.get(NOTIFY)
    labels = [job.labels, *_templates(manifest, "labels")]
    annotations = _annotations(manifest)
    topology = _topology(annotations, job.name) if queue is not None else None
    spec: Json = {
        "name": job.name,
        "target": reader.target.name,
        "runtime": of_kind.get("runtime"),
        "namespace": job.namespace or None,
        "image": _image(lead),
        "run": _run(all_pods, lead),
        "labels": {k: v for k, v in _shared(labels).items() if k not in _OWN_LABELS},
        "annotations": annotations,
        "notify": None if notify is None else [word for word in notify.split(",") if word],
        "replicas": of_kind["replicas"],
        "resources": _resources(by_role.get(Role.WORKER) or lead),
        "volumes": _volumes(all_pods, lead),
        "policy": _without_none(
            {**of_kind["policy"], "termination_grace": lead["terminationGracePeriodSeconds"]}
        ),
        "gang": _gang(of_kind.get("gang"), all_pods),
        "kueue_queue": queue,
        "kueue_priority_class": queue and job.labels.get(PRIORITY),
        "kueue_topology": topology,
        "service_account_token": lead["automountServiceAccountToken"],
        **_scheduling(all_pods, lead),
    }
    if queue is not None:
        del spec["policy"]["suspend"]  # Kueue's jobs begin suspended anyway
    settled: Json = merge(spec, _runtime_settings(manifest))
    return _without_none(settled)


def _without_none(data: Json) -> Json:
    return {key: value for key, value in data.items() if value is not None}


def trainer(pod: Json) -> Json:
    """The container that trains, which exists."""
    return training(mappings(pod["containers"]))


def _shared(groups: Iterable[Json]) -> Json:
    first, *following = groups
    return {
        key: value
        for key, value in first.items()
        if all(key in group and same(group[key], value) for group in following)
    }


def _templates(manifest: Json, group: str) -> list[Json]:
    roles = job_of(manifest).replicas
    return [Object(role.template).part("metadata", group) for role in roles]


def _annotations(manifest: Json) -> Json:
    shared = _shared(_templates(manifest, "annotations"))
    # "false" is what k8sjob renders anyway; for its absence a spec says null.
    if shared.get(ISTIO) == "false":
        del shared[ISTIO]
        return shared
    return {**shared, ISTIO: shared.get(ISTIO)}


def _topology(annotations: Json, name: str) -> Json | None:
    """The `kueue_topology` of a job, whose annotations are taken out; None if they say more."""
    keys = {how: TOPOLOGY.format(how) for how in ("required", "preferred")}
    levels = {how: annotations[key] for how, key in keys.items() if key in annotations}
    if len(levels) != 1 or annotations.get(PODSET_GROUP, name) != name:
        return None
    for key in (PODSET_GROUP, *keys.values()):
        annotations.pop(key, None)
    return levels


def _image(lead: Json) -> Any:
    container = trainer(lead)
    reference = container["image"]
    secrets = [secret.get("name") for secret in mappings(lead.get("imagePullSecrets"))]
    default = default_pull_policy(reference)
    policy = container.get("imagePullPolicy")
    if not secrets and policy in (default, None):
        return reference
    return {
        "repository": reference,
        "pull_secrets": secrets,
        "pull_policy": None if policy == default else policy,
    }


# --- run ----------------------------------------------------------------------------------------


def _run(all_pods: list[Json], lead: Json) -> Json:
    container = trainer(lead)
    command = [_plain(word) for word in container.get("command", [])]
    args = [_plain(word) for word in container.get("args", [])]
    is_agent = after_agent(command) == []
    run: Json
    if is_agent and args[:1] == ["-m"] and len(args) > 1:
        run = {"module": args[1], "args": args[2:]}
    elif is_agent and args:
        run = {"script": args[0], "args": args[1:]}
    else:
        run = {"command": command or NO_COMMAND, "args": args}
    containers = [trainer(pod) for pod in all_pods]
    return {**run, "env": _env(containers), "env_from": _env_from(containers)}


def _plain(text: Any) -> Any:
    """The text that is meant by one in which Kubernetes would replace $(NAME) and $$."""
    if isinstance(text, str):
        meant = text.replace("$$", "$")
        return meant if literal(meant) == text else text
    return text


def _env(containers: list[Json]) -> Json:
    """The variables that are plain values and the same in all replicas."""
    named: list[Json] = [
        {str(v.get("name")): v for v in mappings(c.get("env"))} for c in containers
    ]
    if any(hasattr(v.get("value"), "defined") for group in named for v in group.values()):
        return {}  # some refer to others, and only the overlay keeps all of them in their order
    return {
        name: _plain(variable.get("value", ""))
        for name, variable in _shared(named).items()
        if variable.keys() <= {"name", "value"} and name != CONFIG_ENV
    }


def _env_from(containers: list[Json]) -> list[Json]:
    first, *following = (container.get("envFrom", []) for container in containers)
    if not all(same(first, sources) for sources in following):
        return []
    env_from = []
    for source in mappings(first):
        match source:
            case {"secretRef": {"name": name, **options}, **more} if not options and not more:
                env_from.append({"secret": name})
            case {"configMapRef": {"name": name, **options}, **more} if not options and not more:
                env_from.append({"config_map": name})
            case _:
                return []
    return env_from


def _runtime_settings(manifest: Json) -> Json:
    """The settings in K8SJOB_CONFIG, if k8sjob rendered the manifest."""
    try:
        config = settings_of(manifest)
        times = ("rendezvous_timeout", "collective_timeout", "hang_timeout")
        settings = {
            "strategy": {
                "kind": config["strategy"],
                "backend": config["backend"],
                **config["options"],
            },
            "run": {
                **{name: config[name] and int(config[name]) for name in times},
                "local_rank_arg": config["local_rank_arg"],
                "metrics": config.get("metrics"),
            },
            "policy": {"max_restarts": config["max_restarts"]},
            "tracking": config.get("tracking"),
        }
        if checks := config.get("preflight"):
            # Quantities are text, and what the nodes are asked for comes from resources.
            least = {key: str(checks[key]) for key in ("min_bandwidth",) if key in checks}
            limits = {key: checks[key] for key in ("timeout", "max_slowdown")}
            settings["preflight"] = {**limits, **least}
        if config["checkpoint_dir"] is not None:
            keys = ("dir", "every", "keep", "format")
            settings["checkpoint"] = {key: config[f"checkpoint_{key}"] for key in keys}
    # Somebody may have edited the variable: then it is no setting of this version.
    except (ValueError, KeyError, TypeError, OverflowError):
        return {}
    return settings


# --- its pods ------------------------------------------------------------------------------------


_POD_FIELDS: Final = {
    "service_account": "serviceAccountName",
    "tolerations": "tolerations",
    "affinity": "affinity",
    "topology_spread": "topologySpreadConstraints",
    "runtime_class": "runtimeClassName",
    "host_network": "hostNetwork",
    "priority_class": "priorityClassName",
}


def _scheduling(all_pods: list[Json], lead: Json) -> Json:
    shared = {
        ours: lead[theirs]
        for ours, theirs in _POD_FIELDS.items()
        if theirs in lead and all(same(pod.get(theirs), lead[theirs]) for pod in all_pods)
    }
    return {**shared, "node_selector": _shared([pod.get("nodeSelector", {}) for pod in all_pods])}


def _gang(gang: Json | None, all_pods: list[Json]) -> Json | None:
    schedulers = {pod.get("schedulerName") for pod in all_pods}
    return gang and {**gang, "scheduler": schedulers.pop() if len(schedulers) == 1 else None}


def _volumes(all_pods: list[Json], lead: Json) -> list[Json]:
    """The volumes that all replicas mount in the same way, each from one simple source."""
    volumes, shm = [], _shm_volume(lead)
    mounted = [mappings(trainer(pod).get("volumeMounts")) for pod in all_pods]
    for volume in mappings(lead.get("volumes")):
        mounts = [[m for m in group if m.get("name") == volume.get("name")] for group in mounted]
        source = _source(volume)
        alike = all(volume in mappings(pod.get("volumes")) for pod in all_pods)
        if volume is shm or source is None or not alike or not mounts[0]:
            continue
        first = mounts[0][0]
        if all(first in group for group in mounts) and first.keys() <= _MOUNT.keys():
            mount = {_MOUNT[key]: value for key, value in first.items()}
            volumes.append({**mount, **source})
    return volumes


_MOUNT: Final = {
    "name": "name",
    "mountPath": "mount",
    "subPath": "sub_path",
    "readOnly": "read_only",
}
_SOURCES: Final = {
    ("persistentVolumeClaim", "claimName"): "pvc",
    ("hostPath", "path"): "host_path",
    ("configMap", "name"): "config_map",
    ("secret", "secretName"): "secret",
}


def _source(volume: Json) -> Json | None:
    kind, source = next(((k, v) for k, v in volume.items() if k != "name"), ("", None))
    if not isinstance(source, dict):
        return None
    if kind == "emptyDir":
        empty_dir = {"medium": source.get("medium"), "size_limit": source.get("sizeLimit")}
        return {"empty_dir": _without_none(empty_dir)}
    for (theirs, key), ours in _SOURCES.items():
        # One with other options, such as items or defaultMode, is left to the overlay.
        if kind == theirs and source.keys() == {key}:
            return {ours: source[key]}
    return None


_GPU: Final = "nvidia.com/gpu"


def _resources(pod: Json) -> Json:
    resources = trainer(pod).get("resources", {})
    limits, asked = resources.get("limits", {}), resources.get("requests", {})
    gpu = next((name for name in limits if counts_gpus(name)), _GPU)
    spec: Json = {key: limits[key] for key in ("cpu", "memory") if key in limits}
    if gpu in limits:
        whole = re.fullmatch(r"[0-9]{1,9}(\.0{0,9})?", limits[gpu])
        spec["gpus"] = int(float(limits[gpu])) if whole else limits[gpu]
        spec["gpu_resource"] = gpu
    spec["extended"] = {k: v for k, v in limits.items() if "/" in k and k != gpu}
    less = {k: asked[k] for k in ("cpu", "memory") if k in asked and asked[k] != limits.get(k)}
    if less:
        spec["requests"] = less
    shm = _shm_volume(pod)
    # A volume in memory without a limit is the default, shm: null; no volume is shm: 0.
    if shm is None or "sizeLimit" in shm["emptyDir"]:
        spec["shm"] = Object(shm).part("emptyDir")["sizeLimit"] if shm else "0"
    return spec


def _shm_volume(pod: Json) -> Json | None:
    """The volume in memory that is mounted at /dev/shm in the container that trains."""
    mounts = {m.get("mountPath"): m.get("name") for m in mappings(trainer(pod).get("volumeMounts"))}
    for volume in mappings(pod.get("volumes")):
        in_memory = Object(volume).part("emptyDir").get("medium") == "Memory"
        if in_memory and volume.get("name") == mounts.get(_DEV_SHM, ""):
            return volume
    return None
