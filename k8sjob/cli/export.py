"""`k8sjob export`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from k8sjob.backends.api import LOCAL
from k8sjob.backends.local.machine import check_torch
from k8sjob.cli.find_job import local_backend
from k8sjob.cli.output import line, print_status, warn
from k8sjob.errors import JobNotFound, K8sJobError


@click.command("export")
@click.argument("checkpoint", type=click.Path(path_type=Path), metavar="CHECKPOINT|NAME")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("model.pt"),
    show_default=True,
    help="The file: .pt, .pth or .safetensors.",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Include the optimizer, the position in the data and the rest.",
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
def export_command(checkpoint: Path, output: Path, everything: bool, force: bool) -> None:
    """Write the model's weights of a checkpoint as one state_dict.

    CHECKPOINT is a file or folder step-..., or the folder that contains them, whose newest complete
    checkpoint is used. NAME is a job on this machine. The checkpoints of a job in a cluster are on
    its volume: copy them from there first. Nothing in them is executed.
    """
    check_torch()
    source = checkpoint if checkpoint.exists() else _of_job(str(checkpoint))
    report = _export(source, output, everything=everything, force=force)
    for warning in report["warnings"]:
        warn(warning)
    if "error" in report:
        raise K8sJobError(report["error"])
    print_status(
        f"{report['tensors']} tensors, {report['bytes']:,} bytes, of step {report['step']}"
    )
    line(report["path"])


def _of_job(name: str) -> Path:
    """The folder of the checkpoints of a job on this machine."""
    local = local_backend()
    try:
        folder = local.checkpoints(local.find(name.removeprefix(f"{LOCAL}/")))
    except JobNotFound as error:
        raise K8sJobError(
            f"{name}: no such checkpoint, and no such job on this machine; copy the checkpoint of a"
            " job in a cluster from its volume first (kubectl cp), and name the copy"
        ) from error
    if folder is None:
        raise K8sJobError(
            f"{name} has written no checkpoint; set checkpoint.dir in its job.yaml, or name an"
            " earlier run of it (NAME@RUN, as k8sjob list shows it)"
        )
    return folder


def _export(source: Path, target: Path, *, everything: bool, force: bool) -> dict[str, Any]:
    """The report of another Python, with torch: the client itself never loads it."""
    order = {"source": str(source), "target": str(target), "everything": everything, "force": force}
    module = "k8sjob.runtime.checkpoint.export"
    done = subprocess.run(
        # -P: a module of the working folder, such as a user's torch.py, is not imported in place of
        # torch.
        [sys.executable, "-P", "-m", module, json.dumps(order)],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise K8sJobError(f"{source} could not be exported: {last}") from None
    return report
