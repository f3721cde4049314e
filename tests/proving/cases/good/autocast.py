# good
"""bfloat16 autocast, layer normalization, Adam."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def network():
    return nn.Sequential(
        nn.Linear(12, 32),
        nn.LayerNorm(32),
        nn.GELU(),
        nn.Linear(32, 32),
        nn.GELU(),
        nn.Linear(32, 4),
    )


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(10)
    x = torch.randn(192, 12)
    data = TensorDataset(x, x[:, :4].argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(inputs)
            loss = nn.functional.cross_entropy(logits.float(), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss of the last batch here {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
