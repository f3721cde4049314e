import importlib.util
from pathlib import Path

import click
import pytest

from k8sjob.cli.program import COMMANDS, program

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/cli.md"


def test_the_reference_is_what_the_commands_say():
    found = importlib.util.spec_from_file_location("generate_cli", ROOT / "docs/generate_cli.py")
    generate = importlib.util.module_from_spec(found)
    found.loader.exec_module(generate)
    assert PAGE.read_text() == generate.page(), "run: make docs"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_in_it(name):
    section = PAGE.read_text().partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    command = program.get_command(click.Context(program), name)
    assert section.strip().startswith(f"`k8sjob {name}")
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert all(f"`{option}`" in section for option in parameter.opts)
