"""The command line: parse, call, print, exit code. It holds no logic of its own.

program   the commands by name, loaded when they are called
failure   exceptions become one line and an exit code
output    tables, JSON and YAML on stdout
"""

from k8sjob.cli.program import main

__all__ = ["main"]
