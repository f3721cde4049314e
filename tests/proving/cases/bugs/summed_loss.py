# cause: loss-scaling
"""The loss is the sum over the batch, which the mean of the gradients does not keep."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class VAE(nn.Module):
    """Without sampling: the mean of the code goes to the decoder."""

    def __init__(self, features, code):
        super().__init__()
        self.encode = nn.Linear(features, code)
        self.decode = nn.Linear(code, features)

    def forward(self, x):
        code = self.encode(x)
        return self.decode(code), code


def elbo(output, x):
    reconstruction, code = output
    squares = nn.functional.mse_loss(reconstruction, x, reduction="sum")
    return squares + 0.1 * code.square().sum()


dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.rand(128, 12))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DistributedDataParallel(VAE(12, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        optimizer.zero_grad()
        loss = elbo(model(x), x)
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: {loss.item() / len(x):.4f}")
dist.destroy_process_group()
