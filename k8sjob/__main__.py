"""`python -m k8sjob`: the command line, without its script on PATH."""

from k8sjob.cli import main

if __name__ == "__main__":
    main()
