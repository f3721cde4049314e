"""Trains Keras models in several cases, see cases.py; tells their curves and weights."""

from dataclasses import replace

import keras
import torch
from cases import curve, guarded, mark, tell
from cases import text as prose
from keras import layers
from keras_models import conv, dense, named, shared, text_model
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import Subset, TensorDataset

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
    "unpicklable": False,  # the loss holds a lock
}


def text(case):
    window, letters = text_model(case)
    return keras.Model(window, layers.Permute((2, 1))(letters))  # as torch's loss takes them


def inside(_):
    return nn.Sequential(layers.Flatten(), nn.Linear(64, 10))


def unbuilt(_):
    return keras.Sequential([layers.Flatten(), layers.Dense(10)])


def plain(_):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


BUILDERS = (dense, conv, text, named, inside, unbuilt, plain, shared)
BUILD = {build.__name__: build for build in BUILDERS}


def samples(case):
    if case["model"] == "text":
        return prose()[0]
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(-1) / 16
    return TensorDataset(images, torch.tensor(found.target))


def by_name(images):
    return {"right": images.flatten(1) * 2, "left": images.flatten(1)}


def train(job, case):
    job._context.config = replace(
        job._context.config, strategy=case["kind"], options=case["options"]
    )
    data = samples(case)
    if case["samples"]:
        data = Subset(data, range(case["samples"]))
    torch.manual_seed(3)
    keras.utils.set_random_seed(3)
    library, name, settings = case["optimizer"]
    module = torch.optim if library == "torch" else keras.optimizers
    run = job.prepare(
        lambda: BUILD[case["model"]](case),
        loss=guarded() if case["unpicklable"] else functional.cross_entropy,
        optimizer=(getattr(module, name), settings),
        scheduler=case["schedule"] and (torch.optim.lr_scheduler.StepLR, {"step_size": 1}),
    )
    given = by_name if case["model"] == "named" else lambda inputs: inputs
    losses = curve(job, run, data, case, given)
    model = run.model
    first = torch.stack([data[number][0] for number in range(8)])
    marks = job.gather(torch.tensor(mark(variable.value for variable in model.weights)))
    evaluation = {}
    if case["model"] != "named":
        evaluation = run.evaluate(Subset(data, range(101)), batch_size=16)
    model.train()
    outputs = run._strategy.wrapped(first) if case["model"] != "named" else torch.zeros(1)
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


tell(train, OPTIONS, lambda: keras.utils.clear_session(free_memory=False))  # the same names again
