"""The peak memory of a rank that `k8sjob fit` estimates, beside the one that it has.

    python bench/fit.py [MODEL...]        # two ranks on CPUs, ddp and fsdp
    python bench/fit.py gpu [MODEL...]    # one rank on a GPU
    python bench/fit.py estimates         # for bench/gpu.py, where k8sjob is not installed

As a program (`python bench/fit.py rank MODEL...`) it is one rank that trains models in turn and
counts what torch's allocator gives; `one MODEL` is the script that `fit` runs.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ranks

from k8sjob.contract import RuntimeConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

HERE = Path(__file__).resolve()
BATCH, STEPS, RANKS = 8, 3, 2
STRATEGIES = ("ddp", "fsdp")
GPU_BATCH = 512  # of the one rank on a GPU: with less, the workspace of cuBLAS is much of the peak
ESTIMATES = HERE.with_name("fit-estimates.json")


def models() -> dict[str, tuple[Any, Any, Any]]:
    """Model -> what makes it, the shape of a sample (or a number of tokens), the optimizer."""
    import torch
    from torch import nn

    optim = torch.optim
    image = (3, 64, 64)

    def lm(kind: str) -> nn.Module:
        layers: dict[str, Any] = {"lstm": nn.LSTM, "gru": nn.GRU}
        return Recurrent(layers[kind](256, 256, 2, batch_first=True), 5000, 256)

    class Recurrent(nn.Module):
        def __init__(self, core: nn.Module, words: int, width: int) -> None:
            super().__init__()
            self.embedding, self.core = nn.Embedding(words, width), core
            self.head = nn.Linear(width, words)

        def forward(self, tokens):
            return self.head(self.core(self.embedding(tokens))[0]).mean((1, 2))[:, None]

    class Transformer(nn.Module):
        def __init__(self, words: int, width: int, layers: int) -> None:
            super().__init__()
            self.embedding = nn.Embedding(words, width)
            layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            self.head = nn.Linear(width, words)

        def forward(self, tokens):
            return self.head(self.layers(self.embedding(tokens))).mean((1, 2))[:, None]

    def sequential(*widths: int) -> nn.Module:
        parts = [(nn.Linear(a, b), nn.GELU()) for a, b in pairwise(widths)]
        return nn.Sequential(*chain.from_iterable(parts))

    def autoencoder() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 256, 3, 2, 1), nn.ReLU(),
            nn.ConvTranspose2d(256, 64, 2, 2), nn.ReLU(), nn.ConvTranspose2d(64, 3, 2, 2),
        )  # fmt: skip

    def audio() -> nn.Module:
        layers = [(nn.Conv1d(a, b, 9, 4, 4), nn.BatchNorm1d(b), nn.ReLU())
                  for a, b in ((1, 64), (64, 128), (128, 256), (256, 512))]  # fmt: skip
        return nn.Sequential(*chain.from_iterable(layers), nn.AdaptiveAvgPool1d(1), nn.Flatten())

    return {
        "mlp": (partial(sequential, 512, 2048, 2048, 512), (512,), (optim.Adam, {})),
        "deep-mlp": (partial(sequential, *[512] * 24), (512,), (optim.AdamW, {})),
        "autoencoder": (autoencoder, image, (optim.Adam, {})),
        "audio": (audio, (1, 8000), (optim.RMSprop, {})),
        "lstm": (partial(lm, "lstm"), 32, (optim.Adam, {})),
        "gru": (partial(lm, "gru"), 32, (optim.SGD, {})),
        "transformer": (partial(Transformer, 5000, 256, 6), 64, (optim.AdamW, {})),
        "wide-transformer": (partial(Transformer, 2000, 512, 4), 32, (optim.AdamW, {})),
        **({} if importlib.util.find_spec("torchvision") is None else vision_models()),
    }


def vision_models() -> dict[str, tuple[Any, Any, Any]]:
    """The same of torchvision's models."""
    from torch import optim
    from torchvision import models as vision

    sgd, image = (optim.SGD, {"momentum": 0.9}), (3, 64, 64)
    vit = partial(vision.VisionTransformer, 64, 8, 6, 4, 256, 1024)
    return {
        "vit": (vit, image, (optim.AdamW, {})),
        **{
            name: (partial(getattr(vision, name), num_classes=100), image, optimizer)
            for name, optimizer in {
                "resnet18": sgd,
                "resnet50": sgd,
                "resnext50_32x4d": (optim.Adam, {}),
                "vgg11": sgd,
                "alexnet": sgd,
                "densenet121": (optim.Adam, {}),
                "mobilenet_v3_large": (optim.RMSprop, {}),
                "efficientnet_b0": (optim.AdamW, {}),
                "convnext_tiny": (optim.AdamW, {}),
                "swin_t": (optim.AdamW, {}),
                "shufflenet_v2_x1_0": (optim.Adagrad, {}),
            }.items()
        },
    }


