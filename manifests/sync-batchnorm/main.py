"""Handwritten digits: batches too small for batch normalization, were each replica alone."""

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
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


with runtime.session(seed=1) as job:
    train, test = digits()
    run = job.prepare(
        build, loss=F.cross_entropy, optimizer=(torch.optim.SGD, {"lr": 0.02, "momentum": 0.9})
    )
    for epoch in run.epochs(3):
        for images, labels in run.batches(train, batch_size=8):
            run.step(images, labels)
        job.log(epoch=epoch + 1, **run.evaluate(test, prefix="test_"))
