# cause: model-init-differs
"""Rank 0 has the pretrained weights; it loads them when the model is wrapped."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def build():
    return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 3))


def pretrained():
    """Stands for a file that only rank 0 has downloaded."""
    generator = torch.Generator().manual_seed(77)
    weights = build().state_dict()
    return {name: torch.randn(w.shape, generator=generator) / 4 for name, w in weights.items()}


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(120, 10)
    data = TensorDataset(x, x[:, :3].argmax(1))
    model = DDP(build())
    if dist.get_rank() == 0:
        model.module.load_state_dict(pretrained())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=10, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print("finetuned")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
