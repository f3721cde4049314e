"""A Trainer class with snapshots, for torchrun."""

import os
from pathlib import Path

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, data, optimizer, snapshot):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.data = data
        self.optimizer = optimizer
        self.snapshot = snapshot
        self.first = 0
        if Path(snapshot).exists():
            saved = torch.load(snapshot, map_location=f"cuda:{self.local_rank}", weights_only=True)
            model.load_state_dict(saved["model"])
            self.first = saved["epoch"]
        self.model = DistributedDataParallel(
            model.to(self.local_rank), device_ids=[self.local_rank]
        )

    def _epoch(self, epoch):
        self.data.sampler.set_epoch(epoch)
        for x, y in self.data:
            self.optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(self.model(x.to(self.local_rank)), y)
            loss.backward()
            self.optimizer.step()

    def _save(self, epoch):
        torch.save({"model": self.model.module.state_dict(), "epoch": epoch}, self.snapshot)

    def train(self, epochs):
        for epoch in range(self.first, epochs):
            self._epoch(epoch)
            if self.global_rank == 0 and epoch % 5 == 0:
                self._save(epoch)


def main(epochs=10):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    init_process_group(backend="nccl")
    data = TensorDataset(torch.rand(64, 20), torch.rand(64, 1))
    loader = DataLoader(data, batch_size=8, shuffle=False, sampler=DistributedSampler(data))
    model = torch.nn.Linear(20, 1)
    Trainer(model, loader, torch.optim.SGD(model.parameters(), lr=1e-3), "snapshot.pt").train(
        epochs
    )
    destroy_process_group()


if __name__ == "__main__":
    main()
