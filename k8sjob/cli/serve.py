"""`k8sjob metrics`, `k8sjob ui` and `k8sjob collect`: all jobs, until Ctrl-C."""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from k8sjob.cli.naming import Place, all_jobs, local_backend, place_options
from k8sjob.cli.options import selector_option
from k8sjob.cli.output import line, say, text, warn
from k8sjob.errors import BackendError, K8sJobError, redacted
from k8sjob.sanitize import safe_line

if TYPE_CHECKING:
    from k8sjob.backends.cluster import ClusterBackend

_LISTEN: Final = re.compile(r"(?:(?P<host>[\w.-]+|\[[0-9a-fA-F:]+\]):)?(?P<port>[0-9]{1,5})")
_URL: Final = "K8SJOB_WEBHOOK_URL"
_OCCASIONS: Final = ("failed", "succeeded", "stalled")
_GIB: Final = 1 << 30


@click.command("metrics")
@selector_option
@click.option(
    "--listen",
    metavar="[HOST:]PORT",
    help="Serve them until Ctrl-C; on this machine alone, unless HOST is another address of it.",
)
@place_options(everywhere=True)
def metrics_command(labels: str, listen: str | None, place: Place) -> None:
    """Print metrics of jobs for Prometheus: states, progress, restarts, GPU seconds.

    With --listen they are served at http://HOST:PORT/metrics, and read again at each request.
    Whoever reaches that address can read the names, states and numbers of the jobs.
    """
    address = listen and _LISTEN.fullmatch(listen)
    if listen and not (address and int(address["port"]) < 65536):
        raise click.UsageError(f"--listen {listen!r}: write PORT or HOST:PORT, as 9400")
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
    say("Ctrl-C ends it; the jobs continue.")
    threading.Event().wait()


@click.command("ui")
@click.argument("records", nargs=-1, metavar="[RECORD.k8sjob]...", type=click.Path(path_type=Path))
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Default: a free one.")
@click.option("--read-only", is_flag=True, help="Show jobs, and refuse to change any.")
@place_options(everywhere=True)
def ui_command(records: tuple[Path, ...], port: int, read_only: bool, place: Place) -> None:
    """Show jobs on a page in the browser: their state, curves and output, and why they fail.

    The page has the jobs of this machine and, if one is configured, of the cluster, and those of
    records. Its address, with a token, is printed; it is reached from this machine alone. Ctrl-C
    ends it; the jobs continue.
    """
    if not all(map(importlib.util.find_spec, ("starlette", "uvicorn"))):
        raise K8sJobError("the page needs two more packages: pip install 'k8sjob[ui]'")
    from k8sjob.backends.record import RecordBackend  # noqa: PLC0415 - once the packages are there
    from k8sjob.ui.jobs import Jobs  # noqa: PLC0415 - the same
    from k8sjob.ui.server import HOST, Page, Server, listen  # noqa: PLC0415 - the same

    stored = [RecordBackend(path) for path in records]
    jobs = Jobs(
        None if place.is_cluster else local_backend(),
        _cluster(place),
        stored,
        all_namespaces=place.all_namespaces,
    )
    with listen(port) as listener:
        token = secrets.token_urlsafe(32)
        line(f"http://{HOST}:{listener.getsockname()[1]}/#token={token}")
        say("Open this address in a browser; whoever has it can change your jobs. Ctrl-C ends it.")
        Server(Page(jobs, place.connect, read_only=read_only), token).run(sockets=[listener])
    # Only a signal ends it; where SIGINT was ignored before, the server's own is the only one.
    raise KeyboardInterrupt


def _cluster(place: Place) -> ClusterBackend | None:
    """The cluster; None where there is none, or it cannot be used while others are shown."""
    if not place.asks_cluster:
        return None
    try:
        return place.connect()
    except BackendError as error:
        if place.is_cluster:
            raise
        warn(str(error))
        return None


@click.command("collect")
@selector_option
@click.option(
    "--notify-on",
    type=click.Choice(_OCCASIONS),
    multiple=True,
    help="What to send messages about; may be given more than once. Default: failed and stalled.",
)
@click.option(
    "--max-records",
    type=click.IntRange(min=1),
    default=10_000,
    show_default=True,
    help="So many records are kept; the oldest are removed.",
)
@click.option(
    "--max-size",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    metavar="GIB",
    help="So many GiB of records are kept.",
)
@place_options(everywhere=True, local=False)
def collect_command(
    labels: str, notify_on: tuple[str, ...], max_records: int, max_size: int, place: Place
) -> None:
    """Keep a record of each job of a cluster when it ends, and send messages, until Ctrl-C.

    Records are kept in the folder `records` of K8SJOB_STATE; `why`, `status`, `logs` and `usage`
    read them when the job is gone. Messages go to the webhook in the variable K8SJOB_WEBHOOK_URL,
    of Slack's shape. manifests/collector runs this command in a cluster.
    """
    from k8sjob.backends.record import Records  # noqa: PLC0415 - once the options are right
    from k8sjob.observe.collector import Collector  # noqa: PLC0415 - the same
    from k8sjob.observe.webhook import Webhook  # noqa: PLC0415 - the same

    url = os.environ.get(_URL, "").strip()
    if notify_on and not url:
        raise K8sJobError(f"--notify-on has no effect without a webhook; set {_URL} to its URL")
    webhook = Webhook(url, lambda reason: warn(redacted(reason))) if url else None
    records = Records(max_records, max_size * _GIB)
    backend = place.connect()
    stop = threading.Event()
    changes = backend.watch_jobs(stop=stop, all_namespaces=place.all_namespaces, selector=labels)
    occasions = notify_on or ("failed", "stalled")
    collector = Collector(backend, records, webhook, occasions, lambda text: line(safe_line(text)))
    # In a container it is process 1, which a signal does not end by itself.
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    sends = f"messages: {', '.join(occasions)}" if webhook else f"no messages: {_URL} is not set"
    say(f"Collecting records; {sends}. Ctrl-C ends it; the jobs continue.")
    try:
        collector.run(changes, stop)
    finally:
        if webhook:
            webhook.close()
