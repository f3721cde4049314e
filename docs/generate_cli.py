"""Writes docs/reference/cli.md from the commands themselves: `python docs/generate_cli.py`."""

from __future__ import annotations

from pathlib import Path

import click

from k8sjob.cli.program import COMMANDS, program

PAGE = Path(__file__).parent / "reference" / "cli.md"

HEAD = """\
<!-- Written by docs/generate_cli.py from the commands; change their help there. -->
# The command line

`k8sjob COMMAND`, or `kubectl k8sjob COMMAND` (kubectl finds `kubectl-k8sjob` on the PATH), or
`python -m k8sjob COMMAND`.

- A **job** is `NAME`; `local/NAME` on this machine, `NAMESPACE/NAME` in the cluster. A bare name is
  looked for in both places, and one that is in both is an error; `-n`, `--context` and
  `--kubeconfig` mean the cluster alone, `--local` this machine alone. `-n local` is this machine.
- A **FILE** is a job.yaml, a folder with one, or `-` for standard input.
- **Data** goes to standard output, progress and errors to standard error: what a command prints can
  be piped. `-o json` has a [stable form](json.md); documents are UTF-8 whatever the terminal.
- **Colours** and the live screen are for terminals: with `NO_COLOR`, in a pipe or in CI they stay
  off, and a terminal that shows ASCII alone gets ASCII.
- **Text of a job** is not trusted: control sequences are taken out before it is shown.

## Exit codes

| Code | Meaning |
|---|---|
| 0 | done; for `run`, `watch` and `submit --watch`: the job succeeded; `diff`: the same |
| 1 | an error: a file that is no job, findings of `lint`, a refusal, a taken name; `diff`: other |
| 1 | no message: the reader of the output has exited, as `head` does |
| 2 | wrong usage: an unknown command, option or value; an error of `diff` |
| 100 | the job failed |
| 101 | the job has not ended (`status --exit-code`) |
| 102 | there is no such job |
| 103 | the job was stopped, suspended or deleted |
| 130 | Ctrl-C; 143 after SIGTERM, 129 after SIGHUP (the terminal was closed) |

Those of containers are in [exit codes](exit-codes.md).

## Environment

| Variable | Meaning |
|---|---|
| `KUBECONFIG` | the kubeconfig, or several; `~/.kube/config` by default, or a pod's own account |
| `K8SJOB_STATE` | folder of the jobs on this machine; `~/.local/state/k8sjob` by default |
| `K8SJOB_PLAIN_HTTP` | registries (host[:port], with spaces between) that have no TLS |
| `DOCKER_CONFIG`, `REGISTRY_AUTH_FILE` | where docker's and podman's logins are, for `push` |
| `HTTPS_PROXY`, `NO_PROXY`, `SSL_CERT_FILE` | the way to registries, and whom to trust there |
| `K8SJOB_TRACEBACK` | `1` shows where in k8sjob an error came from, as `--traceback` does |
| `NO_COLOR` | no colours |
| `CI` | lines in place of the live screen |
"""


def page() -> str:
    """The whole page."""
    context = click.Context(program, info_name="k8sjob")
    commands = {name: program.get_command(context, name) for name in COMMANDS}
    sections = [_section(name, command) for name, command in commands.items() if command]
    return "\n".join(
        [HEAD, "## Options in front of a command\n", *_options(program), *sections, ""]
    )


def _section(name: str, command: click.Command) -> str:
    arguments = [_argument(p) for p in command.params if isinstance(p, click.Argument)]
    usage = " ".join(["k8sjob", name, "[OPTIONS]" * bool(_options(command)), *arguments])
    paragraphs = (command.help or "").split("\n\n")
    text = "\n\n".join(" ".join(part.split()) for part in paragraphs)
    parts = [f"\n## {name}\n", f"```\n{' '.join(usage.split())}\n```\n", text]
    options = _options(command)
    return "\n".join([*parts, "", *options] if options else parts)


def _argument(argument: click.Argument) -> str:
    name = argument.metavar or (argument.name or "").upper()
    many = "..." if argument.nargs == -1 and not name.endswith("...") else ""
    return f"{name}{many}" if argument.required else f"[{name}]{many}"


def _options(command: click.Command) -> list[str]:
    rows = [_option(p) for p in command.params if isinstance(p, click.Option)]
    return ["| Option | Meaning |", "|---|---|", *rows] if rows else []


def _option(option: click.Option) -> str:
    names = ", ".join(f"`{name}`" for name in option.opts)
    choices = ""
    if isinstance(option.type, click.Choice):
        marks = {option.default: " (default)"}
        choices = ", ".join(f"`{choice}`{marks.get(choice, '')}" for choice in option.type.choices)
        choices += ". "
    many = " May be given several times." if option.multiple else ""
    return f"| {names} | {choices}{option.help}{many} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
