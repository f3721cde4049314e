import subprocess
import sys

import click
import pytest

from k8sjob import __version__
from k8sjob.cli.program import COMMANDS, FOREIGN_NAMES, program


def test_help_names_every_command_in_its_section(k8sjob):
    done = k8sjob("--help")
    assert done.code == 0
    for command in COMMANDS.values():
        assert command.summary in " ".join(done.out.split())
        section = done.out.index(f"\n{command.section}:")
        assert section < done.out.index(f"\n  {command.name} ", section)


def test_no_arguments_are_a_call_for_help(k8sjob):
    assert k8sjob() == k8sjob("--help")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name, k8sjob):
    done = k8sjob(name, "-h")
    assert done.code == 0
    assert done.out.startswith(f"Usage: k8sjob {name} ")
    command = program.get_command(click.Context(program), name)
    assert command.name == name
    assert command.help
    assert "\\" not in done.out
    assert all(p.help for p in command.params if isinstance(p, click.Option))


@pytest.mark.parametrize(
    ("args", "detail"),
    [
        (["rendr"], "no command 'rendr'; did you mean 'render'?"),
        (["start"], "no command 'start'; did you mean 'run' or 'submit'?"),
        (["RM", "x"], "no command 'RM'; did you mean 'delete'?"),
        (["xyzzy"], "no command 'xyzzy'; the commands are init, adopt, "),
        (["list", "-o", "xml"], "'xml' is not one of 'table', 'wide', 'json', 'yaml', 'name'"),
        (["status", "-l", ""], "give NAME, or the labels of pods with -l SELECTOR"),
        (["logs", "x", "--since", "soon"], "'soon' is not a duration; write 90s, 5m, 2h or 1d"),
        (["status", "a/b/c/d"], "'a/b/c/d' is not a job's name; write NAME, local/NAME, local"),
        (["status", "../x"], "'../x' is not a job's name"),
        (["submit", "--image", "a", "--onto", "b"], "--onto makes the image, and --image names"),
        (["push", "--build", "--dry-run"], "--build builds an image first; omit --dry-run and"),
        (["build", "--builder", "kaniko"], "'kaniko' is not one of 'auto', "),
        (["status", "local/x", "-n", "blue"], "'local/x' conflicts with the options for the place"),
        (["list", "--local", "-n", "blue"], "--local means this machine; omit the options"),
        (["list", "-A", "-n", "blue"], "-n names one namespace and -A all of them; give only one"),
        (["list", "-l", "a=b=c"], "-l 'a=b=c': 'a=b=c' is not a selector"),
        (["delete"], "give names of jobs, or select jobs with -l SELECTOR or --all"),
        (["delete", "--all"], "specify the place: --local for this machine, or -n NAMESPACE"),
        (["submit", "--watch", "-o", "name"], "--watch follows the job; omit"),
        (["submit", "--replace", "--generate-name"], "--generate-name uses a free name"),
    ],
)
def test_wrong_usage(args, detail, k8sjob):
    done = k8sjob(*args)
    assert done.code == 2
    assert done.out == ""
    first, second = done.err.splitlines()
    assert first.startswith("error: ")
    assert detail in first
    assert second.startswith("try 'k8sjob")
    assert second.endswith("--help'")


def test_every_word_of_other_tools_leads_to_a_command():
    for word, commands in FOREIGN_NAMES.items():
        assert word not in COMMANDS
        assert set(commands) <= {*COMMANDS, "--help"}


@pytest.mark.parametrize("redirection", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_may_be_closed(redirection):
    shell = f'"{sys.executable}" -m k8sjob validate - {redirection}'
    done = subprocess.run(["sh", "-c", shell], input=b"a", capture_output=True, check=False)
    assert done.returncode == 1
    assert b"bug" not in done.stderr
    assert b"Traceback" not in done.stderr


def test_version(k8sjob):
    assert k8sjob("-V").out == k8sjob("--version").out == f"k8sjob {__version__}\n"
    assert k8sjob("version").out.splitlines()[0] == f"k8sjob {__version__}"
    assert f'"k8sjob": "{__version__}"' in k8sjob("version", "-o", "json").out


@pytest.mark.parametrize(
    ("argv0", "name"),
    [
        ("/usr/bin/k8sjob", "k8sjob"),
        ("/usr/bin/kubectl-k8sjob", "kubectl k8sjob"),
        ("/x/k8sjob/__main__.py", "python -m k8sjob"),
    ],
)
def test_usage_speaks_of_what_was_typed(argv0, name, k8sjob, monkeypatch):
    monkeypatch.setattr("sys.argv", [argv0])
    assert k8sjob("--help").out.startswith(f"Usage: {name} [OPTIONS] COMMAND")


def test_pydantic_looks_for_no_plugins_and_no_child_knows():
    code = """
import os
from importlib import metadata
found, metadata.entry_points = [], lambda **asked: found.append(asked) or []
before = dict(os.environ)
from k8sjob.cli.program import program
program.get_command(None, "render")
from k8sjob.spec import JobSpec
JobSpec(name="x", image="x", run={"script": "main.py"})
assert dict(os.environ) == before
print(found)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.stdout == b"[]\n", done.stderr
