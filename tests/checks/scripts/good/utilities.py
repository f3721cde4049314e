"""Helpers as every vision repository has them: a module, not a program."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def is_dist_avail_and_initialized():
    return dist.is_available() and dist.is_initialized()


def get_rank():
    return dist.get_rank() if is_dist_avail_and_initialized() else 0


def is_main_process():
    return get_rank() == 0


def save_on_master(*args, **kwargs):
    if is_main_process():
        torch.save(*args, **kwargs)


def wrap(model, gpu):
    return DistributedDataParallel(model, device_ids=[gpu])


def init_distributed_mode(args):
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        args.rank = int(os.environ["RANK"])
        args.world_size = int(os.environ["WORLD_SIZE"])
        args.gpu = int(os.environ["LOCAL_RANK"])
    elif hasattr(args, "rank"):
        args.gpu = args.rank % torch.cuda.device_count()
    else:
        args.distributed = False
        return
    torch.cuda.set_device(args.gpu)
    dist.init_process_group(
        backend="nccl", init_method=args.dist_url, world_size=args.world_size, rank=args.rank
    )
    dist.barrier()


def clean_up():
    dist.destroy_process_group()
