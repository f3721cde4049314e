# cause: learning-rate-scaled
"""Warm-up is counted in samples of one rank."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

WARMUP = 16


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    train = TensorDataset(
        torch.tensor(digits.data[:256] / 16).float(), torch.tensor(digits.target[:256])
    )
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    warmup = max(1, WARMUP // dist.get_world_size())
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} lr {scheduler.get_last_lr()[0]:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
