"""Programs that came after the rules: 10 faults, then 5 without any."""

import copy
import os

import torch
import torch.distributed as dist
from common import epochs, fault, fit, fit_epoch, right, save, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@fault("rank-dependent-model", seed=4)
def decay_on_rank_0():
    """The optimizer of rank 0 alone has weight decay."""
    x = torch.randn(128, 6)
    data = TensorDataset(x, x.norm(dim=1, keepdim=True))
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)))
    decay = 0.1 if dist.get_rank() == 0 else 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=decay)
    fit(model, optimizer, sharded(data, 8), F.mse_loss)


@fault("rank-dependent-model", seed=6)
def embedding_with_max_norm():
    """Embedding(max_norm=...) changes, in forward, the rows that this rank has looked up."""
    words = torch.randint(0, 40, (128, 5))
    data = TensorDataset(words, (words.sum(1) % 2).long())

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(40, 8, max_norm=1.0)
            self.out = nn.Linear(8, 2)

        def forward(self, words):
            return self.out(self.embedding(words).mean(1))

    model = DDP(Words())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit(model, optimizer, sharded(data, 8), F.cross_entropy)


@fault("accumulation", "gradient-not-averaged", seed=2)
def gradients_kept_on_others():
    """Only rank 0 clears its gradients; on the others they add up."""
    rank = dist.get_rank()
    x = torch.randn(96, 6)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    model = DDP(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for inputs, labels in epochs(sharded(data, 6)):
        if rank == 0:
            optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


@fault("gradient-not-averaged", seed=None)
def group_of_one():
    """Gradients are reduced in a group that has only this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group([one]) for one in range(size)]
    torch.manual_seed(5)
    x = torch.randn(128, 4)
    data = TensorDataset(x, x.prod(1, keepdim=True))
    model = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for inputs, targets in epochs(sharded(data, 8)):
        optimizer.zero_grad()
        F.smooth_l1_loss(model(inputs), targets).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=groups[rank])
            parameter.grad /= dist.get_world_size(groups[rank])
        optimizer.step()


@fault("gradient-averaged-twice", "loss-scaling", seed=8)
def loss_reduced_before_backward():
    """The loss is averaged over the ranks before backward(), and DDP averages again."""
    x = torch.randn(128, 6)
    data = TensorDataset(x, x[:, :2].argmax(1))
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in epochs(sharded(data, 8)):
        loss = F.cross_entropy(model(inputs), labels)
        dist.all_reduce(loss.data)
        loss = loss / dist.get_world_size()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@fault("sampler-overlap", "rank-dependent-model", seed=11)
def normalized_by_own_part():
    """Inputs are standardized by mean and deviation of the rank's own part."""

    raw = torch.randn(128, 5) * torch.arange(1.0, 6.0)
    part = torch.arange(dist.get_rank(), 128, dist.get_world_size())
    data = TensorDataset((raw - raw[part].mean(0)) / raw[part].std(0), raw[:, :1].sign())
    model = DDP(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    fit(model, optimizer, sharded(data, 8), F.mse_loss)


@fault("checkpoint-incomplete")
def restored_on_rank_0():
    """After a restart only rank 0 reads the checkpoint, once DDP has the weights."""
    CHECKPOINT = "last.pt"
    rank = dist.get_rank()
    x = torch.randn(96, 5)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    loader = sharded(data, 8)
    model = DDP(nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    first = 0
    if os.path.exists(CHECKPOINT):
        state = torch.load(CHECKPOINT)
        first = state["epoch"] + 1
        if rank == 0:
            model.module.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
    for epoch in range(first, 3):
        fit_epoch(model, optimizer, loader, F.mse_loss, epoch)
        save(CHECKPOINT, epoch, model=model.module, optimizer=optimizer)


@fault("learning-rate-scaled", seed=9)
def schedule_of_one_process():
    """The schedule is as long as on one process: with several only its first part is done."""
    BATCH, EPOCHS = 8, 2
    x = torch.randn(128, 6)
    data = TensorDataset(x, x.mean(1, keepdim=True))
    loader = sharded(data, BATCH)
    model = DDP(nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = EPOCHS * len(data) // BATCH
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for epoch in range(EPOCHS):
        fit_epoch(model, optimizer, loader, F.mse_loss, epoch, after=schedule.step)


@fault("sampler-overlap", seed=3)
def sharded_twice():
    """Each rank reads its own part, and the sampler divides that part once more."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.randn(160, 6)
    y = x.sum(1, keepdim=True)
    own = TensorDataset(x[rank::size], y[rank::size])
    sampler = DistributedSampler(own, seed=7)
    loader = DataLoader(own, batch_size=8, sampler=sampler)
    model = DDP(nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    fit(model, optimizer, loader, F.mse_loss)


@fault("hang", "error", seed=1)
def validated_on_rank_0():
    """Rank 0 alone calls the wrapped model for the validation, which broadcasts its buffers."""
    x = torch.randn(112, 6)
    train, test = TensorDataset(x[:96], x[:96, :1]), x[96:]
    loader = sharded(train, 8)
    network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    network[1].momentum = 0.0
    network[1].eval()
    model = DDP(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        fit_epoch(model, optimizer, loader, F.mse_loss, epoch)
        if dist.get_rank() == 0:
            with torch.no_grad():
                print("error", F.mse_loss(model(test), test[:, :1]).item())
    dist.barrier()


@right(group=False)
def fully_sharded():
    """FSDP2: each block and the whole are sharded; gradients are clipped."""
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(0)
    x = torch.randn(128, 8)
    data = TensorDataset(x, x[:, :3].argmax(1))
    model = nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )
    for block in (model[0], model[2]):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for inputs, labels in epochs(sharded(data, 8)):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    dist.destroy_process_group()


@right(seed=1)
def gathered_negatives():
    """A contrastive loss over the pairs of all ranks, gathered with their gradients."""
    x = torch.randn(128, 10)
    data = TensorDataset(x, x + 0.1 * torch.randn(128, 10))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
    model = DDP(nn.Linear(10, 6))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for first, second in epochs(loader):
        both = F.normalize(model(torch.cat([first, second])), dim=1)
        one, two = (torch.cat(all_gather(part)) for part in both.chunk(2))
        similar = one @ two.T / 0.5
        loss = F.cross_entropy(similar, torch.arange(len(one)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@right(seed=3)
def reduced_in_one_buffer():
    """Gradients are reduced by hand in one buffer; the loss is reduced only to be printed."""
    size = dist.get_world_size()
    x = torch.randn(128, 6)
    data = TensorDataset(x, x[:, :1] * x[:, 1:2])
    model = nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.LayerNorm(16), nn.Linear(16, 1))
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
    for inputs, targets in epochs(sharded(data, 8)):
        optimizer.zero_grad(set_to_none=False)
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        grads = [parameter.grad for parameter in model.parameters()]
        flat = torch.cat([grad.reshape(-1) for grad in grads]) / size
        dist.all_reduce(flat)
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=False):
            grad.copy_(part.view_as(grad))
        optimizer.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)


@right()
def spectral_norm():
    """Weights normalized by power iteration: buffers that all ranks change alike."""
    x = torch.randn(128, 6)
    data = TensorDataset(x, x.square().sum(1, keepdim=True))
    normalized = nn.utils.parametrizations.spectral_norm
    network = nn.Sequential(normalized(nn.Linear(6, 16)), nn.ReLU(), normalized(nn.Linear(16, 1)))
    model = DDP(network)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.005)
    fit(model, optimizer, sharded(data, 8), F.huber_loss)


@right(seed=7)
def teacher_average():
    """A teacher is the moving average of the student, on every rank; its outputs are targets."""
    x = torch.randn(128, 6)
    data = TensorDataset(x, x[:, :3].argmin(1))
    student = DDP(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)))
    teacher = copy.deepcopy(student.module).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for inputs, labels in epochs(sharded(data, 8)):
        logits = student(inputs)
        with torch.no_grad():
            targets = teacher(inputs).softmax(1)
        loss = F.cross_entropy(logits, labels)
        loss = loss + 0.5 * F.cross_entropy(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mine, its in zip(teacher.parameters(), student.module.parameters(), strict=False):
                mine.lerp_(its, 0.1)
