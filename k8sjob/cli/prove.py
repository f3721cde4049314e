"""`k8sjob prove` and `k8sjob fit`: what short runs of a script on this machine show."""

from __future__ import annotations

import sys

import click

from k8sjob.cli.options import JobCommand, JobFile, format_option, job_file_options
from k8sjob.cli.output import document, fail, line, say, table
from k8sjob.errors import K8sJobError


@click.command("prove", cls=JobCommand)
@job_file_options()
@click.option("--steps", metavar="K", type=click.IntRange(1), help="Optimizer steps at most.")
@format_option("table", "json", "yaml")
def prove_command(job: JobFile, steps: int | None, output: str) -> int:
    """Compare the training in FILE (default: job.yaml) on one process with that on several.

    FILE may be a Python script, too. The script runs on this machine, unchanged, with --nproc
    processes (default: nproc_per_node of the job, at least 2) and with one that is given the same
    batches. Words after `--` are added to the arguments of the script.

    The exit code is 0 if the numbers are equal, 1 if they differ, with what differs first and the
    likely cause, and 2 if they cannot be compared.
    """
    from k8sjob.proving import prove  # noqa: PLC0415 - loaded when called

    try:
        spec = job.load(here=True)
        given = any(change.path == ("replicas", "nproc_per_node") for change in job.changes)
        asked = spec.replicas.nproc_per_node if given else None
        with job.located():
            progress = say if output == "table" and sys.stderr.isatty() else (lambda _text: None)
            proof = prove(spec, nproc=asked, steps=steps, folder=job.folder, progress=progress)
    except K8sJobError as error:
        fail(str(error))
        return 2
    if output != "table":
        document(proof.as_dict(), output)
    elif proof.equal:
        line(proof.message)
    else:
        step, rank = (
            None if value is None else f"{name} {value}"
            for name, value in (("step", proof.step), ("rank", proof.rank))
        )
        where = ", ".join(filter(None, (proof.tensor, proof.name, step, rank)))
        line(f"differs: {proof.cause}" + (f" ({where})" if where else ""))
        line(f"  {proof.message}")
        if proof.values is not None:
            one, several = map(_number, proof.values)
            line(f"  on 1 process: {one}; on {proof.processes}: {several}")
        line(f"  next: {proof.next}")
    return 0 if proof.equal else 1


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _bytes(_ctx: click.Context, _option: click.Parameter, given: str | None) -> int | None:
    if given is None:
        return None
    from k8sjob.kube.quantity import parse  # noqa: PLC0415 - loaded when called

    try:
        found = int(parse(given))
    except ValueError as error:
        raise click.BadParameter(f"{error}; write, for example, 80G") from None
    if found <= 0:
        raise click.BadParameter(f"{given!r} is not more than 0; write, for example, 80G")
    return found


def _sizes(_ctx: click.Context, _option: click.Parameter, given: str | None) -> tuple[int, ...]:
    words = [] if given is None else given.split(",")
    if not all(word.strip().isdecimal() and int(word) for word in words):
        raise click.BadParameter(f"{given!r} is not a list of numbers; write, for example, 16,32")
    return tuple(map(int, words))


@click.command("fit", cls=JobCommand)
@job_file_options()
@click.option("--batch-sizes", metavar="N,N", callback=_sizes, help="Samples of a rank in a batch.")
@click.option(
    "--gpu-memory",
    metavar="SIZE",
    callback=_bytes,
    help="Memory of a GPU, as 80G; by default that of resources.gpu_type.",
)
@format_option("table", "json", "yaml")
def fit_command(
    job: JobFile, batch_sizes: tuple[int, ...], gpu_memory: int | None, output: str
) -> int:
    """Estimate the peak memory of a rank for FILE (default: job.yaml), under ddp and fsdp.

    FILE may be a Python script, too. The script runs on this machine's CPU, unchanged, in one
    process for three optimizer steps, and once more with batches of double the size. Words after
    `--` are added to the arguments of the script.

    The exit code is 0 if some row fits the GPU or no GPU is known, 1 if none does.
    """
    from k8sjob.proving.fit import fit  # noqa: PLC0415 - loaded when called

    spec = job.load(here=True)
    with job.located():
        found = fit(spec, batch_sizes=batch_sizes, memory=gpu_memory, folder=job.folder)
    fitting = [row["fits"] for row in found["rows"]]
    code = 0 if None in fitting or any(fitting) else 1
    if output != "table":
        document(found, output)
        return code
    words = {None: "-", True: "yes", False: "no"}
    rows = [
        (row["strategy"], row["batch"], _size(row["peak"]), words[row["fits"]],
         f"{row['largest']} {_size(row['parts'][row['largest']])}")
        for row in found["rows"]
    ]  # fmt: skip
    table(("STRATEGY", "BATCH", "PEAK", "FITS", "LARGEST PART"), rows)
    line(f"{found['ranks']} ranks, {found['optimizer']}; not counted: CUDA context, NCCL, cuDNN")
    line(f"workspace and fragmentation, for which {_size(found['allowance'])} are left free")
    line(found["advice"])
    return code


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"
