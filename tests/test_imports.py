"""What a static look at imports cannot see: which modules are really loaded."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

import k8sjob
from k8sjob import runtime
from k8sjob.cli.program import COMMANDS
from k8sjob.runtime import strategies
from k8sjob.strategies import STRATEGIES

ROOT = Path(k8sjob.__file__).parent
BY_NAME = {
    "k8sjob": set(k8sjob._HOME.values()),  # nothing is loaded before it is used
    "k8sjob.runtime": {f"k8sjob.runtime.{home}" for home in runtime._HOME.values()},  # the same
    "k8sjob.cli.program": {  # help is fast
        f"k8sjob.cli.{command.module}" for command in COMMANDS.values()
    },
    "k8sjob.runtime.strategies": {  # a strategy needs nothing of the others
        f"k8sjob.runtime.{strategies._HOME.get(kind, (f'strategies.{kind}',))[0]}"
        for kind in STRATEGIES
    },
    "k8sjob.runtime.agent.fork_server": set(),  # what a script imports
    "k8sjob.backends.record_storage": set(),  # optional: s3fs, gcsfs, adlfs
    "k8sjob.runtime.sessions": set(),  # optional: triton before TensorFlow
    "k8sjob.runtime.tracking": set(),  # optional: mlflow, wandb, trackio, tensorboard
}
"""The modules that import others by a text, and which of k8sjob's own these are."""
CLIENT_ONLY = {"pydantic", "jinja2", "yaml", "click", "rich", "kubernetes"}


def loaded(statement: str) -> set[str]:
    """The top-level modules, and k8sjob's own, that a fresh interpreter has after a statement."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    names = json.loads(out.splitlines()[-1])
    return {name if name.startswith("k8sjob.") else name.partition(".")[0] for name in names}


def test_importing_the_package_loads_nothing():
    before = loaded("from __future__ import annotations\nimport typing")
    assert loaded("import k8sjob") - before == {"k8sjob"}


def test_the_agents_side_of_the_runtime_is_stdlib_only():
    names = loaded("import k8sjob.runtime.__main__, k8sjob.runtime.agent.rank_main")
    assert not names & (CLIENT_ONLY | {"torch", "numpy"})


def test_the_session_needs_only_torch():
    names = loaded("import k8sjob.runtime.sessions, k8sjob.runtime.strategies.ddp")
    assert "torch" in names
    # torch itself may load jinja2 or yaml; what it loads by itself is not ours
    assert not (names & CLIENT_ONLY) - loaded("import torch, torch.distributed, torch.utils.data")


def test_the_client_never_loads_torch_or_kubernetes():
    modules = "adopt backends.local checks.lint image.push jobs.run observe.watch python_api"
    modules += " rendering.manifest spec view kube.client.python_client kube.client.kubectl"
    names = loaded("\n".join(f"import k8sjob.{module}" for module in modules.split()))
    assert not names & {"torch", "kubernetes", "IPython"}


def test_the_command_line_starts_light():
    names = loaded("import k8sjob.cli")
    assert not names & {"pydantic", "rich", "jinja2", "yaml", "torch", "kubernetes", "urllib3"}


def test_jobs_are_observed_without_what_reads_a_job_file():
    names = loaded("from k8sjob.cli import archive, delete, list, logs, status, watch, why")
    assert not names & {"pydantic", "jinja2", "kubernetes", "starlette", "uvicorn"}
    names = loaded("import k8sjob.cli.list, k8sjob.backends.cluster.backend")
    assert not names & {"difflib", "logging", "shutil", "tomllib"}  # mistakes, warnings, kubectl
    names = loaded("import k8sjob.cli.status, k8sjob.backends.cluster.backend")
    assert not names & {"k8sjob.backends.local", "k8sjob.backends.record", "k8sjob.targets.readers"}


def test_a_push_that_remembers_its_job_reads_none():
    assert not loaded("import k8sjob.cli.push") & {"pydantic", "yaml", "jinja2", "tomllib"}


@pytest.mark.parametrize(
    ("command", "needless"),
    [
        ("validate", {"email", "tomllib"}),  # of importlib.metadata; the types of manifests' fields
        ("render", {"email", "tomllib"}),
        ("run", {"rich"}),  # the ranks start before what shows them is loaded
    ],
)
def test_a_job_is_checked_and_started_without_what_comes_later(command, needless):
    start = f"from k8sjob.cli.program import program\nprogram.get_command(None, {command!r})"
    assert not loaded(start) & needless


def test_the_supervisor_of_local_jobs_starts_light():
    names = loaded("import k8sjob.backends.local.supervisor")
    assert not names & (CLIENT_ONLY | {"torch"})


def test_what_is_exported_is_there():
    code = "import k8sjob\nfor name in k8sjob.__all__: getattr(k8sjob, name)\nk8sjob.nothing"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stderr.rstrip().endswith("module 'k8sjob' has no attribute 'nothing'")


def imports_by_name(code):
    """The calls in a module that import another one by a text."""
    called = (ast.unparse(n.func) for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Call))
    importing = {"import_module", "__import__", "exec_module", "run_module"}
    return [name for name in called if name.rpartition(".")[2] in importing]


def test_modules_import_each_other_by_name_only_where_there_is_a_reason():
    importing = {
        ".".join(("k8sjob", *path.relative_to(ROOT).with_suffix("").parts))
        for path in ROOT.rglob("*.py")
        if imports_by_name(path.read_text())
    }
    assert {module.removesuffix(".__init__") for module in importing} == BY_NAME.keys()


def test_no_modules_import_each_other_in_a_circle():
    """Imports for types alone, inside functions and by name count."""
    graph = grimp.build_graph("k8sjob", include_external_packages=False)
    left = {
        module: graph.find_modules_directly_imported_by(module) | BY_NAME.get(module, set())
        for module in graph.modules
    }
    while free := {module for module, imported in left.items() if not imported & left.keys()}:
        left = {module: imported for module, imported in left.items() if module not in free}
    assert not left
