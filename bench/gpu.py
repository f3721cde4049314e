"""What k8sjob does on a GPU: speed beside loops by hand, share of the peak, memory, errors.

    python bench/gpu.py                     # all parts, the most telling first, in ten minutes
    python bench/gpu.py steps large         # some of them
    python bench/gpu.py --tiny              # the same of a few parameters, also on CPUs: a trial
    python bench/gpu.py --seconds 300 --out FOLDER

Every part has a time limit of its own, and its rows are printed as they come, as Markdown for
docs/reference/gpu.md; --out keeps them in gpu.md, beside what the ranks wrote. It needs torch and
the sources of k8sjob. Without pydantic, `memory` takes what `python bench/fit.py estimates` wrote.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import cuda_errors
import decoder
import ranks

from k8sjob.contract import RuntimeConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

HERE = Path(__file__).resolve()
EXAMPLES = HERE.parents[1] / "manifests"
PEAKS = {  # TFLOP/s of a dense product by the makers' data sheets: (bfloat16, float32)
    "H200": (989, 67),
    "H100 PCIe": (756, 51),
    "H100": (989, 67),
    "A100": (312, 19.5),
    "L40S": (362, 91.6),
    "L4": (121, 30.3),
}
STEPS = (
    "ddp, bf16",
    "ddp, bf16, compile",
    "fsdp, bf16, compile",
    "mesh, bf16",
    "ddp, bf16, checkpoint_activations",
    "fsdp, bf16",
    "mesh, bf16, compile",
    "ddp",
)
LARGE = (
    "ddp, bf16, compile",
    "fsdp, bf16, compile",
    "ddp, bf16, compile, checkpoint_activations",
)
SHARED = ("ddp", "fsdp", "pipeline", "mesh, layout", "ddp, bf16, compile", "fsdp, bf16, compile")
MODELS = (
    *("mlp", "deep-mlp", "autoencoder", "lstm", "transformer", "wide-transformer"),
    *("vit", "resnet50", "convnext_tiny", "swin_t"),
)


def shape_of(size: str, *, tiny: bool) -> tuple[str, decoder.Shape]:
    """The size that is measured, and its shape."""
    size = "tiny" if tiny else size
    return size, decoder.SHAPES[size]


def chip() -> tuple[str, float | None, float | None]:
    """The first GPU's name and its peaks in bfloat16 and single precision; "CPU" without one."""
    import torch

    if not torch.cuda.is_available():
        return "CPU", None, None
    name = torch.cuda.get_device_name(0)
    return name, *next((both for known, both in PEAKS.items() if known in name), (None, None))


def beside_hand(cases: Sequence[str], size: str, *, tiny: bool) -> Iterator[str]:
    """A row for each case: samples/s of both loops, their ratio, share of the peak, memory."""
    size, shape = shape_of(size, tiny=tiny)
    _, bf16, single = chip()
    world = gpus() or 1
    yield "| case | samples/s by hand | by k8sjob | ratio | TFLOP/s | of the peak | GiB |"
    yield "|---|---|---|---|---|---|---|"
    for case in cases[:2] if tiny else cases:
        try:
            each = ranks.results(
                decoder.HERE, "alternate", case, size, world=world,
                K8SJOB_CONFIG=decoder.config(case, shape).encode(),
            )  # fmt: skip
        except SystemExit as error:
            yield f"| `{case}` | failed: {error} |"
            continue
        first = each[0]
        hand, own = (sum(one[by] for one in each) for by in ("hand", "k8sjob"))
        ratio = statistics.mean(one["ratio"] for one in each)
        reached = own / world * first["flops"] / 1e12
        peak = bf16 if "bf16" in case else single
        share = f"{reached / peak:.1%}" if peak else "-"
        memory = max(one["peak_bytes"] for one in each) / 2**30
        yield (
            f"| `{case}` | {hand:.1f} | {own:.1f} | {ratio:.3f} ± {first['error']:.3f}"
            f" | {reached:.3g} | {share} | {memory:.1f} |"
        )
    yield ""
    yield (
        f"A decoder of {shape.layers} layers, {shape.width} wide, {shape.length} tokens in a"
        f" sample, {shape.batch} samples in a batch; {decoder.TURNS} turns of each loop."
    )


def gpus() -> int:
    """GPUs of this machine."""
    import torch

    return torch.cuda.device_count()


