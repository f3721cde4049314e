"""The long form of a DDP training: one file for one GPU, one node and many nodes."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--world-size", default=-1, type=int)
parser.add_argument("--rank", default=-1, type=int)
parser.add_argument("--dist-url", default="env://")
parser.add_argument("--gpu", default=None, type=int)
parser.add_argument("--multiprocessing-distributed", action="store_true")
best = 0.0


def main():
    args = parser.parse_args()
    if args.dist_url == "env://" and args.world_size == -1:
        args.world_size = int(os.environ["WORLD_SIZE"])
    args.distributed = args.world_size > 1 or args.multiprocessing_distributed
    gpus = torch.cuda.device_count()
    if args.multiprocessing_distributed:
        args.world_size = gpus * args.world_size
        mp.spawn(worker, nprocs=gpus, args=(gpus, args))
    else:
        worker(args.gpu, gpus, args)


def worker(gpu, gpus, args):
    global best
    args.gpu = gpu
    if args.distributed:
        if args.dist_url == "env://" and args.rank == -1:
            args.rank = int(os.environ["RANK"])
        if args.multiprocessing_distributed:
            args.rank = args.rank * gpus + gpu
        dist.init_process_group("nccl", world_size=args.world_size, rank=args.rank)
    model = torch.nn.Linear(8, 2)
    if args.distributed:
        model = torch.nn.parallel.DistributedDataParallel(model.cuda(args.gpu))
    elif args.gpu is not None:
        model = model.cuda(args.gpu)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train_set = TensorDataset(torch.rand(640, 8), torch.randint(0, 2, (640,)))
    val_set = TensorDataset(torch.rand(99, 8), torch.randint(0, 2, (99,)))
    sampler = DistributedSampler(train_set) if args.distributed else None
    loader = DataLoader(train_set, batch_size=8, shuffle=(sampler is None), sampler=sampler)
    for epoch in range(3):
        if args.distributed:
            sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        score = validate(val_set, model, args)
        is_best = score > best
        best = max(score, best)
        if not args.multiprocessing_distributed or args.rank % gpus == 0:
            torch.save({"best": is_best, "model": model.state_dict()}, "checkpoint.pt")
    if args.distributed:
        dist.destroy_process_group()


def validate(data, model, args):
    part, total = data, torch.zeros(2, dtype=torch.float64)
    if args.distributed:
        part = Subset(data, range(args.rank, len(data), args.world_size))
    model.eval()
    with torch.no_grad():
        for x, y in DataLoader(part, batch_size=8):
            total += torch.tensor([(model(x).argmax(-1) == y).sum().item(), len(y)])
    if args.distributed:
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
    score = (total[0] / total[1]).item()
    if args.rank in (-1, 0):
        print(score)
    return score


if __name__ == "__main__":
    main()
