"""job.fit under keras_mesh beside model.fit under keras.distribution by hand: samples/s, memory.

As a program it is one rank; as a module it starts the ranks. Both models are trained in the same
processes, an epoch of one after an epoch of the other.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import ranks
import turns

from k8sjob.contract import RuntimeConfig

HERE = Path(__file__).resolve()
WIDTH, BATCH, SAMPLES, TURNS = 2048, 64, 8192, 8
LAYOUT = {
    ".*/up/kernel": [None, "model"],
    ".*/up/bias": ["model"],
    ".*/up/output": ["data", "model"],
    ".*/down/kernel": ["model", None],
}
SHAPES = {"data 2": 1, "model 2": 2}


def rank() -> dict[str, Any]:
    """What this rank measures."""
    import keras
    import torch
    from torch.utils.data import DataLoader, Subset, TensorDataset

    from k8sjob import runtime
    from k8sjob.runtime.keras.mesh import ShardedModel

    def build():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((784,)),
                keras.layers.Dense(WIDTH, activation="relu", name="up"),
                keras.layers.Dense(512, name="down"),
                keras.layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.Adam(1e-4), loss=loss)
        return model

    class Clock(keras.callbacks.Callback):
        """The seconds of an epoch's steps."""

        def on_epoch_begin(self, *_):
            self.begun = time.perf_counter()

        def on_epoch_end(self, *_):
            self.seconds = time.perf_counter() - self.begun

    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(SAMPLES, 784, generator=generator),
        torch.randint(10, (SAMPLES,), generator=generator),
    )
    with runtime.session() as job:
        ours, by_hand = build(), build()
        mesh = ShardedModel(job._context, ours).mesh
        share = Subset(data, range(mesh.data_rank, SAMPLES, mesh.data_size))
        loader = DataLoader(share, BATCH // mesh.data_size, shuffle=True)
        clock = Clock()

        def hand():
            by_hand.fit(loader, epochs=1, verbose=0, callbacks=[clock])
            return clock.seconds

        def k8sjob():
            job.fit(ours, data, epochs=1, global_batch=BATCH, callbacks=[clock])
            return clock.seconds

        taken = turns.alternate({"hand": hand, "k8sjob": k8sjob}, TURNS + 1)
        taken = {by: seconds[1:] for by, seconds in taken.items()}  # the first one compiles
        pieces = ShardedModel(job._context, ours)
        found = [pieces.read(variable) for variable in (*ours.weights, *ours.optimizer.variables)]
        local = [getattr(value, "to_local", lambda value=value: value)() for value in found]
        held = sum(value.numel() * value.element_size() for value in local)
    return {**taken, "bytes": held}


def measure() -> dict[str, dict[str, float]]:
    """By shape: medians of both, and of the ratios of neighboring turns; what a rank holds."""
    return {name: _summary(_group(model)) for name, model in SHAPES.items()}


def _group(model: int) -> dict[str, Any]:
    options = {"model": model, "layout": LAYOUT if model > 1 else {}}
    first, *_ = ranks.results(
        HERE,
        world=2,
        KERAS_BACKEND="jax",
        TF_CPP_MIN_LOG_LEVEL="2",
        K8SJOB_CONFIG=RuntimeConfig(strategy="keras_mesh", options=options).encode(),
    )
    return first


def _summary(found: dict[str, Any]) -> dict[str, float]:
    pairs = zip(found["hand"], found["k8sjob"], strict=True)
    return {
        "hand": SAMPLES / statistics.median(found["hand"]),
        "k8sjob": SAMPLES / statistics.median(found["k8sjob"]),
        "ratio": statistics.median(hand / ours for hand, ours in pairs),
        "bytes_of_a_rank": found["bytes"],
        "load": os.getloadavg()[0],
    }


if __name__ == "__main__":
    print(f"RESULT {json.dumps(rank())}")
