"""Hypothesis strategies that the property tests share: hostile text, JSON, and whole specs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import settings
from hypothesis import strategies as st

from k8sjob.spec import JobSpec

if TYPE_CHECKING:
    from k8sjob.targets.api import Target

HOSTILE = (
    "", " ", " x ", "on", "No", "y", "null", "~", "true", "1e3", "0x1F", "0o7", "010", "1_000",
    "12:30", ".inf", ".nan", "-", "- x", "?", ": ", "a: b", "a #b", "#", "&a", "*a", "!x", "|", ">",
    "%", "@", "`", "{}", "[]", "{{ x }}", "{% x %}", "'", '"', "\\", "\n", "a\nb", "\r\n", "\t",
    "\x7f", "\x85", "\xa0", "\u2028", "\ufeff", "\U0001f600", "$(X)", "$X", "${X}", "$$", "---",
    "...", "2020-01-01", "<<", "=", "ENTRYPOINT x", "`id`", "a" * 2000,
)  # fmt: skip
"""Texts that YAML, jinja2, a shell, a Dockerfile or Kubernetes might take for something else."""


def examples(count: int) -> settings:
    """The settings of a property with so many examples, of which the profile takes its part."""
    return settings(max_examples=max(1, count * settings().max_examples // 100))


def texts(max_size: int = 40) -> st.SearchStrategy[str]:
    """Any text that an environment or an argument can carry: no NUL, no half surrogate pairs."""
    characters = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
    return st.sampled_from(HOSTILE) | st.text(characters, max_size=max_size)


def json_values(max_leaves: int = 12) -> st.SearchStrategy[Any]:
    """Any JSON value."""
    integers = st.integers(min_value=-(2**63), max_value=2**64)
    floats = st.floats(allow_nan=False, allow_infinity=False)
    scalars = st.none() | st.booleans() | integers | floats | texts()
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts(), inner, max_size=4),
        max_leaves=max_leaves,
    )


def _matching(pattern: str) -> st.SearchStrategy[str]:
    return st.from_regex(pattern, fullmatch=True)


NAMES = _matching(r"[a-z]([-a-z0-9]{0,15}[a-z0-9])?")
OBJECTS = st.sampled_from(["a", "x-1", "registry-login", "a.b-c.d", "0"])
KEYS = _matching(r"([a-z]{1,6}\.[a-z]{2,4}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,10}[A-Za-z0-9])?")
LABEL_VALUES = _matching(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,20}[A-Za-z0-9])?)?")
ENV_NAMES = _matching(r"X[A-Za-z0-9_]{0,10}")
PATHS = _matching(r"(/[A-Za-z0-9_. -]{0,6}[A-Za-z0-9_]){1,3}")
IMAGES = _matching(r"([a-z]{1,5}(:[0-9]{2,4})?/)?[a-z0-9]{1,8}(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,8})?")
MEMORY = st.sampled_from(["1M", "64Mi", "1Gi", "1.5Gi", "100G", "3e9", 2**30])
CPU = st.sampled_from(["1m", "500m", 4, 0.5, "1.5", "96", "2k"])
SECONDS = st.integers(min_value=2, max_value=10**6)


def _some(required: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(required, optional=optional)


def _images() -> st.SearchStrategy[Any]:
    secrets = {"pull_secrets": st.lists(OBJECTS, max_size=2)}
    policy = {"pull_policy": st.sampled_from(["Always", "IfNotPresent", "Never", None])}
    there = _some({"repository": IMAGES}, {**secrets, **policy})
    built = _some(
        {"repository": _matching(r"([a-z]{1,5}/)?[a-z0-9]{1,8}"), "base": IMAGES},
        {
            **secrets,
            **policy,
            "context": st.sampled_from([".", "src", "a b"]),
            "requirements": st.sampled_from([None, "requirements.txt", "sub dir/r.txt"]),
            "apt": st.lists(_matching(r"[a-z0-9][a-z0-9+.-]{1,8}(=[0-9.]{1,4}[0-9])?"), max_size=3),
            "pip": st.lists(
                _matching(r"[A-Za-z][A-Za-z0-9]{0,6}(\[[a-z]{1,4}\])?([=<>~!]=[0-9.]{1,4}[0-9])?"),
                max_size=3,
            ),
            "platform": st.sampled_from([None, "linux/amd64", "linux/arm64/v8"]),
            "index_url": st.sampled_from([None, "https://packages.internal/simple"]),
        },
    )
    return IMAGES | there | built


def _runs() -> st.SearchStrategy[dict[str, Any]]:
    common = {
        "args": st.lists(texts(), max_size=4),
        "env": st.dictionaries(ENV_NAMES, texts() | st.integers() | st.floats(-9, 9), max_size=4),
        "env_from": st.lists(
            st.fixed_dictionaries({"secret": OBJECTS})
            | st.fixed_dictionaries({"config_map": OBJECTS}),
            max_size=2,
        ),
        "rendezvous_timeout": SECONDS,
        "collective_timeout": SECONDS,
        "hang_timeout": st.just("0s") | SECONDS,
    }
    agent = {**common, "local_rank_arg": st.sampled_from([None, "--local_rank", "--local-rank"])}
    scripts = _some(
        {"script": st.sampled_from(["main.py", "sub dir/train.py", "$x.py", "é.py"])}, agent
    )
    modules = _some({"module": _matching(r"[a-z_]{1,6}(\.[a-z_]{1,6}x)?").filter(_module)}, agent)
    first = texts().filter(bool)
    commands = st.builds(lambda head, rest: [head, *rest], first, st.lists(texts(), max_size=3))
    return scripts | modules | _some({"command": commands}, common)


def _module(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _resources() -> st.SearchStrategy[dict[str, Any]]:
    extended = st.dictionaries(
        _matching(r"[a-z]{1,5}\.[a-z]{2}/[a-z]{1,5}"), st.integers(1, 99), max_size=2
    )
    big = st.sampled_from(["512Gi", "1Ti"])
    master = _some({}, {"cpu": CPU, "memory": big, "extended": extended})
    return _some(
        {},
        {
            "gpu_resource": st.sampled_from(
                ["nvidia.com/gpu", "amd.com/gpu", "nvidia.com/mig-1g.5gb"]
            ),
            "cpu": CPU,
            "memory": big,
            "shm": MEMORY | st.just(0),
            "extended": extended,
            "requests": _some({}, {"cpu": st.just("1m"), "memory": st.just("1Mi")}),
            "master": st.none() | master,
        },
    )


def _volumes() -> st.SearchStrategy[list[dict[str, Any]]]:
    source = st.one_of(
        st.fixed_dictionaries({"pvc": OBJECTS}),
        st.fixed_dictionaries({"host_path": PATHS}),
        st.fixed_dictionaries({"config_map": OBJECTS}),
        st.fixed_dictionaries({"secret": OBJECTS}),
        st.fixed_dictionaries(
            {"empty_dir": st.just({}) | st.fixed_dictionaries({"size_limit": MEMORY})}
        ),
    )
    rest = _some(
        {"name": NAMES.filter(lambda name: name != "dshm"), "mount": PATHS},
        {
            "read_only": st.booleans(),
            "local": texts(20),
            "sub_path": st.sampled_from(["a", "a b/c", "$(X)"]),
        },
    )
    volume = st.builds(lambda a, b: {**a, **b}, rest, source)
    return st.lists(volume, max_size=3, unique_by=(lambda v: v["name"], lambda v: v["mount"]))


def _tracking() -> st.SearchStrategy[dict[str, Any]]:
    given = {"mlflow": {"uri": "http://mlflow.team:5000"}, "wandb": {"offline": True}}
    rest = {"trackio": {"project": "é"}, "tensorboard": {"dir": "/logs"}, "mlflow": None}
    return st.sampled_from([{}, given, rest, given | rest])


_KUEUE = _some({}, {"kueue_queue": OBJECTS}) | _some(
    {"kueue_queue": NAMES},
    {
        "kueue_priority_class": OBJECTS,
        "kueue_topology": st.sampled_from(["required", "preferred"]).flatmap(
            lambda how: st.fixed_dictionaries({how: KEYS})
        ),
    },
)


@st.composite
def job_specs(draw: st.DrawFn) -> JobSpec:
    """Any valid JobSpec, with hostile texts in every field that takes text."""
    gpus = draw(st.sampled_from([0, 0, 1, 2, 8]))
    workers = draw(st.integers(0, 20))
    replicas: dict[str, Any] = {"workers": workers}
    replicas["nproc_per_node"] = draw(st.sampled_from([None, gpus] if gpus else [None, 1, 3]))
    elastic = workers > 0 and draw(st.booleans())
    if elastic:
        low = draw(st.integers(1, workers + 1))
        replicas["elastic"] = {"min": low, "max": draw(st.integers(workers + 1, 30))}
    resources = {"gpus": gpus, **draw(_resources())}
    if gpus:
        resources["gpu_type"] = draw(st.none() | LABEL_VALUES.filter(bool))
    if elastic:
        resources.pop("master", None)
    volumes = draw(_volumes())
    host_network = draw(st.booleans())
    open_node = host_network or any("host_path" in volume for volume in volumes)
    free = st.dictionaries(KEYS, json_values(6), max_size=3)
    optional = {
        "namespace": st.none() | NAMES,
        "labels": st.dictionaries(KEYS, LABEL_VALUES, max_size=3),
        "annotations": st.dictionaries(KEYS, st.none() | texts(), max_size=3),
        "strategy": _some(
            {},
            {
                "kind": st.sampled_from(["ddp", "fsdp"]),
                "accumulate": st.integers(1, 9),
                "sync_batchnorm": st.booleans(),
                "clip_norm": st.none() | st.floats(1e-3, 1e3),
                "bf16": st.booleans(),
                "blocks": st.lists(st.sampled_from(["a.0", r"b\.\d+"]), max_size=2),
                "checkpoint_activations": st.booleans(),
                "compile": st.booleans(),
                "backend": st.just("gloo"),
            },
        ),
        "tracking": _tracking(),
        "checkpoint": st.none()
        | _some(
            {},
            {
                # Longer than any name in PATHS: a volume around it may be read-only.
                "dir": PATHS.map("/checkpoints{}".format),
                "every": st.just("epoch") | st.integers(1, 999),
                "keep": st.integers(1, 9),
            },
        ),
        "service_account": OBJECTS,
        "service_account_token": st.booleans(),
        "node_selector": st.dictionaries(KEYS, LABEL_VALUES, max_size=2),
        "tolerations": st.lists(free, max_size=2),
        "affinity": st.none() | free,
        "topology_spread": st.lists(free, max_size=2),
        "runtime_class": OBJECTS,
        "priority_class": OBJECTS,
        "gang": st.none()
        | _some(
            {},
            {"scheduler": OBJECTS, "min_available": st.integers(1, workers + 1), "queue": OBJECTS},
        ),
        "policy": _some(
            {},
            {
                "restart_policy": st.sampled_from(["OnFailure", "ExitCode", "Never", "Always"]),
                "max_restarts": st.integers(0, 1000),
                "clean_pod_policy": st.sampled_from(["Running", "All", "None"]),
                "ttl_after_finished": st.none() | SECONDS,
                "active_deadline": st.none() | SECONDS,
                "suspend": st.booleans(),
                "termination_grace": SECONDS,
            },
        ),
    }
    return JobSpec(
        name=draw(NAMES),
        image=draw(_images()),
        run=draw(_runs()),
        replicas=replicas,
        resources=resources,
        volumes=volumes,
        host_network=host_network,
        security="default" if open_node else draw(st.sampled_from(["default", "restricted"])),
        **draw(_some({}, optional)),
        **draw(_KUEUE),
    )


FREE = {"affinity": None, "tolerations": (), "topology_spread": ()}
"""What goes through as the user wrote it, so that only a cluster can judge it: left out."""


def fitted(spec: JobSpec, target: Target) -> JobSpec:
    """The spec for a target, without what that one refuses."""
    for problem in target.refusals(spec):
        name, _, part = problem.field.partition(".")
        whole = getattr(spec, name)
        default = type(whole if part else spec).model_fields[part or name].default
        change = whole.model_copy(update={part: default}) if part else default
        spec = spec.model_copy(update={name: change})
    return spec.model_copy(update={"target": target.name})
