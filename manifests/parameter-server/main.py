"""Handwritten digits: each pixel in each of 5 shades has a row of a table of embeddings."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from k8sjob import runtime

PIXELS, SHADES = 64, 5


def digits():
    """1500 images to train with and 297 to test with; they come with scikit-learn."""
    data = load_digits()
    rows = torch.arange(PIXELS) * SHADES + torch.tensor(data.data).long() // 4
    labels = torch.tensor(data.target)
    train, test = slice(0, 1500), slice(1500, None)
    return TensorDataset(rows[train], labels[train]), TensorDataset(rows[test], labels[test])


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.shades = nn.EmbeddingBag(PIXELS * SHADES, 32, mode="sum")
        self.dense = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, rows):
        return self.dense(self.shades(rows) / PIXELS**0.5)


with runtime.session(seed=1) as job:
    train, test = digits()
    run = job.prepare(
        Reader,
        loss=F.cross_entropy,
        optimizer=(torch.optim.Adam, {"lr": 1e-2}),
    )
    for epoch in run.epochs(6):
        for rows, labels in run.batches(train, global_batch=64):
            run.step(rows, labels)
        job.log(epoch=epoch + 1, **run.evaluate(test, prefix="test_"))
