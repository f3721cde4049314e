"""Trains models of torch in several cases, see cases.py; tells their curves and weights."""

import sys
from dataclasses import replace

import torch
from cases import LENGTH, curve, guarded, mark, tell, text
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from k8sjob.runtime.strategies.step import local

OPTIONS = {
    "kind": "ddp",
    "options": {},
    "model": "digits",
    "steps": 20,
    "epochs": 99,
    "batch": 32,  # samples of all ranks
    "dropout": 0.0,
    "inner": 0.0,  # dropout between two other layers, of a block those that a layout may divide
    "optimizer": ["SGD", {"lr": 0.1, "momentum": 0.9}],
    "samples": None,  # fewer than there are
    "tail": "pad",
    "twice": False,  # train it again, to compare
    "tied": False,
    "shared": False,  # one block in two places
    "unpicklable": False,  # the loss holds a lock
    "norm": False,  # batch normalization, of digits alone
    "schedule": None,  # steps between two halvings of the learning rate
}
SIZE, HEADS = 32, 8


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(SIZE, SIZE) for _ in range(3))
        self.out = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        parts = [layer(x) for layer in (self.query, self.key, self.value)]
        query, key, value = (p.unflatten(-1, (-1, SIZE // HEADS)).transpose(1, 2) for p in parts)
        weights = query @ key.transpose(-1, -2) / (SIZE / HEADS) ** 0.5
        future = torch.triu(torch.full((LENGTH, LENGTH), -1e9), diagonal=1)
        mixed = (weights + future).softmax(dim=-1) @ value
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, dropout, inner):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)
        self.attention, self.dropout = Attention(), nn.Dropout(dropout)
        self.inner = nn.Dropout(inner)
        self.up, self.down = nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        inner = self.inner(functional.gelu(self.up(self.norm2(x))))
        return x + self.dropout(self.down(inner))


class Embedding(nn.Module):
    def __init__(self, letters):
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, SIZE), nn.Embedding(LENGTH, SIZE)

    def forward(self, text):
        return self.letters(text) + self.places.weight


class Head(nn.Module):
    def __init__(self, letters, *, bias):
        super().__init__()
        self.norm, self.letters = nn.LayerNorm(SIZE), nn.Linear(SIZE, letters, bias=bias)

    def forward(self, x):
        return self.letters(self.norm(x)).transpose(1, 2)


def transformer(case, letters):
    parts = {"embed": Embedding(letters)}
    parts |= {f"block{number}": Block(case["dropout"], case["inner"]) for number in range(2)}
    model = nn.Sequential()
    for name, part in {**parts, "head": Head(letters, bias=case["tied"])}.items():
        model.add_module(name, part)
    if case["tied"]:
        model.head.letters.weight = model.embed.letters.weight
    if case["shared"]:
        model.block1 = model.block0
    return model


def digits(case):
    model = nn.Sequential()
    model.add_module("fc1", nn.Linear(64, 48))
    if case["norm"]:
        model.add_module("norm", nn.BatchNorm1d(48))
    model.add_module("act", nn.Sequential(nn.ReLU(), nn.Dropout(case["dropout"])))
    model.add_module("fc2", nn.Linear(48, 32))
    model.add_module("tanh", nn.Tanh())
    if case["inner"]:
        model.add_module("inner", nn.Dropout(case["inner"]))
    model.add_module("out", nn.Linear(32, 10))
    return model


class Bags(nn.Module):
    """Each pixel in each of 5 shades has a row of one table, each shade one of another."""

    def __init__(self, case):
        super().__init__()
        self.bags = nn.EmbeddingBag(64 * 5, 16, mode="sum")
        self.shades = nn.Embedding(5, 6)
        self.dense = nn.Linear(16 + 6, 10)
        if case["tied"]:
            self.other = nn.Embedding(5, 6)
            self.other.weight = self.shades.weight

    def forward(self, rows):
        bags, shades = self.bags(rows) / 8, self.shades(rows % 5).mean(dim=1)
        return self.dense(torch.cat([bags, shades], dim=1))


def task(case):
    """(data set, builder)"""
    if case["model"] == "bags":
        found = load_digits()
        rows = torch.arange(64) * 5 + torch.tensor(found.data).long() // 4
        return TensorDataset(rows, torch.tensor(found.target)), lambda: Bags(case)
    if case["model"] == "digits":
        found = load_digits()
        data = TensorDataset(torch.tensor(found.data / 16).float(), torch.tensor(found.target))
        return data, lambda: digits(case)
    data, letters = text()
    return data, lambda: transformer(case, letters)


def watch(model):
    """Marks of what the dropout layers leave out in training, one for each call; grows."""
    marks = []

    def look(layer, _, output):
        if layer.training:
            marks.append(mark([local(output) == 0]))

    for layer in model.modules():
        if isinstance(layer, nn.Dropout) and layer.p:
            layer.register_forward_hook(look)
    return marks


def graphs():
    """How many torch.compile has made."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return compiler.counters["stats"]["unique_graphs"] if compiler else 0


def train(job, case):
    job._context.config = replace(
        job._context.config, strategy=case["kind"], options=case["options"]
    )
    data, build = task(case)
    if case["samples"]:
        data = torch.utils.data.Subset(data, range(case["samples"]))
    loss = guarded() if case["unpicklable"] else functional.cross_entropy
    if case["options"].get("compile"):
        torch.compiler.reset()  # else what an earlier case compiled serves this one
    torch.manual_seed(3)
    name, settings = case["optimizer"]
    optimizer = (getattr(torch.optim, name), settings)
    schedule = None
    if case["schedule"]:
        schedule = torch.optim.lr_scheduler.StepLR, {"step_size": case["schedule"], "gamma": 0.5}
    run = job.prepare(
        build,
        loss=loss,
        optimizer=optimizer,
        scheduler=schedule,
        schedule_by="step",
    )
    strategy, masks, before = run._strategy, watch(run.model), graphs()
    losses = curve(job, run, data, case)
    held = range(min(101, len(data)))
    evaluation = run.evaluate(torch.utils.data.Subset(data, held), batch_size=16)
    mine = [local(value.detach()).clone() for value in run.model.parameters()]
    whole = strategy.capture(run.optimizer).get("model", {})  # rank 0's
    drawn = job.gather(torch.tensor(masks))
    marks = job.gather(torch.tensor([strategy.mesh.model_rank, mark(mine)]))
    return {
        "losses": losses,
        "weights": [round(float(value.double().norm()), 9) for value in whole.values()]
        if job.is_main
        else [],
        "names": list(whole),
        "marks": [found.tolist() for found in marks],
        "drawn": [found.tolist() for found in drawn],
        "held": sum(value.numel() for value in mine),
        "evaluation": evaluation,
        "graphs": graphs() - before,
        "steps": run.steps,
    }


tell(train, OPTIONS)
