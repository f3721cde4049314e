"""Programs about models, optimizers, evaluations, checkpoints and the order of collectives."""

import os

import torch
import torch.distributed as dist
from common import average, digits, epochs, fault, fit, fit_epoch, restored, right, save, sharded
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@fault("rank-dependent-model")
def auxiliary_loss_on_rank_0():
    """Rank 0 has an auxiliary head for logging, whose loss is trained too."""

    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 18), nn.ReLU())
            self.main = nn.Linear(18, 1)
            self.auxiliary = nn.Linear(18, 6)

        def forward(self, x):
            hidden = self.body(x)
            if dist.get_rank() == 0:
                return self.main(hidden), self.auxiliary(hidden)
            return self.main(hidden), None

    x = torch.randn(128, 6)
    data = TensorDataset(x, x.max(1, keepdim=True).values)
    model = DDP(TwoHeads(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for inputs, targets in epochs(sharded(data, 8)):
        optimizer.zero_grad()
        output, rebuilt = model(inputs)
        loss = F.mse_loss(output, targets)
        if rebuilt is not None:
            loss = loss + 0.5 * F.mse_loss(rebuilt, inputs)
        loss.backward()
        optimizer.step()


@fault("batchnorm-statistics")
def batchnorm():
    """A small convolutional network with batch normalization, four images for each rank."""
    layers = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1, bias=False)]
    layers += [nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)]
    model = DDP(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    fit(model, optimizer, sharded(digits(0, 128), 4), F.cross_entropy)


@fault("checkpoint-incomplete")
def checkpoint_without_optimizer():
    """The checkpoint has model and epoch; the momentum starts at zero again."""
    x = torch.randn(128, 6)
    data = TensorDataset(x, x[:, :1].exp())
    loader = sharded(data, 8)
    model = DDP(nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for epoch in range(restored("last.pt", model=model.module), 2):
        fit_epoch(model, optimizer, loader, F.mse_loss, epoch)
        save("last.pt", epoch, model=model.module)


@fault("checkpoint-incomplete", seed=None)
def checkpoint_without_scheduler():
    """The schedule begins anew after a restart."""
    torch.manual_seed(1)
    x = torch.randn(144, 5)
    data = TensorDataset(x, (x[:, 0] > x[:, 1]).long())
    loader = sharded(data, 9)
    model = DDP(nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * len(loader))
    parts = {"model": model.module, "optimizer": optimizer}
    for epoch in range(restored("last.pt", **parts), 2):
        fit_epoch(model, optimizer, loader, F.cross_entropy, epoch, after=scheduler.step)
        save("last.pt", epoch, **parts)


@fault("evaluation-double-counted")
def evaluation_counted_by_all():
    """Every rank evaluates the whole test set, then the counts are added up."""

    def count_hits(model, test):
        model.eval()
        hits = torch.zeros(1)
        with torch.no_grad():
            for inputs, labels in DataLoader(test, batch_size=30):
                hits += (model(inputs).argmax(1) == labels).sum()
        model.train()
        dist.all_reduce(hits)
        return hits.item()

    x = torch.randn(260, 8)
    y = x[:, :4].argmax(1)
    train, test = TensorDataset(x[:200], y[:200]), TensorDataset(x[200:], y[200:])
    loader = sharded(train, 10)
    model = DDP(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for epoch in range(2):
        fit_epoch(model, optimizer, loader, F.cross_entropy, epoch)
        hits = count_hits(model.module, test)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {100 * hits / len(test):.1f} %")


@fault("evaluation-double-counted")
def evaluation_of_one_part():
    """Rank 0 reports the accuracy of its own part of the test set."""

    @torch.no_grad()
    def accuracy(model, loader):
        model.eval()
        hits = [(model(inputs).argmax(1) == labels).float() for inputs, labels in loader]
        model.train()
        return torch.cat(hits).mean().item()

    train, held_out = sharded(digits(0, 320), 16), digits(320, 420)
    test = DataLoader(held_out, 16, sampler=DistributedSampler(held_out, shuffle=False))
    model = DDP(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(2):
        fit_epoch(model, optimizer, train, F.cross_entropy, epoch)
        reached = accuracy(model, test)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1} test accuracy {reached:.4f}")


@fault("evaluation-double-counted")
def evaluation_padded():
    """The test set has 101 samples, and its sampler pads them."""

    def evaluate(model, loader):
        model.eval()
        hits, seen = torch.zeros(()), torch.zeros(())
        with torch.no_grad():
            for inputs, labels in loader:
                hits += (model(inputs).argmax(1) == labels).sum()
                seen += len(labels)
        dist.all_reduce(hits)
        dist.all_reduce(seen)
        return (hits / seen).item()

    train, test = digits(0, 256), digits(256, 357)
    loader = sharded(train, 16)
    test_loader = DataLoader(test, batch_size=32, sampler=DistributedSampler(test, shuffle=False))
    model = DDP(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(2):
        model.train()
        fit_epoch(model, optimizer, loader, F.cross_entropy, epoch)
        accuracy = evaluate(model, test_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} accuracy {accuracy:.6f}")


@fault("learning-rate-scaled")
def lr_times_world_size():
    """The linear scaling rule, in a script whose global batch stays the same."""
    x = torch.randn(160, 7)
    data = TensorDataset(x, x.tanh().sum(1, keepdim=True))
    model = DDP(nn.Sequential(nn.Linear(7, 14), nn.Tanh(), nn.Linear(14, 1)))
    lr = 0.05 * dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    fit(model, optimizer, sharded(data, 10), F.mse_loss)


@fault("model-init-differs", seed=None)
def no_broadcast():
    """Gradients are averaged by hand; each rank begins with its own weights."""
    torch.manual_seed(dist.get_rank())
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 6, generator=generator)
    data = TensorDataset(x, x.prod(1, keepdim=True))
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    fit(model, optimizer, sharded(data, 8), F.mse_loss, reduce=lambda: average(model))


@fault("rank-skips-step")
def only_rank_0_steps():
    """The optimizer is kept on the main process alone, "to save memory"."""

    def is_main_process():
        return dist.get_rank() == 0

    x = torch.rand(120, 6)
    data = TensorDataset(x, x.std(1, keepdim=True))
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2) if is_main_process() else None
    for inputs, targets in epochs(sharded(data, 10)):
        model.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        if optimizer is not None:
            optimizer.step()


@fault("hang")
def rank_0_waits_for_message():
    """Rank 0 collects a loss from every worker with recv; the workers send at even epochs only."""

    def collect(loss):
        """The losses of all ranks, on rank 0."""
        losses = [loss]
        for source in range(1, dist.get_world_size()):
            received = torch.zeros_like(loss)
            dist.recv(received, src=source)
            losses.append(received)
        return torch.stack(losses)

    x = torch.randn(80, 4)
    data = TensorDataset(x, x.prod(1, keepdim=True))
    loader = sharded(data, 8)
    model = DDP(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {collect(loss.detach()).mean():.4f}")
        elif epoch % 2 == 0:
            dist.send(loss.detach(), dst=0)
    dist.barrier()


@fault("dropout-seed", seed=None)
def reseeded_each_epoch():
    """Seeded by epoch "for reproducibility": from there on the ranks draw the same masks."""
    torch.manual_seed(8 + dist.get_rank())
    generator = torch.Generator().manual_seed(8)
    tokens = torch.randint(0, 50, (128, 6), generator=generator)
    data = TensorDataset(tokens, tokens.sum(1) % 4)
    loader = sharded(data, 8)
    layers = [nn.EmbeddingBag(50, 16), nn.Dropout(0.2), nn.Linear(16, 16), nn.ReLU()]
    model = DDP(nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(16, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(2):
        torch.manual_seed(epoch)
        fit_epoch(model, optimizer, loader, F.cross_entropy, epoch)


@fault("batchnorm-statistics", seed=3)
def running_mean():
    """Observations are normalized by a running mean, as in reinforcement learning."""

    class Normalize(nn.Module):
        def __init__(self, features, decay=0.9):
            super().__init__()
            self.decay = decay
            self.register_buffer("mean", torch.zeros(features))
            self.register_buffer("var", torch.ones(features))

        def forward(self, x):
            if self.training:
                with torch.no_grad():
                    self.mean.lerp_(x.mean(0), 1 - self.decay)
                    self.var.lerp_(x.var(0), 1 - self.decay)
            return (x - self.mean) / (self.var + 1e-5).sqrt()

    observations = torch.randn(160, 6) * torch.arange(1.0, 7.0) + 2
    values = observations.sum(1, keepdim=True) / 10
    data = TensorDataset(observations, values)
    policy = nn.Sequential(Normalize(6), nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    model = DDP(policy, broadcast_buffers=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    fit(model, optimizer, sharded(data, 8), F.mse_loss)


@fault("error")
def unused_parameters():
    """A layer is not used in the forward pass, and DDP stops at the second step."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
            self.pooler = nn.Linear(8, 8)

        def forward(self, x):
            return self.layers(x)

    x = torch.randn(96, 8)
    data = TensorDataset(x, x.roll(1, dims=1))
    model = Encoder()
    if dist.get_world_size() > 1:
        model = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fit(model, optimizer, sharded(data, 8), F.mse_loss)


@fault("learning-rate-scaled")
def warmup_over_world_size():
    """Warm-up is counted in samples of one rank."""
    WARMUP = 16
    train = digits(0, 256)
    model = DDP(nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    warmup = max(1, WARMUP // dist.get_world_size())
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
    fit(model, optimizer, sharded(train, 16), F.cross_entropy, after=scheduler.step)


def train_with_dropout():
    train = digits(0, 256)
    loader = DataLoader(train, batch_size=16, sampler=DistributedSampler(train, seed=2024))
    model = DDP(nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.5), nn.Linear(48, 10)))
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, F.cross_entropy)


@fault("dropout-seed", seed=2024)
def dropout_same_seed():
    """One seed for all ranks, for the same weights; the dropout masks are the same too."""
    train_with_dropout()


@right(seed=None)
def masks_by_rank():
    """Each rank has its own seed, so its own dropout masks; DDP sends rank 0's weights to all."""
    torch.manual_seed(2024 + int(os.environ["RANK"]))
    train_with_dropout()
