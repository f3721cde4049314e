"""Programs without a fault that differ in more than one place from those with one."""

import torch
import torch.distributed as dist
from common import Tagger, digits, epochs, fit, fit_epoch, restored, right, save, sharded
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@right()
def alternating_heads():
    """Two tasks by turns, so half of the heads is unused in each step: find_unused_parameters."""

    class MultiTask(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 18), nn.ReLU())
            self.heads = nn.ModuleList([nn.Linear(18, 1), nn.Linear(18, 1)])

        def forward(self, x, task):
            return self.heads[task](self.body(x))

    x = torch.randn(128, 6)
    data = TensorDataset(x, x.max(1, keepdim=True).values, x.min(1, keepdim=True).values)
    loader = sharded(data, 8)
    model = DDP(MultiTask(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for step, (inputs, *targets) in enumerate(loader):
            task = step % 2
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs, task), targets[task])
            loss.backward()
            optimizer.step()


@right()
def augmentation_by_sample():
    """Noise depends on seed, epoch and the sample's number, not on the rank that draws it."""

    class NoisyDigits(Dataset):
        def __init__(self, count, seed):
            digits = load_digits()
            self.pixels = torch.tensor(digits.data[:count] / 16).float()
            self.labels = torch.tensor(digits.target[:count])
            self.seed, self.epoch = seed, 0

        def __len__(self):
            return len(self.pixels)

        def __getitem__(self, at):
            number = (self.seed * 1000 + self.epoch) * len(self) + at
            generator = torch.Generator().manual_seed(number)
            noise = torch.randn(64, generator=generator)
            return self.pixels[at] + 0.1 * noise, self.labels[at]

    data = NoisyDigits(192, seed=3)
    loader = sharded(data, 16)
    model = DDP(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        data.epoch = epoch
        fit_epoch(model, optimizer, loader, F.cross_entropy, epoch)


@right(seed=10)
def autocast():
    """bfloat16 autocast, layer normalization, Adam."""
    x = torch.randn(192, 12)
    data = TensorDataset(x, x[:, :4].argmax(1))
    layers = [nn.Linear(12, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.GELU()]
    model = DDP(nn.Sequential(*layers, nn.Linear(32, 4)))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for inputs, labels in epochs(sharded(data, 12)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(inputs)
        loss = F.cross_entropy(logits.float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@right()
def checkpoint():
    """A checkpoint with model, optimizer, scheduler and epoch, written whole or not at all."""
    x = torch.randn(128, 6)
    data = TensorDataset(x, x[:, :1].exp())
    loader = sharded(data, 8)
    model = DDP(nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    parts = {"model": model.module, "optimizer": optimizer, "scheduler": scheduler}
    for epoch in range(restored("checkpoint.pt", **parts), 2):
        fit_epoch(model, optimizer, loader, F.mse_loss, epoch)
        scheduler.step()
        save("checkpoint.pt", epoch, **parts)


@right()
def clipping():
    """Gradients are clipped once they are averaged; steps are skipped by all ranks or none."""
    sequences = torch.randn(96, 7, 4)
    targets = 4 * sequences[:, -1, :1]
    targets[::9] *= 10
    data = TensorDataset(sequences, targets)
    model = DDP(Tagger())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    skipped = 0
    for inputs, wanted in epochs(sharded(data, 6)):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), wanted).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norm > 60:  # the same number on all ranks
            skipped += 1
            continue
        optimizer.step()


@right()
def drop_last():
    """99 samples: what does not fill a batch of all ranks is left out."""
    x = torch.randn(99, 6)
    data = TensorDataset(x, x.abs().sum(1, keepdim=True))
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    fit(model, optimizer, loader, F.mse_loss)


@right()
def evaluation_on_rank_0():
    """Rank 0 evaluates the whole test set by itself, while the others wait."""

    def test_error(model, test):
        model.eval()
        with torch.no_grad():
            squares = [(model(x) - y).square().sum() for x, y in DataLoader(test, batch_size=16)]
        model.train()
        return (sum(squares) / len(test)).item()

    x = torch.randn(251, 5)
    y = x.cos().sum(1, keepdim=True)
    train, test = TensorDataset(x[:200], y[:200]), TensorDataset(x[200:], y[200:])
    loader = sharded(train, 10)
    model = DDP(nn.Sequential(nn.Linear(5, 15), nn.SiLU(), nn.Linear(15, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    best = float("inf")
    for epoch in range(2):
        fit_epoch(model, optimizer, loader, F.mse_loss, epoch)
        if dist.get_rank() == 0:
            error = test_error(model.module, test)
            print(f"epoch {epoch} test mse {error:.5f}")
            if error < best:
                best = error
                torch.save(model.module.state_dict(), "best.pt")
        dist.barrier()


@right(seed=None)
def global_batch():
    """The global batch is divided by the world size, and the rate is scaled by the global batch."""
    GLOBAL_BATCH = 32
    torch.manual_seed(0)
    loader = sharded(digits(0, 256), GLOBAL_BATCH // dist.get_world_size())
    model = DDP(nn.Linear(64, 10))
    lr = 0.4 * GLOBAL_BATCH / 256
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=2 * len(loader))
    fit(model, optimizer, loader, F.cross_entropy, after=schedule.step)


@right()
def plain_ddp():
    """Digits under DDP, with an evaluation that counts each sample once."""

    def evaluate(model, test):
        mine = Subset(test, range(dist.get_rank(), len(test), dist.get_world_size()))
        counts = torch.zeros(2)
        model.eval()
        with torch.no_grad():
            for inputs, labels in DataLoader(mine, batch_size=32):
                counts[0] += (model(inputs).argmax(1) == labels).sum()
                counts[1] += len(labels)
        model.train()
        dist.all_reduce(counts)
        return (counts[0] / counts[1]).item()

    train, test = digits(0, 256), digits(256, 357)
    loader = sharded(train, 16)
    model = DDP(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
        accuracy = evaluate(model.module, test)
        if dist.get_rank() == 0:  # the loss is that of rank 0's last batch, to look at
            print(f"epoch {epoch} loss {loss.item():.4f} accuracy {accuracy:.4f}")


@right(seed=14)
def synchronized_norm():
    """Batch normalization over all ranks, written by hand with collectives that have gradients."""

    class GlobalNorm(nn.Module):
        """Moments of the global batch; all ranks have as many samples."""

        def __init__(self, features):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(features))
            self.register_buffer("running_mean", torch.zeros(features))

        def forward(self, x):
            world_size = dist.get_world_size()
            mean = all_reduce(x.mean(0)) / world_size
            var = all_reduce((x - mean).square().mean(0)) / world_size
            self.running_mean.lerp_(mean.detach(), 0.1)
            return self.scale * (x - mean) / (var + 1e-3).sqrt()

    x = torch.randn(128, 6) * 3 + 1
    data = TensorDataset(x, x.sum(1, keepdim=True) / 8)
    network = nn.Sequential(nn.Linear(6, 10), GlobalNorm(10), nn.Tanh(), nn.Linear(10, 1))
    model = DDP(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit(model, optimizer, sharded(data, 8), F.mse_loss)


@right()
def tied_weights():
    """The embedding is also the output layer; the ranks take their rows of each global batch."""
    WORDS, GLOBAL_BATCH, SENTENCES = 40, 16, 128

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(WORDS, 16)
            self.mix = nn.Linear(16, 16)
            self.out = nn.Linear(16, WORDS, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, tokens):
            return self.out(torch.tanh(self.mix(self.embed(tokens))))

    rank, world_size = dist.get_rank(), dist.get_world_size()
    corpus = torch.randint(0, WORDS, (SENTENCES, 10))
    model = DDP(Tied())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        order = torch.randperm(SENTENCES, generator=torch.Generator().manual_seed(epoch))
        for start in range(0, SENTENCES, GLOBAL_BATCH):
            rows = order[start : start + GLOBAL_BATCH][rank::world_size]
            tokens = corpus[rows]
            optimizer.zero_grad()
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
