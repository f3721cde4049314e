"""`k8sjob mcp`: commands as tools of an assistant."""

from __future__ import annotations

import importlib.util
import signal

import click

from k8sjob.errors import K8sJobError, install_step


@click.command("mcp")
@click.option("--allow-write", is_flag=True, help="Offer submit, suspend, resume and delete, too.")
@click.option("--allow-prove", is_flag=True, help="Offer prove, too: it runs scripts here.")
def mcp_command(allow_write: bool, allow_prove: bool) -> None:
    """Serve jobs to an assistant over the Model Context Protocol, on stdin and stdout.

    The assistant's program starts this command. The tools why, status, logs, list, doctor, lint,
    validate, render and usage only read; those that change jobs begin with a dry run.
    """
    if importlib.util.find_spec("mcp") is None:
        raise K8sJobError("assistants need one more package", install_step("mcp"))
    import anyio  # noqa: PLC0415 - once the package is there

    from k8sjob.cli.assistant import Assistant  # noqa: PLC0415 - the same

    # SIGTERM becomes SIGINT there, which a shell ignores for what it starts in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    program = click.get_current_context().find_root().command
    anyio.run(Assistant(program, writes=allow_write, proves=allow_prove).serve)
    raise SystemExit  # the server has closed stdout, which could not be flushed
