# good
"""--global-batch is divided by the world size, and the rate is scaled by the global batch."""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--base-lr", type=float, default=0.4, help="at 256 samples")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    if args.global_batch % world_size:
        raise SystemExit(f"--global-batch {args.global_batch}: not a multiple of {world_size}")
    torch.manual_seed(0)
    digits = load_digits()
    train = TensorDataset(
        torch.tensor(digits.data[:256] / 16).float(), torch.tensor(digits.target[:256])
    )
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=args.global_batch // world_size, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(64, 10))
    lr = args.base_lr * args.global_batch / 256
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=2 * len(loader))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            schedule.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} lr {schedule.get_last_lr()[0]:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
