"""Handwritten digits: a wide network whose layers the job.yaml divides over the ranks."""

from collections import OrderedDict

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from k8sjob import runtime


def digits():
    """1500 images to train with and 297 to test with; they come with scikit-learn."""
    data = load_digits()
    images, labels = torch.tensor(data.data / 16).float(), torch.tensor(data.target)
    train, test = slice(0, 1500), slice(1500, None)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def build():
    layers = {
        "up": nn.Linear(64, 512),
        "relu": nn.ReLU(),
        "down": nn.Linear(512, 64),
        "tanh": nn.Tanh(),
        "out": nn.Linear(64, 10),
    }
    return nn.Sequential(OrderedDict(layers))


with runtime.session(seed=1) as job:
    train, test = digits()
    run = job.prepare(
        build,
        loss=F.cross_entropy,
        optimizer=(torch.optim.AdamW, {"lr": 2e-3}),
    )
    for epoch in run.epochs(5):
        for images, labels in run.batches(train, global_batch=64):
            run.step(images, labels)
        job.log(epoch=epoch + 1, **run.evaluate(test, prefix="test_"))
