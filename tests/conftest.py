"""Deadlines and order of the tests, and the CRDs of jobs, of which this project has no copy."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import resource
import shutil
import subprocess
import uuid
from pathlib import Path

import hypothesis
import pytest
import yaml
from gomodules import CRDS, source

# Tests compare numbers, devices and backends with those of the CPU, also where there is a GPU.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

ROOT = Path(__file__).resolve().parents[1]
# The apiserver itself checks the metadata of an object, so its CRD says nothing about it.
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
METADATA = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string"},
        "namespace": {"type": "string"},
        "labels": TEXTS,
        "annotations": TEXTS,
    },
}
RANGES = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}


def pytest_addoption(parser):
    parser.addoption(
        "--regenerate", action="store_true", help="write the goldens anew instead of comparing them"
    )


CHAOS, CLUSTER, OWN_BED = "chaos", "tests/cluster/", "own-bed"
# What takes minutes more than any other file of a cluster.
LONGEST = ("tests/cluster/test_training.py", "tests/cluster/test_why.py")
CONTROLLERS = {"controllers", "jobset", "trainer", "kueue"}
# Long files of which each test stands alone: several processes of pytest share them.
DIVIDED = (
    "tests/cluster/test_targets.py",
    "tests/runtime/test_agent_dist.py",
    "tests/dist/test_elastic.py",
    "tests/docs/test_documentation.py",
)
# How many examples a property has in `make test`, and in `make test-dist`, for each 100 of its own.
# Those two try the same examples each time; `search` tries others, to find what is not known yet.
LOADED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("quick", max_examples=20, derandomize=True, **LOADED)
hypothesis.settings.register_profile("full", max_examples=50, derandomize=True, **LOADED)
hypothesis.settings.register_profile("search", max_examples=400, print_blob=True, **LOADED)
hypothesis.settings.load_profile("quick")
DEADLINES = {"dist": 900, "slow": 600, "property": 600}
DEADLINES |= {"system": 900, "cluster": 1200, "chaos": 1200}
"""Seconds that a test with this mark may take, its fixtures included."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items):
    """Set marks, deadlines, and the order in which several processes of pytest take files."""
    for item in items:
        if item.nodeid.startswith(CLUSTER):
            item.add_marker("chaos" if OWN_BED in item.nodeid else "cluster")
        if hypothesis.is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker("property")
        seconds = [DEADLINES[mark.name] for mark in item.iter_markers() if mark.name in DEADLINES]
        if seconds and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(max(seconds)))
    yield  # here pytest leaves out what -m does not name
    scopes = {}
    for item in items:
        scopes.setdefault(_scope(item.nodeid), []).append(item)
    chaos = scopes.pop(CHAOS, [])
    cluster = [scopes.pop(scope) for scope in list(scopes) if scope.startswith(CLUSTER)]
    chaos.sort(key=lambda item: _late([item]))
    cluster.sort(key=lambda scope: (_late(scope), not scope[0].nodeid.startswith(LONGEST)))
    others = sorted(scopes.values(), key=_limit, reverse=True)
    items[:] = [*chaos, *_mixed(cluster, others)]


def _limit(scope):
    """Seconds that one of the tests may take: what takes long begins first, what is fast ends."""
    marks = {mark.name for item in scope for mark in item.iter_markers()}
    return max((DEADLINES[name] for name in marks & DEADLINES.keys()), default=0)


def _late(items):
    """Whether some of these tests need what may still be built while the others run."""
    return any(CONTROLLERS & set(item.fixturenames) for item in items)


