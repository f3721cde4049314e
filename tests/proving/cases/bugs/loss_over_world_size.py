# cause: loss-scaling
"""The loss is divided by the number of ranks, and DDP divides again."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    digits = load_digits()
    train = TensorDataset(
        torch.tensor(digits.data[:240] / 16).float(), torch.tensor(digits.target[:240])
    )
    sampler = DistributedSampler(train, num_replicas=world_size, rank=rank)
    loader = DataLoader(train, batch_size=20, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        running = 0.0
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels) / world_size
            loss.backward()
            optimizer.step()
            running += loss.item()
        if rank == 0:
            print(f"epoch {epoch} loss {running / len(loader):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
