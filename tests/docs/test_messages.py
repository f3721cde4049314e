"""What a message tells the user to write exists: fields of the job.yaml, commands, options."""

import ast
import re
from pathlib import Path

import click
import pytest

from k8sjob.cli.program import COMMANDS, program
from k8sjob.spec import JobSpec
from k8sjob.spec.base import part_types

ROOT = Path(__file__).resolve().parents[2] / "k8sjob"
PARTS = {
    name: set(part_types(info.annotation))
    for name, info in JobSpec.model_fields.items()
    if list(part_types(info.annotation))
}
FIELD = re.compile(rf"(?<![\w./\"-])({'|'.join(PARTS)})((?:\[\w*\])?\.[a-z][a-z_]*)+(?![\w(/-])")
COMMAND = re.compile(r"(?:`|: |^)k8sjob ([a-z]+)((?: (?:-{1,2}[a-z][a-z-]*))*)")
PROSE = {"job", "runs", "sets"}
"""Words after the name of the project that are no commands."""
FOREIGN = {
    "--gang-scheduler-name",
    "--help",
    "--isolation",
    "--local_rank",
    "--preserve-digests",
    "--pytorch-init-container-image",
    "--pytorch-init-container-template-file",
}
"""Options of other programs, and click's own."""
METHODS = {"run.batches", "run.evaluate", "runtime.session"}
"""What a script calls `run` is a session."""


def texts():
    """All text that is no docstring, with its place; `{}` for what is filled in."""
    for file in ROOT.rglob("*.py"):
        tree = ast.parse(file.read_text())
        prose = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and isinstance(node.body[0], ast.Expr)
        }
        inside = {
            id(part)
            for node in ast.walk(tree)
            if isinstance(node, ast.JoinedStr)
            for part in ast.walk(node)
            if part is not node
        }
        for node in ast.walk(tree):
            if id(node) in prose or id(node) in inside:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "{}" for p in node.values]
                yield f"{file.relative_to(ROOT)}:{node.lineno}", "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{file.relative_to(ROOT)}:{node.lineno}", node.value
    for table in ROOT.rglob("*.toml"):
        if table.name == "manifest_fields.toml":
            continue  # those of manifests, not of a job.yaml
        lines = enumerate(table.read_text().splitlines(), start=1)
        yield from ((f"{table.relative_to(ROOT)}:{number}", line) for number, line in lines)


@pytest.fixture(scope="module")
def messages():
    """The texts of several words; not at import, where each process of pytest would parse all."""
    return [(place, text) for place, text in texts() if " " in text]


def test_every_field_that_a_message_names_exists(messages):
    unknown = []
    for place, text in messages:
        for found in FIELD.finditer(text):
            if found[0] in METHODS:
                continue
            names = re.sub(r"\[\w*\]", "", found[0]).split(".")
            parts = PARTS[names[0]]
            for name in names[1:]:
                fields = [part.model_fields[name] for part in parts if name in part.model_fields]
                if not fields and parts:
                    unknown.append(f"{place}: {found[0]}")
                parts = {one for field in fields for one in part_types(field.annotation)}
    assert not unknown


def test_no_message_cites_a_page_by_a_path_which_an_installed_k8sjob_lacks(messages):
    assert [place for place, text in messages if "docs/how-to/" in text] == []


def test_every_command_and_option_that_a_message_names_exists(messages):
    context, unknown = click.Context(program), list[str]()
    options = {
        name: {o for p in program.get_command(context, name).params for o in p.opts}
        for name in COMMANDS
    }
    for place, text in messages:
        for found in COMMAND.finditer(text):
            names = options.get(found[1], set() if found[1] in PROSE else None)
            if names is None or not names.issuperset(found[2].split()):
                unknown.append(f"{place}: {found[0]}")
    known = FOREIGN.union({o for p in program.params for o in p.opts}, *options.values())
    rooms = ("checks/doctor/", "cli/", "image/", "jobs/", "observe/", "spec/")
    unknown += [
        f"{place}: {option} in {text!r}"
        for place, text in messages
        if place.startswith(rooms) and "kubectl" not in text
        for option in re.findall(r"(?<![\w-])--[a-z][a-z_-]+", text)
        if option not in known
    ]
    assert not unknown
