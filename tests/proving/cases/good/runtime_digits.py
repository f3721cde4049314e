# good
"""Digits with k8sjob.runtime: dropout, a schedule, an evaluation, data that divides by nothing."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from k8sjob import runtime


def digits():
    data = load_digits()
    images, labels = torch.tensor(data.data / 16).float(), torch.tensor(data.target)
    return TensorDataset(images[:203], labels[:203]), TensorDataset(
        images[203:300], labels[203:300]
    )


def build():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))


with runtime.session(seed=1) as job:
    train, test = digits()
    run = job.prepare(
        build,
        loss=F.cross_entropy,
        optimizer=(torch.optim.SGD, {"lr": 0.2}),
        scheduler=(torch.optim.lr_scheduler.ExponentialLR, {"gamma": 0.5}),
    )
    for epoch in run.epochs(2):
        for images, labels in run.batches(train, global_batch=20, tail="short"):
            run.step(images, labels)
        job.log(epoch=epoch + 1, **run.evaluate(test, prefix="test_"))