def train(job: Any, name: str, batch: int) -> None:
    """A few steps of a model, on samples that take no room to speak of."""
    import torch
    from torch.utils.data import Dataset

    build, shape, optimizer = models()[name]

    class Samples(Dataset):
        def __len__(self) -> int:
            return 8 * batch

        def __getitem__(self, index: int):
            one = torch.randint(0, 2000, (shape,)) if isinstance(shape, int) else torch.rand(shape)
            return one, torch.zeros(1)

    def loss(output, target):
        return output.float().square().mean() + target.mean()

    run = job.prepare(build, loss=loss, optimizer=optimizer)
    batches = chain.from_iterable(run.batches(Samples(), batch_size=batch) for _ in run.epochs(9))
    for inputs, targets in islice(batches, STEPS):
        run.step(inputs, targets)


def rank(names: list[str]) -> dict[str, int]:
    """Model -> bytes that torch's allocator has given at most, while a rank trains it."""
    from torch.profiler import ProfilerActivity, profile

    from k8sjob import runtime

    peaks = {}
    with runtime.session() as job:
        if job.device.type == "cuda":
            return {name: on_gpu(job, name) for name in names}
        for name in names:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                train(job, name, BATCH)
            peaks[name] = allocated(profiler.profiler.kineto_results.experimental_event_tree())
    return peaks


def allocated(roots: Iterable[Any]) -> int:
    """The most bytes at a time in a profiler's tree of events."""
    changes: list[tuple[int, int, int]] = []
    nodes = [(root, False) for root in roots]
    while nodes:
        node, copies = nodes.pop()
        copies = copies or node.name.startswith(("c10d::", "gloo:"))  # NCCL makes no such copies
        if node.name == "[memory]":
            size = 0 if copies else node.extra_fields.alloc_size
            changes.append((node.start_time_ns, node.extra_fields.ptr, size))
        nodes += [(child, copies) for child in node.children]
    live: dict[int, int] = {}
    held = most = 0
    for _, address, size in sorted(changes):
        held -= live.pop(address, 0)
        if size > 0:
            live[address] = size
            held += size
        most = max(most, held)
    return most


def on_gpu(job: Any, name: str) -> int:
    """Bytes that torch's allocator has given at most, with the workspace of cuDNN and cuBLAS."""
    import torch

    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    train(job, name, GPU_BATCH)
    most = torch.cuda.max_memory_allocated() - before
    gc.collect()
    torch.cuda.empty_cache()
    return most


def estimated(name: str, world: int, batch: int) -> list[dict[str, Any]]:
    """What `fit` says of a model, a row for each strategy."""
    from k8sjob.fitting.estimate import fit
    from k8sjob.spec import JobSpec

    spec = {"name": "fit", "image": "none", "run": {"script": HERE.name, "args": ["one", name]}}
    spec["replicas"] = {"workers": 0, "nproc_per_node": world}
    rows: list[dict[str, Any]] = fit(
        JobSpec.model_validate(spec), batch_sizes=[batch], folder=HERE.parent
    )["rows"]
    return rows


def estimates(names: Iterable[str]) -> dict[str, float]:
    """Model -> bytes that `fit` estimates for the one rank on a GPU."""
    rows = {name: estimated(name, 1, GPU_BATCH) for name in names}
    return {
        name: next(row["peak"] for row in found if row["strategy"] == "ddp")
        for name, found in rows.items()
    }


def measure(names: list[str], world: int, batch: int) -> dict[str, dict[str, dict[str, float]]]:
    """Strategy -> model -> bytes estimated, bytes measured (the rank with the most), the ratio."""
    kinds = STRATEGIES[:world]  # one rank has nothing to divide
    table: dict[str, dict[str, dict[str, float]]] = {kind: {} for kind in kinds}
    real = {}
    for kind in kinds:
        config = RuntimeConfig(strategy=kind).encode()
        each = ranks.results(HERE, "rank", *names, world=world, K8SJOB_CONFIG=config)
        real[kind] = {name: max(one[name] for one in each) for name in names}
    for name in names:
        for row in (row for row in estimated(name, world, batch) if row["strategy"] in kinds):
            kind, peak = row["strategy"], real[row["strategy"]][name]
            table[kind][name] = {
                **row["parts"],
                "estimate": row["peak"],
                "measured": peak,
                "ratio": row["peak"] / peak,
            }
    return table


def main() -> None:
    """One rank, the script that `fit` runs, or the table, with an error of each estimate."""
    role, names = (sys.argv[1:2] or [""])[0], sys.argv[2:]
    if role == "rank":
        print(f"RESULT {json.dumps(rank(names))}")
    elif role == "one":
        from k8sjob import runtime

        with runtime.session() as job:
            train(job, names[0], BATCH)
    elif role == "estimates":
        ESTIMATES.write_text(json.dumps(estimates(names or models()), indent=2) + "\n")
        print(f"written: {ESTIMATES}")
    else:
        gpu = role == "gpu"
        asked = (names if gpu else sys.argv[1:]) or list(models())
        world, batch = (1, GPU_BATCH) if gpu else (RANKS, BATCH)
        for kind, rows in measure(asked, world, batch).items():
            for name, row in rows.items():
                sizes = ", ".join(
                    f"{key} {value / 1e6:.1f}"
                    for key, value in row.items()
                    if key != "ratio" and value
                )
                print(f"{kind} {name}: {100 * row['ratio'] - 100:+.1f} % ({sizes} MB)")


if __name__ == "__main__":
    main()
