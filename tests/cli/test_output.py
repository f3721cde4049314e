import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import trainings

import k8sjob.cli
from k8sjob.backends.api import Snapshot
from k8sjob.cli.list import _row
from k8sjob.cli.output import line, reported, table
from k8sjob.errors import BackendError, JobNotFound, K8sJobError, SpecError
from k8sjob.findings import invalid
from k8sjob.observe.status import job_status
from k8sjob.targets.jobs import job_of

HOSTILE = "\x1b]52;c;Y3VybA==\x07\x9b2J\u202eok\r\n\x1b[31m"
CLI = Path(k8sjob.cli.__file__).parent


def test_tables_and_lines_are_harmless(capsys):
    table([HOSTILE, "B"], [[HOSTILE, HOSTILE], ["a", "b"]])
    line(f"job {HOSTILE}")
    assert capsys.readouterr().out == "ok   B\nok   ok\na    b\njob ok\n"


def ci_commands(done):
    """The lines on which GitHub's runner, Azure's agent or TeamCity would act."""
    lines = re.split("[\r\n]+", done.out + done.err)
    return [text for text in lines if re.search(r"^\s*::[a-z-]+.*::|##[a-z]*\[", text)]


def test_nothing_of_a_job_is_a_command_to_a_ci(k8sjob, job_file, tmp_path, monkeypatch):
    attack = ["::stop-commands::x", "  ::set-env name=PATH::/tmp", "##[add-path]/tmp"]
    attack += ["x ##vso[task.setvariable variable=a]b", "\x1b[0K::error::y", "a\r::add-mask::b"]
    text = "\n".join(attack)
    (tmp_path / "fails.py").write_text(f"print({text!r}, flush=True)\nraise ValueError({text!r})\n")
    shown = [k8sjob("run", tmp_path / "fails.py")]
    assert "stop-commands" in shown[0].out
    name = "fails"
    for words in ("logs", "why", "status", "watch", "list"):
        for output in ("", "json", "yaml"):
            options = ["-o", output] if output else []
            shown.append(k8sjob(words, *([] if words == "list" else [name]), *options))
    shown.append(k8sjob("prove", tmp_path / "fails.py"))
    monkeypatch.chdir(tmp_path)
    job_file(f"annotations: {{a: {json.dumps(text)}, {json.dumps(attack[3])}: b}}")
    shown += [k8sjob(command, "job.yaml") for command in ("validate", "lint", "render")]
    job_file(f"annotations: {{a: {json.dumps(text)}}}")
    shown += [k8sjob(command, "job.yaml") for command in ("validate", "lint", "render")]
    for odd in attack:
        bad = Path(odd.replace("/", "-"))
        bad.write_text("replicas: " + json.dumps(text))
        shown += [k8sjob("validate", bad), k8sjob("lint", bad), k8sjob("validate", f"no{bad}")]
    assert [ci_commands(done) for done in shown] == [[]] * len(shown)


def test_one_long_name_wraps_no_other_row(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    table(["NAME", "STATE"], [["x" * 38, "Running"], ["short", "Running"]])
    header, long, short = capsys.readouterr().out.splitlines()
    assert max(len(header), len(short)) <= 40
    assert header.index("STATE") == short.index("Running")
    assert long == "x" * 38 + "   Running"


def test_the_replicas_of_a_job_that_has_failed_are_not_none():
    snapshot = Snapshot(job_of(trainings.job(end=1, state="Failed", workers=3)))
    assert "4 removed" in _row(job_status(snapshot), snapshot, None, wide=False)
    del snapshot.job.raw["status"]["startTime"]  # suspended to the end: it never had any
    assert "none" in _row(job_status(snapshot), snapshot, None, wide=False)


def test_a_traceback_is_harmless(capsys):
    with pytest.raises(SystemExit), reported({"traceback"}):
        raise BackendError(HOSTILE)
    shown = capsys.readouterr().err
    assert "BackendError" in shown
    assert not {"\x1b", "\x9b", "\x07", "\u202e", "\r"} & set(shown)


def test_commands_print_by_what_makes_text_harmless():
    """`click.echo` of anything but a literal belongs in output.py."""
    found = [
        f"{file.name}:{node.lineno}"
        for file in sorted(CLI.glob("*.py"))
        if file.name != "output.py"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {"click.echo", "click.secho", "print"}
        and not all(isinstance(argument, ast.Constant) for argument in node.args)
    ]
    names = {name.partition(":")[0] for name in found}
    # A progress line that overwrites itself, YAML in ASCII, k8sjob's own script and versions, and
    # a diff and completions whose parts were made harmless before.
    assert names == {"push.py", "completion.py", "doctor.py", "diff.py", "version.py"}
    assert len(found) <= 7


def reported_as(error, capsys, *options):
    with pytest.raises(SystemExit) as end, reported(options):
        raise error
    out, err = capsys.readouterr()
    assert out == ""
    return end.value.code, err


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (K8sJobError("no"), 1, "error: no\n"),
        (JobNotFound("gone"), 102, "error: gone\n"),
        (click.UsageError("what?"), 2, "error: what?\n"),
        (FileNotFoundError(2, "No such file", "x.py"), 1, "error: No such file: x.py\n"),
        (OSError("disk on fire"), 1, "error: disk on fire\n"),
        (K8sJobError("a \x1b[31m\u202ered"), 1, "error: a red\n"),
        (SpecError([invalid(("a",), "no", line=1), invalid(("b",), "no", "go")], "job.yml"),
         1, "error: job.yml:1: a: no\nerror: job.yml: b: no; go\n"),
        (KeyboardInterrupt(), 130, ""),
        (click.Abort(), 130, ""),
    ],
)  # fmt: skip
def test_an_error_is_a_line_and_an_exit_code(error, code, line, capsys):
    assert reported_as(error, capsys) == (code, line)


def test_a_bug_says_so_without_a_traceback(capsys):
    code, err = reported_as(ZeroDivisionError("division by zero"), capsys)
    assert code == 1
    first, second = err.splitlines()
    assert first.startswith("error: this is a bug in k8sjob: ZeroDivisionError: division by zero")
    assert "K8SJOB_TRACEBACK=1" in second


def test_the_traceback_is_there_for_who_asks(capsys, monkeypatch):
    monkeypatch.setenv("K8SJOB_TRACEBACK", "1")
    assert "Traceback" in reported_as(K8sJobError("no"), capsys)[1]
    monkeypatch.setenv("K8SJOB_TRACEBACK", "0")
    assert "Traceback" not in reported_as(K8sJobError("no"), capsys)[1]


def test_the_option_shows_it(k8sjob):
    assert "Traceback" in k8sjob("--traceback", "validate", "nowhere.yaml", "-o", "xml").err
    assert "Traceback" not in k8sjob("validate", "nowhere.yaml", "-o", "xml").err


def test_a_file_named_as_a_module_of_pythons_library_is_not_imported(process, tmp_path):
    """`python -m` puts the working folder in front; of a script's folder it must not be."""
    for name in ("queue", "json", "click", "yaml"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the script')")
    child = process("version", "-o", "json", cwd=tmp_path)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, "")
    assert '"k8sjob"' in out


def test_a_reader_that_goes_away_is_no_error():
    schema = subprocess.Popen(
        [sys.executable, "-m", "k8sjob", "schema"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    schema.stdout.close()
    _, err = schema.communicate(timeout=60)
    assert err == b""
    assert schema.returncode == 1
