"""A 784-512-512-10 classifier under DDP, as one writes it for `torchrun`."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

HERE = Path(__file__).resolve().parent


def images():
    """1,797 scanned digits, made as large as Fashion-MNIST's images; kept in data/."""
    cache = HERE / "data" / f"digits-{os.environ['RANK']}.pt"
    if not cache.exists():
        cache.parent.mkdir(exist_ok=True)
        digits = load_digits()
        pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
        torch.save((F.interpolate(pixels, size=28), torch.tensor(digits.target)), cache)
    return torch.load(cache, weights_only=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--batch-size", type=int, default=32, help="for each process")
    args = parser.parse_args()

    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )
    model = DistributedDataParallel(model.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    x, y = images()
    train = TensorDataset(x[:1500], y[:1500])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), HERE / "ckpt.pt")
            print(f"epoch {epoch + 1}/{args.epochs} loss {loss.item():.4f}", flush=True)

    if dist.get_rank() == 0:
        with torch.no_grad():
            right = (model.module(x[1500:].to(device)).argmax(1).cpu() == y[1500:]).float().mean()
        print(f"accuracy {right.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
