"""Handwritten digits: a convolutional Keras model, trained by all replicas in a loop of torch's."""

import keras
import torch
from keras import layers
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from k8sjob import runtime


def digits():
    """1500 images to train with and 297 to test with; they come with scikit-learn."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(-1)  # channels come last
    labels = torch.tensor(data.target)
    train, test = slice(0, 1500), slice(1500, None)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def build():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Rescaling(1 / 16),
            layers.Conv2D(12, kernel_size=3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Conv2D(24, kernel_size=3, strides=2, use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dropout(0.3),
            layers.Dense(10),
        ]
    )


with runtime.session(seed=1) as job:
    train, test = digits()
    run = job.prepare(build, loss=F.cross_entropy, optimizer=(torch.optim.Adam, {"lr": 2e-3}))
    for epoch in run.epochs(6):
        for images, labels in run.batches(train, global_batch=64):
            run.step(images, labels)
        job.log(epoch=epoch + 1, **run.evaluate(test, prefix="test_"))
