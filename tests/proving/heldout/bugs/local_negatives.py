# cause: loss-scaling
"""A contrastive loss: the negatives are those of the rank's own batch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.images, self.texts = nn.Linear(12, 8), nn.Linear(6, 8)

    def forward(self, images, texts):
        return F.normalize(self.images(images), dim=1), F.normalize(self.texts(texts), dim=1)


def contrastive(images, texts, temperature=0.1):
    logits = images @ texts.T / temperature
    own = torch.arange(len(logits))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images = torch.randn(128, 12)
    data = TensorDataset(images, images[:, ::2] + 0.1 * torch.randn(128, 6))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(TwoTowers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss = contrastive(*model(*batch))
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
