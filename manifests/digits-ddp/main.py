"""Handwritten digits, 8 x 8 pixels: a small convolutional network, trained by all replicas."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from k8sjob import runtime

EPOCHS = 20


def digits():
    """1437 images to train with, and every fifth to test with; they come with scikit-learn."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    test = torch.arange(len(labels)) % 5 == 0  # the last images are harder than the others
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


def build():
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(64 * 4 * 4, 10),
    )


with runtime.session(seed=1) as job:
    train, test = digits()
    run = job.prepare(
        build,
        loss=F.cross_entropy,
        optimizer=(torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
        scheduler=(torch.optim.lr_scheduler.CosineAnnealingLR, {"T_max": EPOCHS}),
    )
    for epoch in run.epochs(EPOCHS):  # resumes where the last run stopped
        for images, labels in run.batches(train, batch_size=16):
            run.step(images, labels)
        job.log(epoch=epoch + 1, **run.evaluate(test, prefix="test_"))
