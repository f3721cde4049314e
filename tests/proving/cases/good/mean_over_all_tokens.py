# good
"""A language model with padding: the loss is divided by the tokens of all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

PAD, WORDS, LENGTH = 0, 30, 12


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16, padding_idx=PAD)
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, WORDS)

    def forward(self, tokens):
        return self.head(self.gru(self.embed(tokens))[0])


def sentences(count):
    tokens = torch.randint(1, WORDS, (count, LENGTH))
    lengths = torch.randint(2, LENGTH + 1, (count, 1))
    return tokens * (torch.arange(LENGTH) < lengths)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(6)
    data = TensorDataset(sentences(96))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = DistributedDataParallel(LanguageModel())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    criterion = nn.CrossEntropyLoss(ignore_index=PAD, reduction="sum")
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (tokens,) in loader:
            words = (tokens[:, 1:] != PAD).sum()
            dist.all_reduce(words)
            logits = model(tokens[:, :-1])
            loss = criterion(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            (loss * dist.get_world_size() / words).backward()  # DDP divides by the world size
            optimizer.step()
    if dist.get_rank() == 0:
        print("trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
