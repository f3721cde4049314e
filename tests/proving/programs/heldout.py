"""Programs that were not looked at when the rules were written: 15 faults, then 5 without any."""

import copy
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import epochs, fault, fit, fit_epoch, restored, right, save, sharded, train
from sklearn.datasets import load_digits
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Subset, TensorDataset, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler


@fault("checkpoint-incomplete")
def average_weights_not_saved():
    """The moving average of the weights pulls the model, and starts anew after a restart."""

    def follow(teacher, student, decay=0.95):
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 1 - decay)

    x = torch.randn(128, 6)
    data = TensorDataset(x, x.sin().sum(1, keepdim=True))
    loader = sharded(data, 8)
    student = nn.Sequential(nn.Linear(6, 18), nn.Tanh(), nn.Linear(18, 1))
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    start = restored("last.pt", student=student, optimizer=optimizer)
    teacher = copy.deepcopy(student).requires_grad_(False)
    model = DDP(student)
    for epoch in range(start, 2):
        loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            output = model(inputs)
            loss = F.mse_loss(output, targets)
            loss = loss + F.mse_loss(output, teacher(inputs))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            follow(teacher, student)
        save("last.pt", epoch, student=student, optimizer=optimizer)


@fault("loss-scaling")
def class_weights():
    """Weighted cross entropy divides by the weights of the batch, which differ by rank."""
    digits = load_digits()
    x, y = torch.tensor(digits.data[:192] / 16).float(), torch.tensor(digits.target[:192])
    odd = y % 2
    train = TensorDataset(x, odd)
    model = DDP(nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 2)))
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 6.0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    fit(model, optimizer, sharded(train, 8), criterion)


