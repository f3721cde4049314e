# cause: batchnorm-statistics
"""A small convolutional network with batch normalization, four images for each rank."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 16, 10)

    def forward(self, images):
        hidden = torch.relu(self.norm(self.conv(images)))
        return self.head(nn.functional.max_pool2d(hidden, 2).flatten(1))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images[:128], dtype=torch.float32).unsqueeze(1) / 16
    train = TensorDataset(images, torch.tensor(digits.target[:128]))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=4, sampler=sampler)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print("epoch", epoch, "done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