def memory(*, tiny: bool) -> Iterator[str]:
    """Peaks that `fit` estimates beside those that torch's allocator counts."""
    import fit

    names = MODELS[:1] if tiny else MODELS
    if importlib.util.find_spec("pydantic"):
        estimates = fit.estimates(names)
    elif fit.ESTIMATES.exists():
        estimates = json.loads(fit.ESTIMATES.read_text())
    else:
        estimates = {}
        yield "No estimates: pydantic is not installed, and `bench/fit.py estimates` has not run.\n"
    yield "| model | estimate, MB | measured, MB | difference |"
    yield "|---|---|---|---|"
    for name in names:
        try:
            (peaks,) = ranks.results(fit.HERE, "rank", name, world=1)
        except SystemExit as error:
            yield f"| {name} | failed: {error} |"
            continue
        estimate, peak = estimates.get(name), peaks[name]
        difference = f"{100 * estimate / peak - 100:+.1f} %" if estimate and peak else "-"
        yield f"| {name} | {(estimate or 0) / 1e6:.1f} | {peak / 1e6:.1f} | {difference} |"


def stall(*, tiny: bool) -> Iterator[str]:
    """How long training stands still for a checkpoint, beside torch.save to the same disk."""
    size, shape = shape_of("small", tiny=tiny)
    with tempfile.TemporaryDirectory() as folder:
        settings = decoder.config("ddp, bf16", shape, checkpoint_dir=folder, checkpoint_keep=1)
        (result,) = ranks.results(
            decoder.HERE, "stall", folder, size, world=1, K8SJOB_CONFIG=settings.encode()
        )
    yield "| MB | torch.save and fsync, s | k8sjob stands still, s | until it is on the disk, s |"
    yield "|---|---|---|---|"
    yield "| {mb:.0f} | {plain:.3f} | {stall:.3f} | {whole:.3f} |".format_map(result)


def shared(*, tiny: bool) -> Iterator[str]:
    """Two ranks on one GPU by gloo: their losses beside those of one process."""
    size, shape = shape_of("small", tiny=tiny)
    run = partial(ranks.results, decoder.HERE, "losses")
    expected: dict[str, list[float]] = {}
    yield "| case | largest difference to one process | samples/s of 2 ranks on one GPU | device |"
    yield "|---|---|---|---|"
    for case in SHARED[:4] if tiny else SHARED:
        alone = "ddp, bf16" if "bf16" in case else "ddp"
        settings = decoder.config(case, shape, backend="gloo")
        try:
            if alone not in expected:
                config = decoder.config(alone, shape).encode()
                expected[alone] = run(alone, size, world=1, K8SJOB_CONFIG=config)[0]["losses"]
            # As two nodes, or the runtime would leave the GPU: it has not one for each rank.
            first, *_ = run(
                case, size, world=2, K8SJOB_CONFIG=settings.encode(), LOCAL_WORLD_SIZE="1"
            )
        except SystemExit as error:
            yield f"| `{case}` | failed: {error} |"
            continue
        pairs = zip(first["losses"], expected[alone], strict=True)
        most = max(abs(own - one) / abs(one) for own, one in pairs)
        yield f"| `{case}` | {most:.1e} | {first['rate']:.1f} | {first['device']} |"


def errors(*, tiny: bool, out: Path | None) -> Iterator[str]:
    """Errors made on purpose, and what `why` says of them."""
    yield "| error | right | `why` |"
    yield "|---|---|---|"
    names = list(cuda_errors.CASES)
    for number, name in enumerate(names[3:6] if tiny else names):
        right, told, output = cuda_errors.explained(name, on_gpu=bool(gpus()))
        if out:
            (out / f"error-{number}.txt").write_text(f"{name}\n{output}")
        told = " ".join(told.split()).replace("|", "/")
        yield f"| {name} | {'yes' if right else 'NO'} | {told} |"


def examples(*, tiny: bool) -> Iterator[str]:
    """The examples of manifests/, with all their ranks on the first GPU."""
    import yaml

    yield "| example | ranks | result |"
    yield "|---|---|---|"
    folders = [file.parent for file in sorted(EXAMPLES.glob("*/main.py"))]
    for folder in [EXAMPLES / "data-parallel"] if tiny else folders:
        job = yaml.safe_load((folder / "job.yaml").read_text())
        replicas, strategy = job.get("replicas", {}), dict(job.get("strategy", {}))
        world = (1 + replicas.get("workers", 0)) * replicas.get("nproc_per_node", 1)
        kind = strategy.pop("kind", "ddp")
        backend = "gloo" if world > 1 else None
        config = RuntimeConfig(strategy=kind, options=strategy, backend=backend).encode()
        arguments = list(map(str, job["run"].get("args", [])))
        if flag := job["run"].get("local_rank_arg"):
            arguments.append(f"{flag}=0")
        ends = ranks.ended(
            folder / "main.py", *arguments, world=world, K8SJOB_CONFIG=config, LOCAL_WORLD_SIZE="1"
        )
        worst = next(((code, text) for code, text in ends if code), None)
        result = "trained"
        if worst:
            lines = [line for line in worst[1].splitlines() if line.strip()]
            result = f"exit code {worst[0]}: {(lines or [''])[-1][:200]}"
        yield f"| {folder.name} | {world} | {result.replace('|', '/')} |"


