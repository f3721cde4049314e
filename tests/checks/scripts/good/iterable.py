"""A stream that each rank reads every n-th sample of; the group lives as long as the program."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        for index in range(dist.get_rank(), 1024, dist.get_world_size()):
            yield torch.full((8,), float(index))


def main():
    dist.init_process_group()
    try:
        model = DistributedDataParallel(torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step, x in enumerate(DataLoader(Stream(), batch_size=8)):
            loss = model(x).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 100 == 0:
                dist.all_reduce(loss.detach(), op=dist.ReduceOp.AVG)
                if dist.get_rank() == 0:
                    print(step, loss.item())
                    torch.save(model.module.state_dict(), f"step-{step}.pt")
    finally:
        dist.destroy_process_group()


main()
