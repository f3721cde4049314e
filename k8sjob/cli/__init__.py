"""The command line: one module for a command or a few that belong together.

program   the commands by name, with their modules, which are loaded when they are called
options   arguments and options that several commands share
naming    which job a command means
output    tables, JSON and YAML on stdout, errors on stderr, and the exit code
"""

from k8sjob.cli.program import main

__all__ = ["main"]
