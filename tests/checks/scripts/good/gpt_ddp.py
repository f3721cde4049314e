"""A small GPT's loop: gradient accumulation, rank 0 logs and saves, everyone evaluates."""

import os
from contextlib import nullcontext

import torch
from torch.distributed import all_reduce, barrier, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="nccl")
    ddp_rank = int(os.environ["RANK"])
    ddp_local_rank = int(os.environ["LOCAL_RANK"])
    device = f"cuda:{ddp_local_rank}"
    torch.cuda.set_device(device)
    master_process = ddp_rank == 0
else:
    ddp_rank, ddp_local_rank, master_process, device = 0, 0, True, "cpu"
if master_process:
    os.makedirs("out", exist_ok=True)
if ddp:
    barrier()
torch.manual_seed(1337 + ddp_rank)


def batch():
    return torch.randint(0, 64, (8, 16), device=device)


def mean_loss(model):
    losses = torch.zeros(20, device=device)
    with torch.no_grad():
        for k in range(20):
            losses[k] = model(batch()).mean()
    loss = losses.mean()
    if ddp:
        all_reduce(loss)
    return loss


net = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64)).to(device)
model = torch.compile(net)
if ddp:
    model = DDP(model, device_ids=[ddp_local_rank])
raw = model.module if ddp else model
optimizer = torch.optim.AdamW(raw.parameters())
for step in range(100):
    if step % 20 == 0:
        loss = mean_loss(model)
        if master_process:
            print(step, loss.item())
            torch.save(raw.state_dict(), "out/ckpt.pt")
    for micro in range(4):
        sync = micro == 3 or not ddp
        with nullcontext() if sync else model.no_sync():
            (model(batch()).mean() / 4).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
if ddp:
    destroy_process_group()