def _mixed(cluster, others):
    """The cluster's files, which mostly wait, in turn with as many others: one list of items."""
    turns = itertools.zip_longest(cluster, others, fillvalue=())
    return [item for turn in turns for scope in turn for item in scope]


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config, log):
    """Among several processes a file is not divided, nor are the tests that stop components.

    xdist has marks for that, which pytest 9.2 does not show it any more.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            scope = _scope(nodeid)
            return nodeid if scope.startswith(DIVIDED) else scope

    return Scheduler(config, log)


def _scope(nodeid):
    """What one process of pytest runs from its beginning to its end."""
    own_bed = nodeid.startswith(CLUSTER) and OWN_BED in nodeid
    return CHAOS if own_bed else nodeid.partition("::")[0]


@pytest.fixture(autouse=True)
def _state(tmp_path_factory, monkeypatch):
    """The state folder of nobody, whoever runs the tests; it is made when something is written."""
    monkeypatch.setenv("K8SJOB_STATE", str(tmp_path_factory.getbasetemp() / uuid.uuid4().hex))


@contextlib.contextmanager
def no_file_over(size):
    """What a full disk does: no file can grow over so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def full_disk():
    """`with full_disk(size):` no file can grow over so many bytes."""
    return no_file_over


@pytest.fixture(scope="session")
def crd():
    """`crd(kind)`: the CRD of a kind, as the module of its controller has it."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    @functools.cache
    def load(kind):
        module, file = CRDS[kind]
        path = ROOT.parent / "shared/data" / Path(file).name
        if not path.is_file():
            if (home := source(module)) is None:
                pytest.skip(f"the source of {module} is not here; install go (1.23)")
            path = home / file
        return yaml.load(path.read_text(), Loader=loader)

    return load


@pytest.fixture(scope="session")
def crd_problems(crd):
    """What an apiserver with fieldValidation=Strict says to a job: a list of messages."""
    import jsonschema

    @functools.cache
    def known(kind):
        if kind == "Job":  # no CRD has it but as a part of a JobSet
            spec = known("JobSet")["properties"]["spec"]["properties"]
            template = spec["replicatedJobs"]["items"]["properties"]["template"]["properties"]
            texts = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}}
            return {"type": "object", "properties": {**template, **texts}}
        return crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]

    @functools.cache
    def validator(kind):
        schema = known(kind)
        properties = {**schema["properties"], "metadata": METADATA}
        return jsonschema.Draft202012Validator(_strict({**schema, "properties": properties}))

    def problems(manifest):
        kind = manifest["kind"]
        errors = validator(kind).iter_errors(manifest)
        found = [f"{error.json_path}: {error.message}" for error in errors]
        return found or list(_duplicates(known(kind), manifest, "$"))

    return problems


def _strict(schema):
    """A structural schema as JSON Schema in which unknown fields are errors."""
    strict = {key: value for key, value in schema.items() if key != "description"}
    if "properties" in schema:
        strict["properties"] = {k: _strict(v) for k, v in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            strict["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        strict["additionalProperties"] = _strict(schema["additionalProperties"])
    if "items" in schema:
        strict["items"] = _strict(schema["items"])
    if schema.get("x-kubernetes-list-type") == "set":
        strict["uniqueItems"] = True
    if schema.get("format") in RANGES:
        strict["minimum"], strict["maximum"] = RANGES[schema["format"]]
    return strict


def _duplicates(schema, value, at):
    """Items of a list that are the same by x-kubernetes-list-map-keys."""
    if isinstance(value, dict):
        for key, part in value.items():
            known = schema.get("properties", {}).get(key) or schema.get("additionalProperties")
            if isinstance(known, dict):
                yield from _duplicates(known, part, f"{at}.{key}")
    if not isinstance(value, list):
        return
    keys = schema.get("x-kubernetes-list-map-keys")
    fields = schema["items"].get("properties", {})
    seen = set()
    for index, item in enumerate(value):
        yield from _duplicates(schema["items"], item, f"{at}[{index}]")
        if keys:
            identity = tuple(item.get(key, fields[key].get("default")) for key in keys)
            if identity in seen:
                yield f"{at}[{index}]: {dict(zip(keys, identity, strict=True))} is there twice"
            seen.add(identity)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """A certificate for this machine, signed by itself, and its key, in one file."""
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    argv = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -noenc -days 2"
    argv += f" -subj /CN=test -addext subjectAltName=IP:127.0.0.1 -keyout {path} -out {path}.crt"
    subprocess.run(argv.split(), check=True, capture_output=True)
    with path.open("a") as both:
        both.write(path.with_suffix(".pem.crt").read_text())
    return path
