"""Trains Keras models by job.fit in several cases in one group, and tells what the tests compare.

The one argument is a JSON object {name: case}; a case has OPTIONS. Rank 0 tells
{name: {"history", "weights", "marks", ...}}.
"""

import json
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import keras
import torch
from keras import layers
from sklearn.datasets import load_digits

from k8sjob import runtime

OPTIONS = {
    "kind": "keras",
    "options": {},
    "model": "dense",
    "optimizer": ["Adam", {"learning_rate": 3e-3}],
    "loss": {"from_logits": True},
    "epochs": 2,
    "samples": 100,
    "batch": 32,
    "tail": "pad",
    "weighted": False,
    "callbacks": [],
    "folder": None,
    "twice": False,
}


def dense():
    return [layers.Flatten(), layers.Dense(32, activation="tanh", kernel_regularizer="l2")]


def conv():
    return [
        layers.Conv2D(4, 3, use_bias=False),
        layers.BatchNormalization(momentum=0.9),
        layers.ReLU(),
        layers.Flatten(),
        layers.Dropout(0.3, seed=5),
        layers.Dropout(0.3),
    ]


class TwoOptimizers(keras.Sequential):
    """Trains its last layer once more, with an optimizer that nobody knows of."""

    def train_step(self, data):
        logs = super().train_step(data)
        if not hasattr(self, "second"):
            self.second = keras.optimizers.SGD(0.1)
        found = [variable.value.grad + data[0].mean() for variable in self.layers[-1].weights]
        with torch.no_grad():
            self.second.apply(found, self.layers[-1].weights)
        return logs


class StopsOnOne(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = torch.distributed.get_rank() == 1 and batch == 1


class StopsOnOneAtTheEnd(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = torch.distributed.get_rank() == 1


def stopping_on_one(model):
    def stop(batch, logs):
        model.stop_training = torch.distributed.get_rank() == 1 and batch == 1

    return keras.callbacks.LambdaCallback(on_train_batch_end=stop)


class Boundless(keras.callbacks.Callback):
    """Epochs long enough for a signal to come."""

    def on_train_batch_end(self, batch, logs=None):
        torch.distributed.barrier()


def callback(name, folder, model):
    if name == "stop":
        return keras.callbacks.EarlyStopping("val_loss", min_delta=9.0, patience=0)
    if name == "stop on one":
        return StopsOnOne()
    if name == "stop on one by a function":
        return stopping_on_one(model)
    if name == "stop on one at the end":
        return StopsOnOneAtTheEnd()
    if name == "backup":
        return keras.callbacks.BackupAndRestore("backup")
    if name == "slow":
        return Boundless()
    mine = Path(folder) / f"rank-{torch.distributed.get_rank()}.keras"
    return keras.callbacks.ModelCheckpoint(mine)


def build(case):
    if case["model"] == "torch":
        return torch.nn.Linear(64, 10)
    kind = TwoOptimizers if case["model"] == "two" else keras.Sequential
    body = conv() if case["model"] == "conv" else dense()
    model = kind([keras.Input((8, 8, 1)), *body, layers.Dense(10)])
    name, settings = case["optimizer"]
    if name:
        model.compile(
            optimizer=getattr(keras.optimizers, name)(**settings),
            loss=keras.losses.SparseCategoricalCrossentropy(**case["loss"]),
            metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(3, name="top3")],
        )
    return model


def mark(values):
    flat = torch.cat([value.detach().double().flatten() for value in values])
    return zlib.crc32(flat.numpy().tobytes())


def train(job, case):
    job.config = replace(job.config, strategy=case["kind"], options=case["options"])
    found = load_digits()
    images, labels = found.images[..., None].astype("float32") / 16, found.target
    keras.utils.set_random_seed(3)
    model = build(case)
    first, count = slice(0, case["samples"]), slice(1000, 1101)
    data = (images[first], labels[first])
    if case["weighted"]:
        data += ((labels[first] % 3 + 0.5).astype("float32"),)
    history = job.fit(
        model,
        data,
        epochs=case["epochs"],
        global_batch=case["batch"],
        validation=(images[count], labels[count]),
        callbacks=[callback(name, case["folder"], model) for name in case["callbacks"]],
        tail=case["tail"],
    )
    marks = job.gather(torch.tensor(mark(variable.value for variable in model.weights)))
    state = mark(variable.value for variable in model.optimizer.variables)
    drawn = job.gather(torch.tensor(mark([model(images[:8], training=True)])))
    histories = mark([torch.tensor(list(history.history.values()), dtype=torch.float64)])
    return {
        "history": history.history,
        "weights": [round(float(v.value.detach().double().norm()), 6) for v in model.weights],
        "marks": [int(value) for value in marks],
        "states": [int(value) for value in job.gather(torch.tensor(state))],
        "histories": [int(value) for value in job.gather(torch.tensor(histories))],
        "drawn": [int(value) for value in drawn],
    }


def attempt(job, case):
    """The result, or what was refused."""
    try:
        return train(job, {**OPTIONS, **case})
    except (ValueError, TypeError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        keras.utils.clear_session(free_memory=False)  # the same names again


def main():
    cases = json.loads(sys.argv[1])
    with runtime.session(seed=3) as job:
        results = {}
        for name, case in cases.items():
            results[name] = attempt(job, case)
            if case.get("twice"):
                results[f"{name} again"] = attempt(job, case)
        if job.is_main:
            sys.stdout.write(f"RESULT {json.dumps(results)}\n")
            sys.stdout.flush()


main()
