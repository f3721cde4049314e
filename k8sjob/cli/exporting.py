"""The command that takes weights out of a checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import util
from pathlib import Path
from typing import Any

import click

from k8sjob.cli.failure import say, warn
from k8sjob.cli.output import line
from k8sjob.errors import K8sJobError

__all__ = ["export_command"]


@click.command("export")
@click.argument("checkpoint", type=click.Path(path_type=Path))
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
    help="The optimizer, the place in the data and the rest, too.",
)
@click.option("--force", is_flag=True, help="Replace the file if it is there.")
def export_command(checkpoint: Path, output: Path, everything: bool, force: bool) -> None:
    """Write the model's weights of a checkpoint as one state_dict.

    CHECKPOINT is a file or folder step-..., or the folder of them, of which the newest whole one is
    taken: that of a job on this machine, or one copied from a volume. Nothing in it is executed.
    """
    if util.find_spec("torch") is None:
        raise K8sJobError(
            f"torch is not installed for {sys.executable}; pip install 'k8sjob[torch]'"
        )
    told = _exported(checkpoint, output, everything=everything, force=force)
    for warning in told["warnings"]:
        warn(warning)
    if "error" in told:
        raise K8sJobError(told["error"])
    say(f"{told['tensors']} tensors, {told['bytes']:,} bytes, of step {told['step']}")
    line(told["path"])


def _exported(source: Path, target: Path, *, everything: bool, force: bool) -> dict[str, Any]:
    """What a Python with torch made of it; the client itself never loads torch."""
    asked = {
        "source": str(source),
        "target": str(target),
        "everything": everything,
        "force": force,
    }
    done = subprocess.run(
        [sys.executable, "-P", "-m", "k8sjob.runtime.export", json.dumps(asked)],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise K8sJobError(f"{source} could not be exported: {last}") from None
    return found
