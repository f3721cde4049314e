# good
"""83 samples without padding: sums of losses and counts, so that each sample weighs the same."""

import torch
import torch.distributed as dist
from torch import nn

GLOBAL_BATCH = 12


def batches(count, epoch):
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
    return order.split(GLOBAL_BATCH)


def reduce_gradients(model, samples):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= samples


def main():
    dist.init_process_group("gloo")
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
            loss = nn.functional.binary_cross_entropy_with_logits(logits, y[mine], reduction="sum")
            loss.backward()
            reduce_gradients(model, len(batch))
            optimizer.step()
        if rank == 0:
            print("epoch", epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
