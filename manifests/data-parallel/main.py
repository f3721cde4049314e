"""Handwritten digits in one process, with all GPUs that it has."""

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
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


with runtime.session(seed=1) as job:
    train, test = digits()
    run = job.prepare(build, loss=F.cross_entropy, optimizer=(torch.optim.Adam, {"lr": 2e-3}))
    for epoch in run.epochs(8):
        for images, labels in run.batches(train, batch_size=64):
            run.step(images, labels)
        job.log(epoch=epoch + 1, **run.evaluate(test, prefix="test_"))
