# good
# set: strategy.sync_batchnorm=true
"""Digits with k8sjob.runtime; the job computes batch normalization over all ranks."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from k8sjob import runtime


def digits():
    data = load_digits()
    images, labels = torch.tensor(data.data / 16).float(), torch.tensor(data.target)
    return TensorDataset(images[:192], labels[:192]), TensorDataset(
        images[192:256], labels[192:256]
    )


def build():
    return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


with runtime.session(seed=1) as job:
    train, test = digits()
    run = job.prepare(build, loss=F.cross_entropy, optimizer=(torch.optim.SGD, {"lr": 0.1}))
    for epoch in run.epochs(2):
        for images, labels in run.batches(train, batch_size=8):
            run.step(images, labels)
        job.log(epoch=epoch + 1, **run.evaluate(test, prefix="test_"))
