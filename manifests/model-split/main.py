"""Handwritten digits: a chain of layers, which the job.yaml spreads over two GPUs."""

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
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    train, test = slice(0, 1500), slice(1500, None)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def build():
    layers = {
        "stem": nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        "body": nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten()),
        "head": nn.Sequential(nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)),
    }
    return nn.Sequential(OrderedDict(layers))


with runtime.session(seed=1) as job:
    train, test = digits()
    run = job.prepare(
        build,
        loss=F.cross_entropy,
        optimizer=(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    )
    for epoch in run.epochs(4):
        for images, labels in run.batches(train, global_batch=64):
            run.step(images, labels)
        job.log(epoch=epoch + 1, **run.evaluate(test, prefix="test_"))
