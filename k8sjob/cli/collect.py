"""`k8sjob collect`: records of all jobs, and messages when they end."""

from __future__ import annotations

import signal
import threading
from typing import Final

import click

from k8sjob.cli.find_job import Place, place_options
from k8sjob.cli.options import selector_option
from k8sjob.cli.output import line, print_status, warn
from k8sjob.environment import WEBHOOK_URL, webhook_url
from k8sjob.errors import K8sJobError, redacted
from k8sjob.sanitize import safe_line

_OCCASIONS: Final = ("failed", "succeeded", "stalled")
_GIB: Final = 1 << 30


@click.command("collect")
@selector_option
@click.option(
    "--notify-on",
    type=click.Choice(_OCCASIONS),
    multiple=True,
    help="What to send messages about; may be given more than once. Default: failed and stalled.",
)
@click.option(
    "--into",
    metavar="URL",
    help="Keep them in a bucket: s3://BUCKET/PREFIX. Credentials come from the environment.",
)
@click.option(
    "--max-records",
    type=click.IntRange(min=1),
    help="Number of records to keep, default 10000; the oldest are removed.",
)
@click.option(
    "--max-size",
    type=click.IntRange(min=1),
    metavar="GIB",
    help="GiB of records to keep, default 50; the oldest are removed.",
)
@place_options(everywhere=True, local=False)
def collect_command(  # noqa: PLR0917 - click hands them over by name
    labels: str,
    notify_on: tuple[str, ...],
    into: str | None,
    max_records: int | None,
    max_size: int | None,
    place: Place,
) -> None:
    """Keep a record of each job in a cluster when it ends, and send messages, until Ctrl-C.

    Records are kept in the folder `records` of K8SJOB_STATE; `why`, `status`, `logs` and `usage`
    read them when the job is gone. With --into they are kept in a bucket, and read by their URLs.
    Messages go to the webhook in the variable K8SJOB_WEBHOOK_URL, in the format of Slack.
    manifests/collector runs this command in a cluster.
    """
    from k8sjob.backends.record import Records  # noqa: PLC0415 - once the options are right
    from k8sjob.backends.record_storage import StoredRecords  # noqa: PLC0415 - the same
    from k8sjob.observe.collector import Collector  # noqa: PLC0415 - the same
    from k8sjob.observe.webhook import Webhook  # noqa: PLC0415 - the same

    url = webhook_url()
    if notify_on and not url:
        raise K8sJobError(
            f"--notify-on has no effect without a webhook; set {WEBHOOK_URL} to its URL"
        )
    records: Records | StoredRecords
    if into is None:
        records = Records(max_records or 10_000, (max_size or 50) * _GIB)
    elif max_records or max_size:
        raise click.UsageError(
            "--max-records and --max-size limit a folder; a bucket has lifecycle rules for that"
        )
    else:
        records = StoredRecords(into)
        # A missing right shows now, and not hours later at the end of the first job.
        records.check()
    # The URL of a webhook is its password.
    webhook = Webhook(url, records, lambda reason: warn(redacted(reason))) if url else None
    backend = place.connect()
    stop = threading.Event()
    changes = backend.watch_jobs(stop=stop, all_namespaces=place.all_namespaces, selector=labels)
    occasions = notify_on or ("failed", "stalled")
    collector = Collector(backend, records, webhook, occasions, lambda text: line(safe_line(text)))
    # In a container it is process 1, which a signal does not end by itself.
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    about = f"messages: {', '.join(occasions)}" if url else f"no messages: {WEBHOOK_URL} is not set"
    print_status(f"Collecting records; {about}. Ctrl-C ends it; the jobs continue.")
    try:
        collector.run(changes, stop)
    finally:
        if webhook:
            webhook.close()
