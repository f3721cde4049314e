"""Handwritten digits, 8 x 8 pixels: a small convolutional network, trained by all replicas."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from k8sjob import runtime


def digits():
    """1500 images to train on and 297 to test with; they come with scikit-learn."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    train, test = slice(0, 1500), slice(1500, None)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def build():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 10),
    )  # fmt: skip


with runtime.session(seed=1) as job:
    train, test = digits()
    run = job.prepare(
        build,
        loss=F.cross_entropy,
        optimizer=(torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    )
    for epoch in run.epochs(30):
        for images, labels in run.batches(train, batch_size=16):
            run.step(images, labels)
        job.log(epoch=epoch, **run.evaluate(test, prefix="test_"))
