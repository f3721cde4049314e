"""Trains Keras models in several cases in one group, and tells for each what the tests compare.

The one argument is a JSON object {name: case}; a case has OPTIONS. Rank 0 tells
{name: {"losses", "weights", "marks", ...}}.
"""

import json
import sys
import zlib
from dataclasses import replace

import keras
import torch
from keras import layers
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import Subset, TensorDataset

from k8sjob import runtime

OPTIONS = {
    "kind": "keras",
    "options": {},
    "model": "dense",
    "dropout": 0.0,
    "penalty": None,
    "constraint": None,
    "optimizer": ["torch", "Adam", {"lr": 3e-3}],
    "schedule": None,
    "steps": 20,
    "epochs": 99,
    "batch": 32,
    "samples": None,
    "tail": "pad",
    "twice": False,
}


def dense(case):
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Flatten(),
            layers.Dense(
                32,
                activation="tanh",
                kernel_regularizer=case["penalty"],
                kernel_constraint=case["constraint"],
            ),
            layers.Dropout(case["dropout"], seed=5),
            layers.Dense(10),
        ]
    )


def conv(case):
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dropout(case["dropout"], seed=5),
            layers.Dropout(case["dropout"]),
            layers.Dense(10),
        ]
    )


def named(_):
    """A model of two inputs, which are given by name."""
    left, right = keras.Input((64,), name="left"), keras.Input((64,), name="right")
    mixed = layers.Add()([layers.Dense(16)(left), layers.Dense(16)(right)])
    return keras.Model({"left": left, "right": right}, layers.Dense(10)(layers.ReLU()(mixed)))


def inside(_):
    return nn.Sequential(layers.Flatten(), nn.Linear(64, 10))


def unbuilt(_):
    return keras.Sequential([layers.Flatten(), layers.Dense(10)])


def plain(_):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


BUILD = {build.__name__: build for build in (dense, conv, named, inside, unbuilt, plain)}


def mark(values):
    flat = torch.cat([value.detach().double().flatten() for value in values])
    return zlib.crc32(flat.numpy().tobytes())


def train(job, case):
    job.config = replace(job.config, strategy=case["kind"], options=case["options"])
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(-1) / 16
    data = TensorDataset(images, torch.tensor(found.target))
    if case["samples"]:
        data = Subset(data, range(case["samples"]))
    torch.manual_seed(3)
    keras.utils.set_random_seed(3)
    library, name, settings = case["optimizer"]
    module = torch.optim if library == "torch" else keras.optimizers
    run = job.prepare(
        lambda: BUILD[case["model"]](case),
        loss=functional.cross_entropy,
        optimizer=(getattr(module, name), settings),
        scheduler=case["schedule"] and (torch.optim.lr_scheduler.StepLR, {"step_size": 1}),
    )
    losses = []
    for _ in run.epochs(case["epochs"]):
        for inputs, targets in run.batches(data, global_batch=case["batch"], tail=case["tail"]):
            given = inputs
            if case["model"] == "named":
                given = {"right": inputs.flatten(1) * 2, "left": inputs.flatten(1)}
            loss = run.step(given, targets)
            losses.append(job.reduce(loss=(float(loss) * len(targets), len(targets)))["loss"])
            if run.steps == case["steps"]:
                break
        if run.steps == case["steps"]:
            break
    model = run.model
    marks = job.gather(torch.tensor(mark(variable.value for variable in model.weights)))
    evaluation = {}
    if case["model"] != "named":
        evaluation = run.evaluate(Subset(data, range(101)), batch_size=16)
    model.train()
    outputs = run._strategy.wrapped(images[:8]) if case["model"] != "named" else torch.zeros(1)
    drawn = job.gather(torch.tensor(mark([outputs])))
    return {
        "losses": losses,
        "weights": [round(float(v.value.detach().double().norm()), 6) for v in model.weights],
        "statistics": {
            variable.name: float(variable.value.double().norm())
            for variable in model.non_trainable_weights
        },
        "marks": [int(value) for value in marks],
        "drawn": [int(value) for value in drawn],
        "evaluation": evaluation,
    }


def attempt(job, case):
    """The result, or what was refused."""
    try:
        return train(job, {**OPTIONS, **case})
    except (ValueError, TypeError) as error:
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
