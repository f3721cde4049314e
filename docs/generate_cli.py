"""Writes docs/reference/cli.md from the commands themselves: `python docs/generate_cli.py`."""

from __future__ import annotations

from pathlib import Path

import click

from k8sjob.cli.program import COMMANDS, program

PAGE = Path(__file__).parent / "reference" / "cli.md"

HEAD = """\
<!-- Written by docs/generate_cli.py from the commands; change their help there. -->
# The command line

All commands with their options. Call them as `k8sjob COMMAND`, `kubectl k8sjob COMMAND` (kubectl
finds `kubectl-k8sjob` on the PATH) or `python -m k8sjob COMMAND`.

- A **job** is `local/NAME` on this machine or `NAMESPACE/NAME` in the cluster. A bare `NAME` is
  looked up in both places; a name that exists in both is an error. `why`, `status`, `logs`,
  `watch`, `report` and `usage` also take `KIND/NAME` of [whatever runs
  pods](../how-to/why.md#a-job-that-k8sjob-did-not-make).
- A **FILE** is a job.yaml, a folder with one, or `-` for standard input.
- **Data** goes to standard output, progress and errors to standard error, so output can be piped.
  `-o json` has a [stable form](json.md); documents are always UTF-8.
- **Colors** and the live screen are for terminals: they are off with `NO_COLOR`, in a pipe and in
  CI. A terminal that cannot show Unicode gets ASCII.
- **Output of a job** is not trusted: control sequences are removed before it is shown.

## Exit codes

| Code | Meaning |
|---|---|
| 0 | success; for `run`, `watch`, `submit --watch`: of the job; `diff`, `prove`: equal |
| 1 | an error: no job, findings of `lint`, a refusal, a taken name; `diff`, `prove`: different; \
`fit`: no row fits |
| 1 | without a message: the reader of the output, such as `head`, has exited |
| 2 | wrong usage: an unknown command, option or value; an error of `diff` or `prove` |
| 100 | the job failed |
| 101 | the job has not ended (`status --exit-code`) |
| 102 | there is no such job |
| 103 | the job was stopped, suspended or deleted |
| 130 | Ctrl-C; 143 after SIGTERM, 129 after SIGHUP (the terminal was closed) |

Containers have [other exit codes](exit-codes.md).

## Environment

| Variable | Meaning |
|---|---|
| `KUBECONFIG` | the kubeconfig, or several; `~/.kube/config` by default, or a pod's own account |
| `K8SJOB_STATE` | folder of the jobs on this machine; `~/.local/state/k8sjob` by default |
| `K8SJOB_PLAIN_HTTP` | registries (host[:port], separated by spaces) without TLS |
| `DOCKER_CONFIG`, `REGISTRY_AUTH_FILE` | the folder or file of docker's and podman's logins |
| `HTTPS_PROXY`, `NO_PROXY`, `SSL_CERT_FILE` | proxies; trusted certificates for registries |
| `K8SJOB_TRACEBACK` | `1` shows where in k8sjob an error came from, as `--traceback` does |
| `NO_COLOR` | no colors |
| `CI` | plain lines instead of the live screen |
"""

SHARED = (
    (
        "Options of the job",
        "They change a field of the job.yaml for one command.",
        ("--set", "--name", "--workers", "--nproc", "--gpus"),
    ),
    (
        "Options of the place",
        "They select the cluster and the namespace, or this machine (`--local` or `-n local`).",
        ("-n", "-A", "--context", "--kubeconfig", "--client", "--local"),
    ),
)
"""Options of many commands: the heading of their section, its text, their first names."""


def page() -> str:
    """The whole page."""
    context = click.Context(program, info_name="k8sjob")
    commands = {name: program.get_command(context, name) for name in COMMANDS}
    sections = [_section(name, command) for name, command in commands.items() if command]
    options = {
        option.opts[0]: option
        for name in ("submit", "list")
        for option in _options(program.get_command(context, name))
    }
    shared = [
        f"\n## {heading}\n\n{text}\n\n{_list([options[name] for name in names])}"
        for heading, text, names in SHARED
    ]
    front = _list(_options(program))
    return "\n".join([HEAD, f"## Options before a command\n\n{front}", *shared, *sections, ""])


def _section(name: str, command: click.Command) -> str:
    arguments = [_argument(p) for p in command.params if isinstance(p, click.Argument)]
    usage = " ".join(["k8sjob", name, "[OPTIONS]" * bool(_options(command)), *arguments])
    text = " ".join((command.help or "").split())
    shared = ""
    options = _options(command)
    for heading, _, names in SHARED:
        found = [option for option in options if option.opts[0] in names]
        if len(found) > 1:
            options = [option for option in options if option not in found]
            all_names = ", ".join(_names(option) for option in found)
            link = f"[{heading.lower()}](#{heading.lower().replace(' ', '-')})"
            shared += f"{' and' if shared else ', with'} {link} {all_names}"
    parts = [f"\n## {name}\n", f"`{' '.join(usage.split())}`{shared}\\", text]
    return "\n".join([*parts, "", _list(options)] if options else parts)


def _argument(argument: click.Argument) -> str:
    name = argument.metavar or (argument.name or "").upper()
    many = "..." if argument.nargs == -1 and not name.endswith("...") else ""
    return f"{name}{many}" if argument.required else f"[{name}]{many}"


def _options(command: click.Command | None) -> list[click.Option]:
    return [p for p in (command.params if command else ()) if isinstance(p, click.Option)]


def _list(options: list[click.Option]) -> str:
    return "\n".join(map(_option, options))


def _names(option: click.Option) -> str:
    return ", ".join(f"`{name}`" for name in option.opts)


def _option(option: click.Option) -> str:
    choices = ""
    if isinstance(option.type, click.Choice):
        marks = {option.default: " (default)"}
        choices = ", ".join(f"`{choice}`{marks.get(choice, '')}" for choice in option.type.choices)
        choices += ". "
    many = option.multiple and "more than once" not in (option.help or "")
    again = " May be given more than once." if many else ""
    return f"- {_names(option)}: {choices}{option.help}{again}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
