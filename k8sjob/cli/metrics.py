"""`k8sjob metrics`: jobs for Prometheus."""

from __future__ import annotations

import importlib.util
import re
import threading
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

import click

from k8sjob.cli.find_job import Place, place_options
from k8sjob.cli.list import all_jobs
from k8sjob.cli.options import selector_option
from k8sjob.cli.output import line, print_status, text
from k8sjob.errors import K8sJobError, install_step

if TYPE_CHECKING:
    from collections.abc import Iterable
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_LISTEN: Final = re.compile(r"(?:(?P<host>[\w.-]+|\[[0-9a-fA-F:]+\]):)?(?P<port>[0-9]{1,5})")
_LOCAL: Final = re.compile(r"(?:|(?:localhost|127\.[0-9.]+|\[::1\])(?::[0-9]+)?)", re.IGNORECASE)
"""What HTTP's Host may be on loopback; it is missing in HTTP/1.0, and no browser omits it."""


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
        raise K8sJobError("metrics need one more package", install_step("metrics"))
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
    # Whoever listens on another address wants other names.
    if ip_address(str(server.server_address[0])).is_loopback and (app := server.get_app()):
        server.set_app(_refusing_other_names(app))
    line(f"http://{host}:{server.server_port}/metrics")
    print_status("Ctrl-C ends it; the jobs continue.")
    threading.Event().wait()


def _refusing_other_names(app: WSGIApplication) -> WSGIApplication:
    """An application that answers only under the names of loopback addresses.

    A web page may give such an address a name of its own (DNS rebinding) to read what is served.
    """

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        host = environ.get("HTTP_HOST", "")
        if _LOCAL.fullmatch(host):
            return app(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{host!a} is not localhost; use --listen HOST:PORT for other names\n".encode()]

    return answer
