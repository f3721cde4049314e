"""mp.spawn on several nodes: one process for each GPU, the node's rank from the arguments."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--world-size", default=int(os.environ.get("WORLD_SIZE", "1")), type=int)
parser.add_argument("--rank", default=int(os.environ.get("RANK", "0")), type=int)
parser.add_argument("--gpu", default=None, type=int)
parser.add_argument("--evaluate", action="store_true")


def worker(gpu, gpus, args):
    args.gpu = gpu
    args.rank = args.rank * gpus + gpu
    dist.init_process_group("nccl", rank=args.rank, world_size=args.world_size)
    torch.cuda.set_device(args.gpu)
    model = torch.nn.Linear(8, 8).cuda(args.gpu)
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu])
    train_set = TensorDataset(torch.rand(640, 8))
    val_set = TensorDataset(torch.rand(99, 8))
    train_sampler = DistributedSampler(train_set)
    val_sampler = DistributedSampler(val_set, shuffle=False, drop_last=True)
    train_loader = DataLoader(
        train_set, batch_size=8, shuffle=(train_sampler is None), sampler=train_sampler
    )
    val_loader = DataLoader(val_set, batch_size=8, shuffle=False, sampler=val_sampler)
    best = 1e9
    for epoch in range(3):
        train_sampler.set_epoch(epoch)
        for (x,) in train_loader:
            model(x.cuda(args.gpu)).sum().backward()
        score = sum(model(x.cuda(args.gpu)).sum().item() for (x,) in val_loader)
        if score < best and args.rank % gpus == 0:
            best = score
            torch.save({"epoch": epoch, "model": model.state_dict()}, "checkpoint.pth.tar")
    dist.destroy_process_group()


def main():
    args = parser.parse_args()
    gpus = torch.cuda.device_count()
    args.world_size = gpus * args.world_size
    mp.spawn(worker, nprocs=gpus, args=(gpus, args))


if __name__ == "__main__":
    main()
