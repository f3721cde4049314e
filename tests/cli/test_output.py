import ast
from pathlib import Path

import pytest

import k8sjob.cli
from k8sjob.cli.failure import reported
from k8sjob.cli.output import line, table
from k8sjob.errors import BackendError

HOSTILE = "\x1b]52;c;Y3VybA==\x07\x9b2J\u202eok\r\n\x1b[31m"
CLI = Path(k8sjob.cli.__file__).parent


def test_a_table_is_harmless_from_its_header_on(capsys):
    table([HOSTILE, "B"], [[HOSTILE, HOSTILE], ["a", "b"]])
    assert capsys.readouterr().out == "ok   B\nok   ok\na    b\n"


def test_a_line_is_harmless(capsys):
    line(f"job {HOSTILE}")
    assert capsys.readouterr().out == "job ok\n"


def test_a_traceback_is_harmless(capsys):
    with pytest.raises(SystemExit), reported({"traceback"}):
        raise BackendError(HOSTILE)
    shown = capsys.readouterr().err
    assert "BackendError" in shown
    assert not {"\x1b", "\x9b", "\x07", "\u202e", "\r"} & set(shown)


def test_commands_print_by_what_makes_text_harmless():
    """`click.echo` of anything but a literal belongs in output.py and failure.py."""
    found = [
        f"{file.name}:{node.lineno}"
        for file in sorted(CLI.glob("*.py"))
        if file.name not in {"output.py", "failure.py"}
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {"click.echo", "click.secho", "print"}
        and not all(isinstance(argument, ast.Constant) for argument in node.args)
    ]
    names = {name.partition(":")[0] for name in found}
    # A progress line that overwrites itself, YAML in ASCII, k8sjob's own script and versions, and
    # a diff whose lines are coloured after they were made harmless.
    assert names <= {"build.py", "doctor.py", "version.py", "diff.py"}
    assert len(found) <= 5
