"""A Keras model on torch, under DDP with a loop of one's own; sklearn splits the data."""

import keras
import torch
import torch.distributed as dist
from sklearn.preprocessing import StandardScaler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
pixels = StandardScaler().fit(torch.rand(64, 8).numpy())
model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(2)])
ddp = DistributedDataParallel(model)
data = TensorDataset(torch.rand(64, 8), torch.randint(0, 2, (64,)))
sampler = DistributedSampler(data, seed=1)
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(5):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(data, batch_size=8, sampler=sampler):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
if dist.get_rank() != 0:
    dist.destroy_process_group()
    raise SystemExit
model.save_weights("model.weights.h5")
torch.save(optimizer.state_dict(), "optimizer.pt")
dist.destroy_process_group()