@dataclass(frozen=True)
class Part:
    """Rows of Markdown, and the seconds that they may take."""

    title: str
    seconds: int
    rows: Callable[..., Iterator[str]]


PARTS = {  # the most telling first: the last ones are lost if time runs out
    "steps": Part("Steps, 0.2 billion parameters", 190, partial(beside_hand, STEPS, "small")),
    "large": Part("Steps, 1.4 billion parameters", 150, partial(beside_hand, LARGE, "large")),
    "memory": Part("Memory, beside `k8sjob fit`", 100, memory),
    "stall": Part("Checkpoints", 60, stall),
    "errors": Part("Errors", 120, errors),
    "shared": Part("Two ranks on one GPU, by gloo", 120, shared),
    "examples": Part("Examples", 120, examples),
}


def run_part(name: str, seconds: float, argv: list[str], out: Path | None) -> list[str]:
    """The rows of a part, printed as they come; its processes are ended when time is up."""
    log = (out or Path(tempfile.gettempdir())) / f"{name}.log"
    rows: list[str] = []
    with log.open("w") as errors_file:
        process = subprocess.Popen(
            [sys.executable, str(HERE), "--part", name, *argv],
            stdout=subprocess.PIPE, stderr=errors_file, text=True, start_new_session=True,
        )  # fmt: skip
        # All ranks are in the part's process group.
        timer = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        began = time.monotonic()
        for line in process.stdout or ():
            rows.append(line.rstrip("\n"))
            print(rows[-1], flush=True)
        code = process.wait()
        timer.cancel()
    took = time.monotonic() - began
    if code:
        reason = f"it was stopped after {took:.0f} s" if took >= seconds else f"exit code {code}"
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        rows += ["", f"Not complete: {reason}. {last[-1][:300] if last else ''}".rstrip()]
        print(*rows[-2:], sep="\n", flush=True)
    return rows


def heading() -> str:
    """What it was measured with."""
    import torch

    name, _, _ = chip()
    cuda = f", CUDA {torch.version.cuda}" if torch.cuda.is_available() else ""
    count = f"{gpus()} x " if gpus() > 1 else ""
    return f"On {count}{name}, torch {torch.__version__}{cuda}, {time.strftime('%-d %B %Y')}."


def main() -> None:
    """All parts in turn, or the rows of one of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: {', '.join(PARTS)}")
    parser.add_argument("--tiny", action="store_true", help="a trial, which needs no GPU")
    parser.add_argument("--seconds", type=float, help="for all parts together; default: 570")
    parser.add_argument("--out", type=Path, help="a folder for gpu.md and the output of ranks")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if unknown := set(asked.parts) - PARTS.keys():
        parser.error(f"no part {min(unknown)!r}; the parts are {', '.join(PARTS)}")
    if asked.part:
        more = {"out": asked.out} if asked.part == "errors" else {}
        for row in PARTS[asked.part].rows(tiny=asked.tiny, **more):
            print(row, flush=True)
        return
    if not (gpus() or asked.tiny):
        raise SystemExit("no GPU here, so nothing to measure; --tiny tries the program on CPUs")
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
    seconds = asked.seconds or (3600 if asked.tiny else 570)
    until, text = time.monotonic() + seconds, [heading()]
    print(text[0], flush=True)
    argv = [*(["--tiny"] if asked.tiny else []), *(["--out", str(asked.out)] if asked.out else [])]
    for name in asked.parts or PARTS:
        part, left = PARTS[name], until - time.monotonic()
        text += ["", f"## {part.title}", ""]
        print(*text[-3:], sep="\n", flush=True)
        if left < 10:
            text.append("Not measured: time was up.")
            print(text[-1], flush=True)
        else:
            limit = part.seconds * (5 if asked.tiny else 1)  # CPUs have other work to do, too
            text += run_part(name, min(limit, left), argv, asked.out)
        if asked.out:
            (asked.out / "gpu.md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
