# cause: sampler-overlap
"""Everything is seeded by rank, the sampler too."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seed = 1000 + rank
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(160, 7, generator=generator)
    train = TensorDataset(x, x.norm(dim=1, keepdim=True))
    sampler = DistributedSampler(train, shuffle=True, seed=seed)
    loader = DataLoader(train, batch_size=8, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(7, 20), nn.GELU(), nn.Linear(20, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.l1_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        dist.all_reduce(mean := loss.detach().clone())
        if rank == 0:
            print(f"epoch {epoch} loss {mean.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
