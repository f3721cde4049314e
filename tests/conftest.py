"""Deadlines and order of the tests, and the operator's CRD, of which this project has no copy."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path

import hypothesis
import pytest
import yaml

OPERATOR = "github.com/kubeflow/training-operator"
OPERATOR_VERSION = "v1.9.4"
CRD = "kubeflow.org_pytorchjobs.yaml"
ROOT = Path(__file__).resolve().parents[1]
RANGES = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}


def pytest_addoption(parser):
    parser.addoption(
        "--regenerate", action="store_true", help="write the goldens anew instead of comparing them"
    )


CHAOS, CLUSTER, OWN_BED = "chaos", "tests/cluster/", "own-bed"
CONTROLLERS = {"jobset", "trainer", "kueue"}
# How many examples a property has in `make test`, and in `make test-dist`, for each 100 of its own.
LOADED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("quick", max_examples=20, **LOADED)
hypothesis.settings.register_profile("full", max_examples=100, **LOADED)
hypothesis.settings.load_profile("quick")
DEADLINES = {"dist": 900, "slow": 600, "system": 900, "cluster": 1200, "chaos": 1200}
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
    cluster.sort(key=_late)
    items[:] = [*chaos, *_mixed(cluster, list(scopes.values()))]


def _late(items):
    """Whether some of these tests need what may still be built while the others run."""
    return any(CONTROLLERS & set(item.fixturenames) for item in items)


def _mixed(cluster, others):
    """The cluster's files, which mostly wait, in turn with as many others: one list of items."""
    turns = itertools.zip_longest(cluster, others, fillvalue=())
    return [item for turn in turns for scope in turn for item in scope]


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config, log):
    """Among several processes a file is never divided, nor are the tests that stop components.

    xdist has marks for that, which pytest 9.2 does not show it any more.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return _scope(nodeid)

    return Scheduler(config, log)


def _scope(nodeid):
    """What one process of pytest runs from its beginning to its end."""
    own_bed = nodeid.startswith(CLUSTER) and OWN_BED in nodeid
    return CHAOS if own_bed else nodeid.partition("::")[0]


@pytest.fixture(scope="session")
def operator_source(tmp_path_factory):
    """The operator's source, from Go's module cache, downloaded by its name where it must be."""
    if (home := _cached(tmp_path_factory.mktemp("go"))) is None:
        pytest.skip(f"the source of {OPERATOR} {OPERATOR_VERSION} is not here; install go (1.23)")
    return home


@pytest.fixture(scope="session")
def crd(request):
    """The PyTorchJob CRD of the operator."""
    shared = ROOT.parent / "shared/data" / CRD
    path = shared
    if not shared.is_file():
        path = request.getfixturevalue("operator_source") / "manifests/base/crds" / CRD
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_text(), Loader=loader)


@pytest.fixture(scope="session")
def crd_problems(crd):
    """What an apiserver with fieldValidation=Strict says to a PyTorchJob: a list of messages."""
    import jsonschema

    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    # The apiserver itself checks the metadata of the object, so the CRD says nothing about it.
    texts = {"type": "object", "additionalProperties": {"type": "string"}}
    metadata = {
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"type": "string"},
            "namespace": {"type": "string"},
            "labels": texts,
            "annotations": texts,
        },
    }
    schema = {**schema, "properties": {**schema["properties"], "metadata": metadata}}
    validator = jsonschema.Draft202012Validator(_strict(schema))

    def problems(manifest):
        found = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]
        return found or list(_duplicates(schema, manifest, "$"))

    return problems


def _cached(folder):
    caches = [os.environ.get("GOMODCACHE"), str(Path.home() / "go/pkg/mod")]
    for cache in filter(None, caches):
        home = Path(cache) / f"{OPERATOR}@{OPERATOR_VERSION}"
        if home.is_dir():
            return home
    if shutil.which("go") is None:
        return None
    subprocess.run(["go", "mod", "init", "example.org/fetch"], cwd=folder, check=True)
    fetched = subprocess.run(
        ["go", "mod", "download", "-json", f"{OPERATOR}@{OPERATOR_VERSION}"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return Path(json.loads(fetched.stdout)["Dir"]) if fetched.returncode == 0 else None


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
