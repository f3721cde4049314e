# good
"""The embedding is also the output layer; the ranks take their rows of each global batch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORDS, GLOBAL_BATCH, SENTENCES = 40, 16, 128


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.mix = nn.Linear(16, 16)
        self.out = nn.Linear(16, WORDS, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        return self.out(torch.tanh(self.mix(self.embed(tokens))))


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    corpus = torch.randint(0, WORDS, (SENTENCES, 10))
    model = DistributedDataParallel(Tied())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        order = torch.randperm(SENTENCES, generator=torch.Generator().manual_seed(epoch))
        for start in range(0, SENTENCES, GLOBAL_BATCH):
            rows = order[start : start + GLOBAL_BATCH][rank::world_size]
            tokens = corpus[rows]
            optimizer.zero_grad()
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
        if rank == 0:
            print("epoch", epoch)
    dist.destroy_process_group()


main()
