# cause: checkpoint-incomplete
"""Model and optimizer come back, but the epochs are counted from 0 again."""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "digits.ckpt")


dist.init_process_group("gloo")
torch.manual_seed(0)
digits = load_digits()
train = TensorDataset(
    torch.tensor(digits.data[:192] / 16).float(), torch.tensor(digits.target[:192])
)
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=16, sampler=sampler)
network = nn.Sequential(nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10))
optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
if os.path.exists(PATH):
    saved = torch.load(PATH, weights_only=True)
    network.load_state_dict(saved["network"])
    optimizer.load_state_dict(saved["optimizer"])
model = DistributedDataParallel(network)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        torch.save({"network": network.state_dict(), "optimizer": optimizer.state_dict()}, PATH)
        print(f"epoch {epoch} of 2")
    dist.barrier()
dist.destroy_process_group()
