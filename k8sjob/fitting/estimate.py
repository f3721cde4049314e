"""Peak memory of a rank under each strategy and batch size, and what fits a GPU."""

from __future__ import annotations

import json
import re
from bisect import bisect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from k8sjob.errors import BackendError
from k8sjob.forking.forks import NO_GPUS, Forks, check_script
from k8sjob.image.builders.process import signals_as_exit
from k8sjob.jobs.plan import load_spec, plan_run
from k8sjob.temporary import temporary_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from k8sjob.backends.api import Plan
    from k8sjob.spec import JobSpec

ALLOWANCE: Final = 2 * 2**30
"""Bytes for what is not counted: CUDA's context, NCCL's buffers, cuDNN's workspace, fragments."""
_LIMIT: Final = 120.0
_QUIET: Final = 30.0
_LARGEST: Final = 2**20
_PROCESSES: Final = 16
STRATEGIES: Final = ("ddp", "fsdp")
_MEMORY: Final = {"T4": 16, "V100": 16, "A10": 24, "A30": 24, "L4": 24, "L40": 48, "L40S": 48,
                  "A40": 48, "A100": 40, "H100": 80, "H200": 141, "B200": 180}  # fmt: skip
"""GB of products whose label names no size."""


class ModelBlock(NamedTuple):
    """Bytes of a block of a model, which FSDP gathers and lets go of as one.

    Attributes:
        parameters: whole.
        gradients: whole.
        activations: most that there is in the backward pass of the block, without gradients.
        outside: gradients of parameters in no block that are there by then.
    """

    parameters: int
    gradients: int
    activations: int
    outside: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes of one process that trains the bare model, in steps after the first.

    Attributes:
        batch: samples in a batch.
        inputs: the batch itself.
        activations: most that a step makes, without gradients: saved for backward, or temporary.
        retained: the same with gradients.
        step: most that the optimizer makes in its step and frees.
        blocks: for FSDP, the blocks of the model in the order of the backward pass; last what is in
            none of them.
        copies: DistributedDataParallel keeps gradients and buckets apart.
        optimizer_class: its name.
    """

    batch: int
    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    inputs: int
    activations: int
    retained: int
    step: int
    blocks: tuple[ModelBlock, ...] = ()
    copies: bool = False
    optimizer_class: str = ""

    def at(self, batch: int, second: Measured) -> Measured:
        """With another batch size, on the line through this measurement and another one."""
        share = (batch - self.batch) / (second.batch - self.batch)

        def between(low: int, high: int) -> int:
            return max(round(low + share * (high - low)), 0)

        # Only these grow with the batch. Weights, gradients and the optimizer's state do not.
        values: dict[str, Any] = {
            name: between(getattr(self, name), getattr(second, name))
            for name in ("inputs", "activations", "retained")
        }
        blocks = self.blocks
        # Where another batch led to other blocks, those of the first measurement count.
        if len(blocks) == len(second.blocks):
            blocks = tuple(
                block._replace(activations=between(block.activations, larger.activations))
                for block, larger in zip(blocks, second.blocks, strict=True)
            )
        return replace(self, batch=batch, blocks=blocks, **values)


def peak(model: Measured, strategy: str, ranks: int, *, reshard: bool = True) -> dict[str, int]:
    """Bytes of a rank at its peak, by part: those that are at their largest together.

    Args:
        model: the bare one, with the batch of a rank.
        strategy: ddp or fsdp.
        ranks: over which fsdp divides parameters, gradients and optimizer state.
        reshard: fsdp lets go of a block after its forward pass.
    """
    # A single rank of fsdp divides nothing, and is computed as ddp.
    parts = 1 if strategy == "ddp" else ranks
    held = {"parameters": model.parameters // parts, "buffers": model.buffers,
            "optimizer": model.optimizer // parts, "inputs": model.inputs}  # fmt: skip
    if parts == 1:
        copied = ranks > 1 and model.copies
        # Buckets exist all the time; without them gradients come as activations go.
        bucketed = ranks > 1 and not copied
        backward = model.activations if bucketed else model.retained - model.gradients
        buckets = model.gradients if copied else 0
        moments = [
            {"gradients": model.gradients, "buckets": buckets, "activations": max(backward, 0)}
        ]
        step = {"gradients": model.gradients, "buckets": buckets, "workspace": model.step}
    else:
        moments = list(_sharded(model.blocks, ranks, reshard=reshard))
        step = {"gradients": model.gradients // ranks, "workspace": model.step // ranks}
    # Parts have their largest values at different times; what counts is the largest sum at one
    # time.
    most = max([*moments, step], key=lambda moment: sum(moment.values()))
    kinds = ("gradients", "buckets", "activations", "gathered", "workspace")
    by_part = {**held, **{kind: most.get(kind, 0) for kind in kinds}}
    return {**by_part, "total": sum(by_part.values())}


def _sharded(
    blocks: Sequence[ModelBlock], ranks: int, *, reshard: bool
) -> Iterator[dict[str, int]]:
    """What a rank has of FSDP2's backward pass, block by block, besides what it always has.

    A block is there whole, and its gradients; the next one is gathered ahead, and of the one
    before the input of the reduce-scatter is kept. What is in no block stays whole throughout.
    """
    *inner, outside = blocks
    unsharded = 0 if reshard else sum(block.parameters for block in inner)
    done = 0
    for index, block in enumerate(inner):
        before = inner[index - 1].gradients if index else 0
        ahead = inner[index + 1].parameters if index + 1 < len(inner) else 0
        whole = block.parameters + ahead if reshard else unsharded
        gathered = outside.parameters + whole + block.gradients + block.outside + before
        yield {"gradients": done // ranks, "activations": block.activations, "gathered": gathered}
        done += block.gradients
    last = inner[-1].gradients if inner else 0
    gathered = outside.parameters + outside.gradients + last + unsharded
    yield {"gradients": done // ranks, "activations": outside.activations, "gathered": gathered}


def gpu_memory(product: str) -> int | None:
    """Bytes of a GPU by the label of its product, as NVIDIA-A100-SXM4-80GB; None: not known."""
    # The label's own size counts before the table: an A100 has 40 or 80 GB.
    size = re.search(r"(?<!\d)(\d++)GB", product)
    named = next((_MEMORY[word] for word in re.split(r"[-_ ]", product) if word in _MEMORY), None)
    gigabytes = int(size[1]) if size else named
    return None if gigabytes is None else gigabytes * 10**9


def largest_batch(total: Callable[[int], int], room: int) -> int:
    """The largest batch of a rank of which the total fits, at most 2**20; 0: none does."""
    return bisect(range(1, _LARGEST + 1), room, key=total)


def fit(
    spec: JobSpec | str | Path,
    *,
    batch_sizes: Sequence[int] = (),
    memory: int | None = None,
    folder: str | Path | None = None,
) -> dict[str, Any]:
    """The peak memory of a rank, from three steps of the script on this machine's CPU.

    For ddp and fsdp one process runs the bare model. Under another strategy all ranks run here.

    Args:
        spec: a JobSpec, or the path of a job.yaml, of its folder, or of a script.
        batch_sizes: samples of a rank in a batch; none: the script's, half and double.
        memory: bytes of the GPU; None: by resources.gpu_type.
        folder: what relative paths of the spec start from; None: that of the job.yaml.

    Returns:
        JSON data: ranks, optimizer, batch (the script's), gpu_memory and allowance (bytes), rows
        (strategy, batch, peak, fits, parts), largest (batch by strategy), advice.

    Raises:
        SpecError: the spec is not valid, or runs no Python script.
        BackendError: it cannot be started here, it fails, or it trains nothing.
    """
    spec, folder = load_spec(spec, folder, local=True)
    check_script(spec, "fit")
    memory = memory or gpu_memory(spec.resources.gpu_type or "")
    gpu = bool(memory or spec.resources.gpus)
    ranks, strategy = spec.world_size, spec.strategy
    # Under ddp and fsdp a rank follows from the bare model; of others, all ranks are measured here.
    whole = strategy.kind not in STRATEGIES and ranks > 1
    blocks = list(getattr(strategy, "blocks", ()) or ())
    options = {"foreach": gpu, "blocks": blocks}
    if whole and ranks > _PROCESSES:
        raise BackendError(
            f"strategy {strategy.kind}: fit would run all {ranks} ranks on this machine, and at"
            f" most {_PROCESSES}; use fewer: --set replicas.workers=0"
        )
    shape = {"workers": 0, "nproc_per_node": ranks if whole else 1, "elastic": None}
    plan = plan_run(spec.with_(replicas=shape, resources=NO_GPUS), folder)
    forks = Forks("k8sjob.fitting.meter")
    with signals_as_exit(), temporary_folder("fit") as temporary, forks as forking:
        first, second = (
            _run(plan, temporary / str(scale), forking, options | {"scale": scale})
            # Two measurements give a line for every batch size, as activations grow with the batch.
            for scale in (1, 2)
        )
    # Equal where batches come from no DataLoader, or one batch has all of the data.
    doubled = second if second.batch != first.batch else None
    half = max(first.batch // 2, 1)
    sizes = sorted(set(batch_sizes or (half, first.batch, 2 * first.batch)))
    if doubled is None:
        if batch_sizes and sizes != [first.batch]:
            raise BackendError(
                f"--batch-sizes: the script has batches of {first.batch} that come from no"
                " DataLoader, or are as large as its data; set its own batch size instead"
            )
        # Without a second measurement only this batch size is known.
        sizes = [first.batch]
    room = None if memory is None else memory - ALLOWANCE
    rows, largest = list[dict[str, Any]](), dict[str, int | None]()
    kinds, divided = ((strategy.kind,), 1) if whole else (STRATEGIES, ranks)
    reshard = getattr(strategy, "reshard", True)

    def parts_of(kind: str, batch: int) -> dict[str, int]:
        model = first.at(batch, doubled) if doubled else first
        return peak(model, kind, divided, reshard=reshard)

    for kind in kinds:
        for batch in sizes:
            parts = parts_of(kind, batch)
            total = parts.pop("total")
            rows.append({"strategy": kind, "batch": batch, "peak": total,
                         "fits": None if room is None else total <= room,
                         "largest": max(parts, key=parts.__getitem__), "parts": parts})  # fmt: skip
        largest[kind] = None
        if room is not None and doubled is not None:
            largest[kind] = largest_batch(lambda batch: parts_of(kind, batch)["total"], room)  # noqa: B023 - called at once
    advice = "Give --gpu-memory, or set resources.gpu_type, to see what fits."
    if room is not None:
        advice = _advice(rows, largest)
    return {"ranks": ranks, "optimizer": first.optimizer_class, "batch": first.batch,
            "gpu_memory": memory, "allowance": ALLOWANCE, "rows": rows, "largest": largest,
            "advice": advice}  # fmt: skip


def _advice(rows: Sequence[Mapping[str, Any]], best: Mapping[str, int | None]) -> str:
    fitting = [row["strategy"] for row in rows if row["fits"]]
    first = rows[0]["strategy"]
    if first in fitting:
        most = best[first]
        return f"{first} fits" + (f", with batches of up to {most} a rank." if most else ".")
    if fitting:
        return "ddp does not fit; set strategy.kind: fsdp."
    smaller = next((kind for kind, most in best.items() if most), None)
    if smaller:
        return f"Make batches smaller: {smaller} fits with {best[smaller]} a rank."
    return "Nothing fits: use more ranks with fsdp, a larger GPU, or checkpoint_activations."


def _run(plan: Plan, root: Path, forks: Forks, options: Mapping[str, Any]) -> Measured:
    folder, ranks = root / "record", plan.spec.world_size
    limits = {"quiet": _QUIET, "silent": _LIMIT, "limit": _LIMIT}
    request = {"folder": str(folder), "ranks": ranks, "options": {**options}, **limits}
    answer = forks.start(plan, root, request)
    script = plan.spec.run.script or plan.spec.run.module
    files = [folder / f"memory-{rank}.json" for rank in range(ranks)]
    if not all(file.exists() for file in files):
        places = "".join(f" at {place}" for place in answer["places"].values() if place)
        raise BackendError(
            f"{script}: three optimizer steps did not end within {_LIMIT:.0f} seconds{places};"
            " give it a smaller model or batch"
        )
    by_rank = [json.loads(file.read_text()) for file in files]
    if error := next((rank["error"] for rank in by_rank if "error" in rank), None):
        raise BackendError(f"{script} fails: {error}")
    # The rank with the most memory decides, as a stage of a pipeline with an embedding.
    largest = max(by_rank, key=lambda rank: rank.get("retained", 0) + rank.get("parameters", 0))
    if "parameters" not in largest:
        raise BackendError(
            f"{script}: no optimizer step was seen; fit needs a script that trains a torch.nn"
            " module with an optimizer of torch.optim, in the process that it is started in"
        )
    blocks = tuple(ModelBlock(*block) for block in largest.pop("blocks"))
    return Measured(**largest, blocks=blocks)
