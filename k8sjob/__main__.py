"""`python -m k8sjob`: the command line, without its script on PATH."""

import sys

if not sys.flags.safe_path:
    # `python -m` puts the working folder first; a queue.py of the user's there is not Python's own.
    del sys.path[0]

from k8sjob.cli import main

if __name__ == "__main__":
    main()
