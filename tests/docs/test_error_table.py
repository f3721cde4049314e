"""docs/reference/errors.md is run: every row is an input, the error it gives and the exit code."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from clusters import Cluster, kubeconfig
from error_tables import kinds, literal, pattern, rows

from k8sjob.cli.find_job import Place, find
from k8sjob.errors import K8sJobError
from k8sjob.rendering.dockerfile import check_script, dockerfile, write_context
from k8sjob.rendering.manifest import remarks, render
from k8sjob.spec import JobSpec, load
from k8sjob.yamldoc import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/errors.md"
ROWS = list(rows(PAGE))


def base() -> dict[str, str]:
    """The page's job.yaml, by its top-level keys: each key's lines as they stand."""
    block = re.search(r"^```yaml\n(name: .*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    entries = re.split(r"^(?=\w)", block[1], flags=re.MULTILINE)
    return {entry.partition(":")[0]: entry for entry in entries}


def fragment(given: str, folder: Path) -> str:
    """The base with the input's keys in place of its own."""
    keys = [line.partition(":")[0] for line in given.splitlines() if line[:1].isalpha()]
    kept = [entry for key, entry in base().items() if key not in keys]
    return whole("".join(kept) + given + "\n", folder)


def whole(given: str, folder: Path) -> str:
    (folder / "job.yaml").write_text(given)
    return f"valid: {load(folder / 'job.yaml')!r}"


def keywords(given: str, folder: Path) -> str:
    data = parse("".join(base().values())).data
    return f"valid: {JobSpec(**{**data, **eval(f'dict({given})')})!r}"


def rendered(given: str, folder: Path) -> str:
    fragment(given, folder)
    return render(load(folder / "job.yaml"))


def built(given: str, folder: Path) -> str:
    fragment(given, folder)
    return dockerfile(load(folder / "job.yaml"))


def staged(given: str, folder: Path) -> str:
    fragment(given, folder)
    spec = load(folder / "job.yaml")
    written = write_context(spec, folder / spec.image.context, folder / "build")
    check_script(spec, folder)
    return str(written)


def warned(given: str, folder: Path) -> str:
    fragment(given, folder)
    warning = K8sJobError("\n".join(remarks(load(folder / "job.yaml"))))
    warning.exit_code = 0
    raise warning


def named(given: str, folder: Path) -> str:
    """A command's name of an object, in a cluster that has none."""
    command, name = given.split()
    with Cluster(lambda *_: None).served() as server:
        place = Place("blue", kubeconfig=str(kubeconfig(folder, server.url)))
        return str(find(name, place, any_kind=command == "why"))


RUNNERS: dict[str, Callable[[str, Path], str]] = {
    "job.yaml": fragment,
    "job.yaml, whole": whole,
    "job.yaml, rendered": rendered,
    "job.yaml, its Dockerfile": built,
    "job.yaml, its build folder": staged,
    "job.yaml, warned of": warned,
    "JobSpec": keywords,
    "name": named,
}
"""What an input is: a function that raises the K8sJobError; else what it returns is shown."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.kind}-{row.line}")
def test_every_row_says_what_happens(row, tmp_path):
    with pytest.raises(K8sJobError) as caught:
        pytest.fail(RUNNERS[row.kind](row.given, tmp_path))
    assert re.search(pattern(row.error), str(caught.value)), f"{row.given}\n{caught.value}"
    assert caught.value.exit_code == row.exit_code
    for problem in caught.value.findings if row.kind == "job.yaml" else ():
        assert 1 <= problem.line <= (tmp_path / "job.yaml").read_text().count("\n")
        assert str(caught.value).startswith(str(tmp_path / "job.yaml"))


def test_the_base_of_the_page_is_valid(tmp_path):
    assert "valid" in whole("".join(base().values()), tmp_path)


RULES = {  # in which argument of which call a rule's message stands
    "refuse": 0,
    "matching": 1,
    "Broken": 1,
    "_Refused": 0,
    "Conflict": 1,
}


def messages() -> Iterator[pytest.param]:
    """The messages of all rules in the source, as patterns."""
    files = [file for part in ("yamldoc", "spec") for file in ROOT.glob(f"k8sjob/{part}/*.py")]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            at = RULES.get(node.func.id)
            if at is not None and isinstance(node.args[at], ast.JoinedStr | ast.Constant):
                yield pytest.param(literal(node.args[at]), id=f"{file.stem}-{node.lineno}")


@pytest.mark.parametrize("rule", list(messages()))
def test_every_rule_has_its_row(rule):
    assert any(re.search(rule, row.error) for row in ROWS), f"no row in {PAGE.name} shows: {rule}"


def test_a_table_of_unknown_kind_is_a_mistake():
    assert set(kinds(PAGE)) == {row.kind for row in ROWS} <= set(RUNNERS)
