"""`k8sjob ui`: jobs on a page in the browser."""

from __future__ import annotations

import importlib.util
import secrets
from typing import TYPE_CHECKING

import click

from k8sjob.cli.find_job import Place, local_backend, open_record, place_options
from k8sjob.cli.output import line, print_status, warn
from k8sjob.errors import BackendError, K8sJobError, install_step

if TYPE_CHECKING:
    from k8sjob.backends.cluster.backend import ClusterBackend


@click.command("ui")
@click.argument("records", nargs=-1, metavar="[RECORD.k8sjob]...", type=click.Path())
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Default: any free port.")
@click.option("--read-only", is_flag=True, help="Show jobs without allowing changes.")
@place_options(everywhere=True)
def ui_command(records: tuple[str, ...], port: int, read_only: bool, place: Place) -> None:
    """Show jobs on a page in the browser: their state, curves and output, and why they fail.

    The page shows the jobs on this machine, in the cluster if one is configured, and in
    records. Its address, with a token, is printed; only this machine can reach it. Ctrl-C ends
    it; the jobs continue.
    """
    if not all(map(importlib.util.find_spec, ("starlette", "uvicorn"))):
        raise K8sJobError("the page needs two more packages", install_step("ui"))
    from k8sjob.ui.jobs import Jobs  # noqa: PLC0415 - once the packages are there
    from k8sjob.ui.server import HOST, Page, Server, listen  # noqa: PLC0415 - the same

    stored = [open_record(location) for location in records]
    jobs = Jobs(
        None if place.is_cluster else local_backend(),
        _cluster(place),
        stored,
        all_namespaces=place.all_namespaces,
    )
    # The socket exists before the address is printed, so that a browser finds it at once.
    with listen(port) as listener:
        token = secrets.token_urlsafe(32)
        line(f"http://{HOST}:{listener.getsockname()[1]}/#token={token}")
        may = "see" if read_only else "change"
        print_status(
            f"Open this address in a browser; anyone who has it can {may} your jobs. Ctrl-C ends"
            " it."
        )
        Server(Page(jobs, place.connect, read_only=read_only), token).run(sockets=[listener])
    # Only a signal ends it; where SIGINT was ignored before, the server's own is the only one.
    raise KeyboardInterrupt


def _cluster(place: Place) -> ClusterBackend | None:
    """The cluster; None if there is none, or it cannot be used while others are shown."""
    if not place.asks_cluster:
        return None
    try:
        return place.connect()
    except BackendError as error:
        if place.is_cluster:
            raise
        warn(str(error))
        return None
