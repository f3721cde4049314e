"""Fashion-MNIST by torchvision's own loader: a 784-512-512-10 classifier on all replicas."""

import torch
from torch import nn
from torch.nn import functional as F
from torchvision import datasets, transforms

from k8sjob import runtime


def fashion(job):
    """Images to train and to test with. Rank 0 prepares the volume, the others wait for it."""
    with job.main_first():
        return [
            datasets.FashionMNIST(
                job.path("/data"), train=train, download=True, transform=transforms.ToTensor()
            )
            for train in (True, False)
        ]


def build():
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(28 * 28, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


with runtime.session(seed=1) as job:
    train, test = fashion(job)
    run = job.prepare(
        build, loss=F.cross_entropy, optimizer=(torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})
    )
    for epoch in run.epochs(6):
        for images, labels in run.batches(train, batch_size=32):
            run.step(images, labels)
        job.log(epoch=epoch + 1, **run.evaluate(test, prefix="test_"))
