"""Trains divided Keras models by job.fit in several cases, see cases.py; tells their curves."""

import time
from dataclasses import replace
from pathlib import Path

import keras
import torch
from cases import mark, tell
from cases import text as prose
from keras_models import conv, dense, guarded, shared, text_model
from sklearn.datasets import load_digits
from torch.utils.data import Dataset, Subset, TensorDataset

from k8sjob import strategies
from k8sjob.runtime.keras.mesh import ShardedModel, distributed

OPTIONS = {
    "options": {},
    "model": "dense",
    "dropout": 0.0,
    "penalty": None,
    "constraint": None,
    "epochs": None,
    "steps": 20,
    "batch": 32,
    "callbacks": [],
    "early": False,
    "stuck": False,
    "at_once": 1,
    "largest": False,
    "evaluate": False,
    "ours": True,
    "fit": True,
    "save": None,
    "unpicklable": False,  # the loss holds a lock
    "twice": False,
}


class Turns(Dataset):
    """Other samples in each epoch, so that an epoch of one step tells the loss of that step."""

    def __init__(self, data, count, *, stuck):
        self.data, self.count, self.turn, self.stuck = data, count, 0, stuck

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if self.stuck and self.turn == 2 and torch.distributed.get_rank() == 1:
            time.sleep(100)
        return self.data[self.turn * self.count + index]


class Turn(keras.callbacks.Callback):
    def __init__(self, data):
        super().__init__()
        self.data = data

    def on_epoch_begin(self, epoch, logs=None):
        self.data.turn = epoch


class Largest(keras.metrics.Metric):
    """One whose state is no sum."""

    def __init__(self, name="largest", dtype=None):
        super().__init__(name=name, dtype=dtype)
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, _, outputs, sample_weight=None):
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(outputs)))

    def result(self):
        return keras.ops.convert_to_tensor(self.largest)


class Slow(keras.callbacks.Callback):
    """Epochs long enough for a signal to come."""

    def on_train_batch_end(self, batch, logs=None):
        torch.distributed.barrier()


def text(case):
    return keras.Model(*text_model(case))


def build(case):
    builders = {"dense": dense, "conv": conv, "text": text, "shared": shared}
    model = builders[case["model"]](case)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3),
        loss=guarded() if case["unpicklable"] else loss,
        metrics=["accuracy", Largest()] if case["largest"] else ["accuracy"],
        steps_per_execution=case["at_once"],
    )
    return model


def samples(case):
    if case["model"] == "text":
        return prose()[0]
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(-1) / 16
    return TensorDataset(images, torch.tensor(found.target))


def train(job, case):
    job._context.config = replace(
        job._context.config, strategy="keras_mesh", options=case["options"]
    )
    options = strategies.STRATEGIES["keras_mesh"].settings(case["options"])
    before = keras.distribution.distribution()
    keras.distribution.set_distribution(None)
    keras.utils.set_random_seed(3)
    early = build(case) if case["early"] else None
    keras.distribution.set_distribution(before)
    with distributed(job._context.group, options):
        if not case["ours"]:
            mesh = keras.distribution.DeviceMesh((job.world_size,), ["batch"])
            keras.distribution.set_distribution(keras.distribution.DataParallel(mesh))
        return fit(job, case, early or build(case))


def fit(job, case, model):
    if not case["fit"]:
        job.prepare(lambda: model, loss=None, optimizer=None)
    data = samples(case)
    turns = Subset(data, range(100))
    if case["epochs"] is None:
        turns = Turns(data, case["batch"], stuck=case["stuck"])
    named = {
        "slow": Slow,
        "checkpoint": lambda: keras.callbacks.ModelCheckpoint("digits.keras"),
        "best": lambda: keras.callbacks.EarlyStopping("val_loss", restore_best_weights=True),
    }
    history = job.fit(
        model,
        turns,
        epochs=case["epochs"] or case["steps"],
        global_batch=case["batch"],
        validation=Subset(data, range(101)) if case["evaluate"] else None,
        callbacks=[Turn(turns), *(named[name]() for name in case["callbacks"])],
    ).history
    pieces = ShardedModel(job._context, model)
    found = [pieces.read(variable) for variable in model.weights]
    local = [getattr(value, "to_local", lambda value=value: value)() for value in found]
    if case["save"]:
        job.save_model(model, Path(case["save"]))
    sizes = torch.tensor([sum(value.numel() for value in local)])
    drawn = torch.tensor(keras.ops.convert_to_numpy(keras.random.uniform((4,))))
    return {
        "losses": history["loss"],
        "history": history,
        "weights": [float(job.all_reduce(_norm(value)) / job.world_size) for value in found],
        "evaluation": {name: values[-1] for name, values in history.items() if "val_" in name},
        "marks": [
            (rank % options_of(case)["model"], int(value))
            for rank, value in enumerate(job.gather(torch.tensor(mark(local))))
        ],
        "drawn": [int(value) for value in job.gather(torch.tensor(mark([drawn])))],
        "sizes": [int(value) for value in job.gather(sizes)],
    }


def options_of(case):
    return strategies.STRATEGIES["keras_mesh"].settings(case["options"])


def _norm(value):
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole.double().norm()


tell(train, OPTIONS, lambda: keras.utils.clear_session(free_memory=False))  # the same names again
