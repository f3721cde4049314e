"""The commands by name. Each one's module is loaded when it is called, so help is fast."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from k8sjob.contract import __version__, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from click.shell_completion import CompletionItem


class Command(NamedTuple):
    """A command before it is loaded: its line in `--help`, and its module."""

    section: str
    name: str
    module: str
    summary: str


def _rows() -> Iterator[tuple[Command, list[str]]]:
    """The rows of commands.tsv: a command, and the words of kubectl, docker and others for it."""
    text = Path(__file__).with_name("commands.tsv").read_text(encoding="utf-8")
    for row in text.splitlines()[2:]:
        section, name, module, summary, words = [*row.split("\t"), ""][:5]
        yield Command(section, name, module, summary), words.split()


COMMANDS: Final = {command.name: command for command, _ in _rows()}
FOREIGN_NAMES: Final[dict[str, list[str]]] = {"help": ["--help"]}
"""The commands meant by the names that kubectl, docker and others use."""
for _command, _words in _rows():
    for _word in _words:
        FOREIGN_NAMES.setdefault(_word, []).append(_command.name)


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

        commands = [command for command in COMMANDS.values() if command.name.startswith(incomplete)]
        items = [CompletionItem(command.name, help=command.summary) for command in commands]
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
@click.version_option(
    __version__, "-V", "--version", prog_name="k8sjob", message="%(prog)s %(version)s"
)
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

    Start with: k8sjob init my-job; or with what you have: lint train.py, why NAMESPACE/NAME
    """
