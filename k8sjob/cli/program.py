"""The commands by name. Each one's module is loaded when it is called, so help is fast."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from k8sjob.contract import __version__, did_you_mean

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class Command(NamedTuple):
    """A command before it is loaded: its line in `--help`, and its module."""

    section: str
    name: str
    module: str
    summary: str


COMMANDS: Final = {
    command.name: command
    for command in (
        Command("Start", "init", "init", "Write a job that is ready to run: job.yaml, main.py"),
        Command("Start", "adopt", "init", "Turn a manifest into a job.yaml"),
        Command("Check", "validate", "validate", "Check job.yaml files"),
        Command("Check", "schema", "validate", "Print the JSON Schema of job.yaml"),
        Command("Check", "render", "render", "Print the manifest or the Dockerfile"),
        Command("Check", "lint", "lint", "Find what will hang, be rejected or go wrong"),
        Command("Check", "prove", "prove", "Compare training on one process and on several"),
        Command("Check", "fit", "fit", "Estimate the memory of a rank, and what fits a GPU"),
        Command("Check", "doctor", "doctor", "Check that jobs can be submitted"),
        Command("Run", "run", "run", "Run a job on this machine and follow it"),
        Command("Run", "build", "build", "Build the image with a job's dependencies"),
        Command("Run", "push", "push", "Add a job's code to its base image, in the registry"),
        Command("Run", "submit", "submit", "Create a job in a cluster"),
        Command("Run", "rerun", "rerun", "Run a job again as it was"),
        Command("Run", "diff", "diff", "Show what submitting again would change"),
        Command("Inspect", "list", "list", "List jobs"),
        Command("Inspect", "status", "status", "Show one job and its replicas"),
        Command("Inspect", "watch", "watch", "Follow a job to its end"),
        Command("Inspect", "logs", "logs", "Print what the replicas wrote"),
        Command("Inspect", "why", "why", "Explain why a job failed or makes no progress"),
        Command("Inspect", "usage", "usage", "Show where GPU hours went"),
        Command("Inspect", "metrics", "metrics", "Print or serve metrics for Prometheus"),
        Command("Inspect", "ui", "ui", "Show jobs on a page in the browser"),
        Command(
            "Inspect", "collect", "collect", "Keep records of all jobs, and report when they end"
        ),
        Command("Inspect", "archive", "archive", "Write all that is known about a job to one file"),
        Command("Inspect", "report", "report", "Write an HTML page about a job"),
        Command("Inspect", "export", "export", "Write a checkpoint's weights to one file"),
        Command("Change", "suspend", "suspend", "Stop a job's replicas after a checkpoint"),
        Command("Change", "resume", "suspend", "Resume a suspended job"),
        Command("Change", "delete", "delete", "Stop a job and remove it"),
        Command("Shell", "completion", "completion", "Print the completion script of a shell"),
        Command("Shell", "version", "completion", "Print the versions of k8sjob, Python and torch"),
    )
}


FOREIGN_NAMES: Final[dict[str, tuple[str, ...]]] = {
    command: names
    for words, names in (
        ("new create-job", ("init",)),
        ("convert import from", ("adopt",)),
        ("check verify", ("validate", "doctor")),
        ("compare equal proof", ("prove",)),
        ("memory estimate size", ("fit",)),
        ("template manifest dockerfile", ("render",)),
        ("config info env", ("doctor",)),
        ("start launch train exec", ("run", "submit")),
        ("create apply up deploy", ("submit",)),
        ("edit patch scale", ("diff", "submit")),
        ("repeat reproduce replay retry", ("rerun",)),
        ("ps ls get jobs history", ("list",)),
        ("describe inspect show stat", ("status",)),
        ("attach follow tail top wait", ("watch", "logs")),
        ("log output", ("logs",)),
        ("events explain debug", ("why",)),
        ("save record backup", ("archive",)),
        ("notify alert slack webhook", ("collect",)),
        ("html page", ("report",)),
        ("prometheus grafana", ("metrics",)),
        ("dashboard web browser", ("ui",)),
        ("cost costs hours accounting", ("usage",)),
        ("stop pause cancel", ("suspend", "delete")),
        ("continue unpause unsuspend restart", ("resume",)),
        ("rm remove kill down destroy", ("delete",)),
        ("help", ("--help",)),
    )
    for command in words.split()
}
"""The commands meant by the names that kubectl, docker and others use."""


class Program(click.Group):
    """The top-level command: knows the names of its commands, loads one when it is called."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        """All names, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, _ctx: click.Context, name: str) -> click.Command | None:
        """The command of that name; its function is called as the command, `_` for `-`."""
        if name not in COMMANDS:
            return None
        # pydantic would search all installed packages for plugins, which takes time, as importing
        # what searches does. A variable that says so would be inherited by the job.
        loader = ModuleType("pydantic.plugin._loader")
        vars(loader)["get_plugins"] = tuple
        sys.modules.setdefault(loader.__name__, loader)
        module = import_module(f"k8sjob.cli.{COMMANDS[name].module}")
        command = getattr(module, f"{name}_command")
        assert isinstance(command, click.Command)  # noqa: S101 - tells mypy what the modules hold
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names of commands from the table, without loading any; else options."""
        from click.shell_completion import CompletionItem  # noqa: PLC0415 - for completion alone

        found = [c for c in COMMANDS.values() if c.name.startswith(incomplete)]
        items = [CompletionItem(c.name, help=c.summary) for c in found]
        return items or click.Command.shell_complete(self, ctx, incomplete)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve as click does, with a suggestion for a name that is nearly right."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            hint = did_you_mean(args[0], COMMANDS, f"the commands are {', '.join(COMMANDS)}")
            if meant := FOREIGN_NAMES.get(args[0].lower()):
                hint = f"did you mean {' or '.join(map(repr, meant))}?"
            raise click.UsageError(f"no command {args[0]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands by section, without loading any."""
        width = max(map(len, COMMANDS))
        for section in dict.fromkeys(command.section for command in COMMANDS.values()):
            with formatter.section(section):
                formatter.write_dl(
                    [
                        (f"{c.name:{width}}", c.summary)
                        for c in COMMANDS.values()
                        if c.section == section
                    ]
                )


def _show_traceback(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and isinstance(ctx.obj, set):
        ctx.obj.add("traceback")


@click.command(
    cls=Program,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="k8sjob", message="%(prog)s %(version)s")
@click.option(
    "--traceback",
    is_flag=True,
    expose_value=False,
    callback=_show_traceback,
    help="Show where in k8sjob an error came from.",
)
def program() -> None:
    """Distributed PyTorch training from one job.yaml, the same on a laptop and on Kubernetes.

    Jobs are named NAME, or local/NAME on this machine (local/NAME@RUN for an earlier run) and
    NAMESPACE/NAME in the cluster.

    Start with: k8sjob init my-job
    """
