"""Trains Keras models by job.fit in several cases, see cases.py; tells histories and weights."""

from dataclasses import replace
from pathlib import Path

import keras
import torch
from cases import mark, tell
from keras import layers
from keras_models import guarded, shared
from sklearn.datasets import load_digits

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
    "class_weight": False,  # the same weights as those of "weighted"
    "fit": {},  # more of job.fit
    "data": "arrays",
    "callbacks": [],
    "folder": None,
    "ranked": False,
    "unpicklable": False,  # the loss holds a lock
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


class Ranked(keras.metrics.Metric):
    """Tells what each aggregation makes of 1 on rank 0, 2 on rank 1, ..."""

    def __init__(self):
        super().__init__(name="ranked")
        kinds = ("sum", "mean", "only_first_replica")
        self.parts = [self.add_variable((), "zeros", aggregation=kind, name=kind) for kind in kinds]

    def update_state(self, *_, sample_weight=None):
        for part in self.parts:
            part.assign(torch.distributed.get_rank() + 1.0)

    def result(self):
        total, mean, first = self.parts
        return total * 100 + mean * 10 + first


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
    mine = Path(folder or ".") / f"rank-{torch.distributed.get_rank()}.keras"
    return {
        "stop": lambda: keras.callbacks.EarlyStopping("val_loss", min_delta=9.0, patience=0),
        "stop on one": StopsOnOne,
        "stop on one by a function": lambda: stopping_on_one(model),
        "stop on one at the end": StopsOnOneAtTheEnd,
        "backup": lambda: keras.callbacks.BackupAndRestore("backup"),
        "slow": Boundless,
        "save": lambda: keras.callbacks.ModelCheckpoint(mine),
    }[name]()


def build(case):
    if case["model"] == "torch":
        return torch.nn.Linear(64, 10)
    if case["model"] == "shared":
        model = shared(case)
    else:
        kind = TwoOptimizers if case["model"] == "two" else keras.Sequential
        body = conv() if case["model"] == "conv" else dense()
        model = kind([keras.Input((8, 8, 1)), *body, layers.Dense(10)])
    name, settings = case["optimizer"]
    if name:
        loss = keras.losses.SparseCategoricalCrossentropy(**case["loss"])
        model.compile(
            optimizer=getattr(keras.optimizers, name)(**settings),
            loss=guarded() if case["unpicklable"] else loss,
            metrics=[
                "accuracy",
                keras.metrics.SparseTopKCategoricalAccuracy(3, name="top3"),
                *([Ranked()] if case["ranked"] else []),
            ],
        )
    return model


def train(job, case):
    job._context.config = replace(
        job._context.config, strategy=case["kind"], options=case["options"]
    )
    found = load_digits()
    images, labels = found.images[..., None].astype("float32") / 16, found.target
    keras.utils.set_random_seed(3)
    model = build(case)
    first, count = slice(0, case["samples"]), slice(1000, 1101)
    data = (images[first], labels[first])
    if case["weighted"]:
        data += ((labels[first] % 3 + 0.5).astype("float32"),)
    more = dict(case["fit"])
    if case["class_weight"]:
        more["class_weight"] = {label: label % 3 + 0.5 for label in range(10)}
    if case["data"] == "generator":
        data = (pair for pair in zip(*data, strict=True))
    history = job.fit(
        model,
        data,
        epochs=case["epochs"],
        global_batch=case["batch"],
        validation=None if "validation_split" in more else (images[count], labels[count]),
        callbacks=[callback(name, case["folder"], model) for name in case["callbacks"]],
        tail=case["tail"],
        **more,
    )
    marks = job.gather(torch.tensor(mark(variable.value for variable in model.weights)))
    state = mark(variable.value for variable in model.optimizer.variables)
    rows = images[: job.world_size * 2 - 1]  # one rank has a row more than the others
    predicted = [job.predict(model, rows[:count], batch_size=1) for count in (1, len(rows))]
    expected = model.predict(rows, verbose=0)
    drawn = job.gather(torch.tensor(mark([model(images[:8], training=True)])))
    histories = mark([torch.tensor(list(history.history.values()), dtype=torch.float64)])
    return {
        "history": history.history,
        "weights": [round(float(v.value.detach().double().norm()), 6) for v in model.weights],
        "apart": max(float(abs(part - expected[: len(part)]).max()) for part in predicted),
        "predicted": [list(part.shape) for part in predicted],
        "marks": [int(value) for value in marks],
        "states": [int(value) for value in job.gather(torch.tensor(state))],
        "histories": [int(value) for value in job.gather(torch.tensor(histories))],
        "drawn": [int(value) for value in drawn],
    }


tell(train, OPTIONS, lambda: keras.utils.clear_session(free_memory=False))  # the same names again