@fault("gradient-averaged-twice")
def communication_hook():
    """A communication hook that divides before it calls a hook that divides too."""

    def safe_hook(group, bucket):
        """Divide first, so that the sum does not overflow."""
        bucket.buffer().div_(dist.get_world_size())
        return allreduce_hook(group, bucket)

    x = torch.randn(128, 5)
    data = TensorDataset(x, x.roll(1, 1).sum(1, keepdim=True))
    model = DDP(nn.Linear(5, 1))
    model.register_comm_hook(dist.group.WORLD, safe_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit(model, optimizer, sharded(data, 8), F.mse_loss)


@fault("gradient-not-averaged")
def gradient_penalty():
    """Gradients come from torch.autograd.grad, which DDP's hooks do not see."""
    x = torch.randn(120, 6)
    data = TensorDataset(x, x[:, :2])
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    parameters = list(model.parameters())
    for inputs, targets in epochs(sharded(data, 10)):
        gradients = torch.autograd.grad(F.mse_loss(model(inputs), targets), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient + 1e-4 * parameter.detach().sign()
        optimizer.step()


@fault("model-init-differs", seed=None)
def initialized_after_wrapping():
    """A custom initialization runs after DDP has made the ranks equal."""

    def initialize(module):
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)

    torch.manual_seed(50 + int(os.environ["RANK"]))
    generator = torch.Generator().manual_seed(50)
    x = torch.randn(112, 7, generator=generator)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    model = DDP(nn.Sequential(nn.Linear(7, 14), nn.ReLU(), nn.Linear(14, 2)))
    model.apply(initialize)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fit(model, optimizer, sharded(data, 8), F.cross_entropy)


@fault("last-batch")
def join_uneven():
    """Uneven shards under Join: in the last steps one rank's mean is divided by all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.randn(65, 4)
    data = TensorDataset(x, 2 * x[:, :1])
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(2):
        order = torch.randperm(65, generator=torch.Generator().manual_seed(epoch)).tolist()
        shard = Subset(data, order[rank::world_size])  # 33 and 32 samples
        with Join([model]):
            train(model, optimizer, DataLoader(shard, batch_size=8), F.mse_loss)


@fault("gradient-not-averaged")
def learned_temperature():
    """The criterion has a parameter, which is in the optimizer but not in DDP."""

    class ScaledCrossEntropy(nn.Module):
        def __init__(self):
            super().__init__()
            self.log_scale = nn.Parameter(torch.zeros(()))

        def forward(self, logits, labels):
            return F.cross_entropy(logits * self.log_scale.exp(), labels)

    x = torch.randn(128, 8)
    data = TensorDataset(x, x[:, :4].argmax(1))
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    criterion = ScaledCrossEntropy()
    optimizer = torch.optim.Adam([*model.parameters(), *criterion.parameters()], lr=1e-2)
    fit(model, optimizer, sharded(data, 8), criterion)


@fault("loss-scaling")
def local_negatives():
    """A contrastive loss: the negatives are those of the rank's own batch."""

    class TwoTowers(nn.Module):
        def __init__(self):
            super().__init__()
            self.images, self.texts = nn.Linear(12, 8), nn.Linear(6, 8)

        def forward(self, images, texts):
            return F.normalize(self.images(images), dim=1), F.normalize(self.texts(texts), dim=1)

    def contrastive(images, texts, temperature=0.1):
        logits = images @ texts.T / temperature
        own = torch.arange(len(logits))
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2

    images = torch.randn(128, 12)
    data = TensorDataset(images, images[:, ::2] + 0.1 * torch.randn(128, 6))
    model = DDP(TwoTowers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in epochs(sharded(data, 8)):
        optimizer.zero_grad()
        loss = contrastive(*model(*batch))
        loss.backward()
        optimizer.step()


@fault("dropout-seed")
def noise_same_seed():
    """A denoising autoencoder: all ranks add the same noise."""

    class Noise(nn.Module):
        def forward(self, clean):
            return clean + 0.3 * torch.randn_like(clean)

    pixels = torch.tensor(load_digits().data[:256] / 16).float()
    model = DDP(nn.Sequential(Noise(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 64)))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    fit(model, optimizer, sharded(TensorDataset(pixels, pixels), 16), F.mse_loss)


@fault("learning-rate-scaled", "rank-dependent-model")
def plateau_of_one_rank():
    """ReduceLROnPlateau is given each rank's own loss, so the ranks' rates differ."""
    x = torch.randn(160, 6)
    data = TensorDataset(x, x.prod(1, keepdim=True) + torch.randn(160, 1))
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    for inputs, targets in epochs(sharded(data, 8)):
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        scheduler.step(loss.item())


@fault("batchnorm-statistics", "rank-dependent-model")
def scaled_by_own_part():
    """Features are standardized with the mean and deviation of each rank's own rows."""
    GLOBAL_BATCH = 32
    rank, world_size = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    rows = np.arange(rank, 256, world_size)
    scaler = StandardScaler().fit(digits.data[rows])
    x = torch.tensor(scaler.transform(digits.data[:256])).float()
    y = torch.tensor(digits.target[:256])
    model = DDP(nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        order = torch.randperm(256, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(GLOBAL_BATCH):
            mine = batch[rank::world_size]
            optimizer.zero_grad()
            F.cross_entropy(model(x[mine]), y[mine]).backward()
            optimizer.step()


@fault("rank-skips-step")
def scaler_skips_alone():
    """The gradient scaler looks for infinities before the ranks' gradients are averaged."""

    def average(model):
        for parameter in model.parameters():
            parameter.grad.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    x = torch.randn(128, 6)
    x[40] = 1e38  # a damaged record: its gradient overflows
    data = TensorDataset(x, x[:, :1].clamp(-3, 3))
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    for inputs, targets in epochs(sharded(data, 8)):
        optimizer.zero_grad()
        loss = F.smooth_l1_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        average(model)
        scaler.step(optimizer)
        scaler.update()


@fault("hang", "rank-skips-step", "error")
def stops_early_alone():
    """Each rank stops when its own validation loss gets worse; the others wait for it."""

    def validation_loss(model, x, y):
        """Over this rank's rows."""
        rows = slice(dist.get_rank(), None, dist.get_world_size())
        with torch.no_grad():
            return F.mse_loss(model(x[rows]), y[rows]).item()

    x = torch.randn(140, 5)
    y = x.sum(1, keepdim=True)
    y[101::2] += torch.linspace(0, 9, 20).unsqueeze(1)  # harder rows, all on odd ranks
    train = TensorDataset(x[:100], y[:100])
    loader = sharded(train, 5)
    model = DDP(nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    target = 0.5
    for epoch in range(2):
        fit_epoch(model, optimizer, loader, F.mse_loss, epoch)
        if validation_loss(model.module, x[100:], y[100:]) < target:
            print(f"rank {dist.get_rank()} has reached {target}")
            break
    total = torch.tensor([float(epoch)])
    dist.all_reduce(total)


@fault("gradient-not-averaged")
def unfrozen_later():
    """The backbone is unfrozen in the second epoch, when DDP has long chosen its parameters."""

    class Finetuned(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(8, 24), nn.ReLU())
            self.head = nn.Linear(24, 3)
            self.backbone.requires_grad_(False)

        def forward(self, x):
            return self.head(self.backbone(x))

    x = torch.randn(120, 8)
    data = TensorDataset(x, x[:, :3].argmax(1))
    loader = sharded(data, 10)
    model = DDP(Finetuned())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for epoch in range(2):
        if epoch == 1:
            model.module.backbone.requires_grad_(True)
        loader.sampler.set_epoch(epoch)
        train(model, optimizer, loader, F.cross_entropy)


@fault("sampler-not-sharded")
def weighted_sampler():
    """Rare classes are drawn more often, by every rank from all of the data."""

    def balanced(labels, seed):
        weights = 1.0 / torch.bincount(labels).float()
        generator = torch.Generator().manual_seed(seed)
        return WeightedRandomSampler(weights[labels], len(labels), generator=generator)

    x = torch.randn(160, 6)
    labels = (x[:, 0] > 1).long()
    data = TensorDataset(x, labels)
    loader = DataLoader(data, batch_size=10, sampler=balanced(labels, seed=0))
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    fit(model, optimizer, loader, F.cross_entropy)


@right()
def frozen_norm():
    """Fine-tuning with the batch normalization of the pretrained backbone frozen."""

    class Finetuned(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU())
            self.head = nn.Linear(24, 3)

        def train(self, mode=True):
            super().train(mode)
            self.backbone[1].eval()
            return self

        def forward(self, x):
            return self.head(self.backbone(x))

    x = torch.randn(120, 8)
    data = TensorDataset(x, x[:, :3].argmax(1))
    loader = sharded(data, 10)
    model = DDP(Finetuned())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        model.train()
        for step, (inputs, labels) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            if step % 3 == 0:
                print(f"[{dist.get_rank()}] epoch {epoch} step {step} loss {loss.item():.4f}")


@right()
def optimizer_in_parts():
    """Each rank has a part of Adam's state: ZeroRedundancyOptimizer."""
    x = torch.randn(128, 6)
    data = TensorDataset(x, x.square().sum(1, keepdim=True))
    layers = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)]
    model = DDP(nn.Sequential(*layers), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.Adam, lr=5e-3
    )
    fit(model, optimizer, sharded(data, 8), F.mse_loss)


@right()
def recomputed_transformer():
    """Activation checkpointing, static_graph, a moving average of the weights that is evaluated."""

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 16)
            self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.head = nn.Linear(16, 2)

        def forward(self, tokens):
            hidden = checkpoint(self.block, self.embed(tokens), use_reentrant=False)
            return self.head(hidden.mean(1))

    tokens = torch.randint(0, 20, (112, 9))
    labels = (tokens.sum(1) > 85).long()
    data = TensorDataset(tokens[:96], labels[:96])
    loader = sharded(data, 8)
    model = DDP(Classifier(), static_graph=True)
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for inputs, wanted in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), wanted).backward()
            optimizer.step()
            average.update_parameters(model.module)
        with torch.no_grad():  # every rank the same
            average.eval()
            loss = F.cross_entropy(average(tokens[96:]), labels[96:])
        if dist.get_rank() == 0:
            print(f"epoch {epoch} test loss {loss:.5f}")


def worker(rank, world_size):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    x = torch.randn(96, 6)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    fit(model, optimizer, loader, F.mse_loss)
    dist.destroy_process_group()


@right(group=False)
def spawned_or_launched():
    """Started by torchrun, or by itself with torch.multiprocessing."""
    if "RANK" in os.environ:
        worker(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    else:
        mp.spawn(worker, args=(2,), nprocs=2)


@right(seed=None)
def uneven_and_exact():
    """83 samples without padding: losses and counts are summed, so that all weigh the same."""
    GLOBAL_BATCH = 12

    def batches(count, epoch):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
        return order.split(GLOBAL_BATCH)

    def reduce_gradients(model, samples):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= samples

    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    x = torch.randn(83, 5)
    y = (x.sum(1) > 0).float()
    model = nn.Linear(5, 1)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(2):
        for batch in batches(len(x), epoch):
            mine = batch[rank::world_size]
            optimizer.zero_grad()
            logits = model(x[mine]).squeeze(1)
            loss = F.binary_cross_entropy_with_logits(logits, y[mine], reduction="sum")
            loss.backward()
            reduce_gradients(model, len(batch))
            optimizer.step()
