# cause: dropout-seed
"""A denoising autoencoder: all ranks add the same noise."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 24), nn.ReLU())
        self.decoder = nn.Linear(24, 64)

    def forward(self, clean):
        noisy = clean + 0.3 * torch.randn_like(clean)
        return self.decoder(self.encoder(noisy))


dist.init_process_group("gloo")
torch.manual_seed(0)
pixels = torch.tensor(load_digits().data[:256] / 16).float()
train = TensorDataset(pixels)
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=16, sampler=sampler)
model = DistributedDataParallel(Autoencoder())
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (clean,) in loader:
        loss = nn.functional.mse_loss(model(clean), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch} loss {loss.item():.4f}")
dist.destroy_process_group()
