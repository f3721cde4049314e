"""The command line: one module a command, which parses, calls and prints.

program   the commands by name, loaded when they are called
options   arguments and options that several commands share
naming    which job a command means
output    tables, JSON and YAML on stdout, errors on stderr, and the exit code
"""

from k8sjob.cli.program import main

__all__ = ["main"]
