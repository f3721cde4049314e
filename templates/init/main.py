"""Train a classifier of handwritten digits (1,797 real images of 8x8 pixels)."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from k8sjob import runtime


def digits() -> tuple[TensorDataset, TensorDataset]:
    """The images for training, and every fifth one for the test."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    held_out = torch.arange(len(labels)) % 5 == 0
    return (
        TensorDataset(images[~held_out], labels[~held_out]),
        TensorDataset(images[held_out], labels[held_out]),
    )


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="of each process")
    args = parser.parse_args()

    train, test = digits()
    with runtime.session() as job:
        run = job.prepare(build, loss=F.cross_entropy, optimizer=(torch.optim.Adam, {"lr": 2e-3}))
        for epoch in run.epochs(args.epochs):
            for images, labels in run.batches(train, batch_size=args.batch_size, tail="short"):
                run.step(images, labels)
            job.log(epoch=epoch + 1, **run.evaluate(test))


if __name__ == "__main__":
    main()
