"""`k8sjob prove`: the same training on one process and on several."""

from __future__ import annotations

import sys

import click

from k8sjob.cli.jobfile import JobFile, job_command
from k8sjob.cli.options import format_option
from k8sjob.cli.output import document, fail, line, print_status
from k8sjob.errors import K8sJobError


@job_command("prove")
@click.option(
    "--steps", metavar="K", type=click.IntRange(1), help="Maximum number of optimizer steps."
)
@click.option("-q", "--quiet", is_flag=True, help="Show only differences.")
@format_option("table", "json", "yaml")
def prove_command(job: JobFile, steps: int | None, quiet: bool, output: str) -> int:
    """Compare the training in FILE (default: job.yaml) on one process with that on several.

    FILE may also be a Python script. The script runs on this machine, unchanged, with the job's
    nodes and processes (two of a job of one) and with one process that is given the same batches.
    Arguments after `--` are passed to the script.

    The exit code is 0 if the numbers are equal, 1 if they differ, with what differs first and the
    likely cause, and 2 if they cannot be compared.
    """
    from k8sjob.proving.proof import prove  # noqa: PLC0415 - loaded when called

    try:
        spec = job.load(local=True)
        # A job of one process is compared on two, unless the command line says that one is meant.
        is_set = any(change.path == ("replicas", "nproc_per_node") for change in job.changes)
        nproc = spec.replicas.nproc_per_node if is_set else None
        with job.located():
            shown = output == "table" and not quiet and sys.stderr.isatty()
            progress = print_status if shown else (lambda _text: None)
            proof = prove(spec, nproc=nproc, steps=steps, folder=job.folder, progress=progress)
    except K8sJobError as error:
        fail(str(error))
        return 2
    if output != "table":
        document(proof.as_dict(), output)
        return 0 if proof.equal else 1
    if proof.equal and not quiet:
        line(proof.message)
    elif not proof.equal:
        at = "" if proof.step is None else f"step {proof.step}"
        rank = "" if proof.rank is None else f"rank {proof.rank}"
        where = ", ".join(filter(None, (proof.tensor, proof.name, at, rank)))
        line(f"differs: {proof.cause}" + (f" ({where})" if where else ""))
        line(f"  {proof.message}")
        if proof.values is not None:
            alone, several = map(_number, proof.values)
            line(f"  on 1 process: {alone}; on {proof.layout}: {several}")
        line(f"  next: {proof.next}")
    if not (proof.equal and quiet):
        for note in proof.notes:
            line(f"  note: {note}")
        if proof.not_compared:
            line(f"  not compared: {'; '.join(proof.not_compared)}")
    return 0 if proof.equal else 1


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
