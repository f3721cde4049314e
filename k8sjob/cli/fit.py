"""`k8sjob fit`: the peak memory of a rank, and what fits the GPU."""

from __future__ import annotations

import click

from k8sjob.cli.jobfile import JobFile, job_command
from k8sjob.cli.options import format_option
from k8sjob.cli.output import document, line, table
from k8sjob.contract import counted
from k8sjob.view.formats import in_binary_unit


def _bytes(_ctx: click.Context, _option: click.Parameter, text: str | None) -> int | None:
    if text is None:
        return None
    from k8sjob.kube.quantity import parse  # noqa: PLC0415 - loaded when called

    try:
        size = int(parse(text))
    except ValueError as error:
        raise click.BadParameter(f"{error}; write, for example, 80G") from None
    if size <= 0:
        raise click.BadParameter(f"{text!r} must be more than 0; write, for example, 80G")
    return size


def _sizes(_ctx: click.Context, _option: click.Parameter, text: str | None) -> tuple[int, ...]:
    words = [] if text is None else text.split(",")
    if not all(word.strip().isdecimal() and int(word) for word in words):
        raise click.BadParameter(f"{text!r} is not a list of numbers; write, for example, 16,32")
    return tuple(map(int, words))


@job_command("fit")
@click.option(
    "--batch-sizes", metavar="N,N", callback=_sizes, help="Batch sizes per rank to estimate."
)
@click.option(
    "--gpu-memory",
    metavar="SIZE",
    callback=_bytes,
    help="Memory of a GPU, such as 80G; by default that of resources.gpu_type.",
)
@format_option("table", "json", "yaml")
def fit_command(
    job: JobFile, batch_sizes: tuple[int, ...], gpu_memory: int | None, output: str
) -> int:
    """Estimate the peak memory of a rank for FILE (default: job.yaml), under ddp and fsdp.

    If the job has another strategy, it is estimated under that one, with all ranks on this machine.

    FILE may also be a Python script. The script runs on this machine's CPU, unchanged, in one
    process for three optimizer steps, and once more with batches of double the size. Arguments
    after `--` are passed to the script.

    The exit code is 0 if some row fits the GPU or no GPU is known, 1 if none does.
    """
    from k8sjob.fitting.estimate import fit  # noqa: PLC0415 - loaded when called

    spec = job.load(local=True)
    with job.located():
        estimate = fit(spec, batch_sizes=batch_sizes, memory=gpu_memory, folder=job.folder)
    fitting = [row["fits"] for row in estimate["rows"]]
    # None: no GPU is known that the rows could fit.
    code = 0 if None in fitting or any(fitting) else 1
    if output != "table":
        document(estimate, output)
        return code
    words = {None: "-", True: "yes", False: "no"}
    table(
        ("STRATEGY", "BATCH", "PEAK", "FITS", "LARGEST PART"),
        [
            (row["strategy"], row["batch"], _size(row["peak"]), words[row["fits"]],
             f"{row['largest']} {_size(row['parts'][row['largest']])}")
            for row in estimate["rows"]
        ],
    )  # fmt: skip
    ranks = counted(estimate["ranks"], "rank")
    line(f"{ranks}, {estimate['optimizer']}; not counted: CUDA context, NCCL, cuDNN")
    line(f"workspace and fragmentation, for which {_size(estimate['allowance'])} are left free")
    line(estimate["advice"])
    return code


def _size(size: float) -> str:
    amount, unit = in_binary_unit(size)
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
