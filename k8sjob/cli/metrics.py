"""`k8sjob metrics`: jobs for Prometheus."""

from __future__ import annotations

import importlib.util
import re
import threading
from typing import Final

import click

from k8sjob.cli.find_job import Place, place_options
from k8sjob.cli.list import all_jobs
from k8sjob.cli.options import selector_option
from k8sjob.cli.output import line, print_status, text
from k8sjob.errors import K8sJobError

_LISTEN: Final = re.compile(r"(?:(?P<host>[\w.-]+|\[[0-9a-fA-F:]+\]):)?(?P<port>[0-9]{1,5})")


@click.command("metrics")
@selector_option
@click.option(
    "--listen",
    metavar="[HOST:]PORT",
    help="Serve them until Ctrl-C; only on this machine, unless HOST is another of its addresses.",
)
@place_options(everywhere=True)
def metrics_command(labels: str, listen: str | None, place: Place) -> None:
    """Print metrics of jobs for Prometheus: states, progress, restarts, GPU seconds.

    With --listen they are served at http://HOST:PORT/metrics, and read again at each request.
    Anyone who can reach that address can read the names, states and numbers of the jobs.
    """
    address = listen and _LISTEN.fullmatch(listen)
    if listen and not (address and int(address["port"]) < 65536):
        raise click.UsageError(f"--listen {listen!r}: write PORT or HOST:PORT, such as 9400")
    if importlib.util.find_spec("prometheus_client") is None:
        raise K8sJobError("metrics need one more package: pip install 'k8sjob[metrics]'")
    from prometheus_client import CollectorRegistry, start_http_server  # noqa: PLC0415 - it is there
    from prometheus_client.openmetrics.exposition import generate_latest  # noqa: PLC0415 - the same

    from k8sjob.view.exporter import JobCollector  # noqa: PLC0415 - the same

    registry = CollectorRegistry()
    registry.register(JobCollector(lambda: all_jobs(labels, place)[:2]))
    if not address:
        # The library has no types.
        text(generate_latest(registry).decode())  # type: ignore[no-untyped-call]
        return
    host, port = address["host"] or "127.0.0.1", int(address["port"])
    try:
        server, _ = start_http_server(port, host.strip("[]"), registry)
    except OSError as error:
        raise K8sJobError(
            f"--listen {listen}: {error.strerror or error}; choose another address or port"
        ) from error
    line(f"http://{host}:{server.server_port}/metrics")
    print_status("Ctrl-C ends it; the jobs continue.")
    threading.Event().wait()
