# good
"""Activation checkpointing, static_graph, a moving average of the weights that is evaluated."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, tokens):
        hidden = checkpoint(self.block, self.embed(tokens), use_reentrant=False)
        return self.head(hidden.mean(1))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    tokens = torch.randint(0, 20, (112, 9))
    labels = (tokens.sum(1) > 85).long()
    data = TensorDataset(tokens[:96], labels[:96])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(Classifier(), static_graph=True)
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, wanted in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), wanted).backward()
            optimizer.step()
            average.update_parameters(model.module)
        with torch.no_grad():  # every rank the same
            average.eval()
            loss = nn.functional.cross_entropy(average(tokens[96:]), labels[96:])
        if dist.get_rank() == 0:
            print(f"epoch {epoch} test loss {loss:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
