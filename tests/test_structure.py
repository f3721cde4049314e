"""What stays in its room: names of a kind of job, the layout of objects, the environment."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

import k8sjob

ROOT = Path(k8sjob.__file__).parent
KIND = re.compile(
    r"pytorchjob|trainjob|jobset|kubeflow|training operator|targets\.indexed|replicaSpecs"
    r"|replicatedJobs|runPolicy|elasticPolicy|nprocPerNode|cleanPodPolicy|backoffLimit",
    re.IGNORECASE,
)
"""Names of a kind, of its module, of its fields."""
KINDS_ALLOWED = {
    "adopt/equivalence.py": "which fields may be empty, of all kinds at once",
    "runtime/base/config.py": "the variables of Kubeflow Trainer's status server",
    "kube/objects.py": "how the labels of controllers begin, which a spec may not have",
    "spec/job.py": "the field `target` of job.yaml, and an example of an overlay",
    "spec/values.py": "the values of `target`",
}
PARTS = {"metadata", "status"}
OWN = ("adopt", "backends", "checks", "cli", "jobs", "observe", "rendering", "ui", "view")
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
"""What os has for the environment's variables."""


def modules(*packages):
    return [path for package in packages for path in sorted(ROOT.glob(f"{package}/**/*.py"))]


def named(path):
    """The texts and names in a module that are not documentation."""
    tree = ast.parse(path.read_text())
    documentation = {
        id(one.value)
        for node in ast.walk(tree)
        for one in (getattr(node, "body", None) or () if not isinstance(node, ast.expr) else ())
        if isinstance(one, ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in documentation:
            yield str(node.value)
        elif isinstance(node, ast.ImportFrom):
            yield f"{node.module} {' '.join(one.name for one in node.names)}"
        elif isinstance(node, ast.Name | ast.Attribute):
            yield node.id if isinstance(node, ast.Name) else node.attr


def test_nothing_outside_targets_names_a_kind_of_job():
    outside = (path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] != "targets")
    found = {str(path.relative_to(ROOT)) for path in outside if any(map(KIND.search, named(path)))}
    assert found == KINDS_ALLOWED.keys()


def looked_up(node):
    """The holder and the key of `holder["key"]`, `holder.get("key")` or `(... or {})`."""
    match node:
        case ast.BoolOp(op=ast.Or(), values=[first, *_]):
            return looked_up(first)
        case ast.Subscript(value=holder, slice=ast.Constant(value=str(key)), ctx=ast.Load()):
            return holder, key
        case ast.Call(
            func=ast.Attribute(value=holder, attr="get"), args=[ast.Constant(value=str(key)), *_]
        ):
            return holder, key
    return None


def walks(path):
    """The lines that look into a part of an object, or two steps deep, without a view."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.BoolOp) and (found := looked_up(node)):
            holder, key = found
            if key in PARTS or looked_up(holder):
                yield f"{path.relative_to(ROOT)}:{node.lineno}"


@pytest.mark.parametrize("package", OWN)
def test_objects_are_read_through_views(package):
    found = [walk for path in modules(package) for walk in walks(path)]
    assert found == []


def test_cards_are_drawn_only_by_the_views():
    drawing = {
        path.relative_to(ROOT).parts[0]
        for path in ROOT.rglob("*.py")
        for text in named(path)
        if text.startswith("k8sjob.html_card ") and text != "k8sjob.html_card HasCard"
    }
    assert drawing == {"view", "cli", "python_api.py"}


def test_a_basename_is_unique_within_a_package():
    places = [path.relative_to(ROOT) for path in ROOT.rglob("*.py")]
    count = Counter((place.parts[0], place.name) for place in places if place.parts[1:])
    twice = {"/".join(name) for name, times in count.items() if times > 1 and name[1][0] != "_"}
    assert twice == {
        "backends/backend.py",  # of a cluster and of this machine: one Protocol
        "runtime/mesh.py",  # of the strategies `mesh` and `keras_mesh`
        # The four parts of each kind of job:
        *("targets/adopt.py", "targets/job.py", "targets/pods.py", "targets/target.py"),
    }


def uses_environment(path):
    """Whether a module reads or writes the process's environment by itself."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(value=ast.Name("os" | "posix"), attr=attr) if attr in ENVIRONMENT:
                return True
            case ast.ImportFrom(module="os" | "posix", names=names):
                if ENVIRONMENT & {one.name for one in names}:
                    return True
    return False


def test_the_environment_is_read_in_one_place_of_the_client_and_one_of_the_runtime():
    using = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if uses_environment(path)}
    assert using == {"environment.py", "runtime/base/config.py", "runtime/base/env.py"}
