"""A small language model of letters; the job.yaml says how its parameters lie on the ranks."""

import torch
from sklearn import datasets
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

from k8sjob import runtime

WIDTH, HEADS, LENGTH = 64, 4, 32


def text():
    """Descriptions of data sets, 15,000 letters of English that come with scikit-learn."""
    loaders = (datasets.load_iris, datasets.load_wine, datasets.load_breast_cancer)
    whole = "".join(load().DESCR for load in (*loaders, datasets.load_diabetes))
    letters = sorted(set(whole))
    codes = torch.tensor([letters.index(letter) for letter in whole])
    windows = codes.unfold(0, LENGTH + 1, 12)
    data = TensorDataset(windows[:, :-1].clone(), windows[:, 1:].clone())
    cut = len(data) * 9 // 10
    return Subset(data, range(cut)), Subset(data, range(cut, len(data))), len(letters)


class Language(nn.Module):
    def __init__(self, letters):
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.1, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, letters)

    def forward(self, codes):
        x = self.letters(codes) + self.places.weight
        future = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device)
        for block in self.blocks:
            x = block(x, src_mask=future, is_causal=True)
        return self.head(x)


def loss(output, following):
    return F.cross_entropy(output.flatten(0, 1), following.flatten())


with runtime.session(seed=1) as job:
    train, test, letters = text()
    run = job.prepare(
        lambda: Language(letters),
        loss=loss,
        optimizer=(torch.optim.AdamW, {"lr": 5e-3}),
    )
    for epoch in run.epochs(3):
        for codes, following in run.batches(train, global_batch=32):
            run.step(codes, following)
        job.log(epoch=epoch + 1, loss=run.loss, **run.evaluate(test, prefix="test_"))
