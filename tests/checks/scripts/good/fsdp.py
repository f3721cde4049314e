"""Sharded training whose full state dict is gathered by all and written by one."""

import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

rank = int(os.environ["RANK"])
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))
model = torch.nn.Linear(64, 64)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(10):
    torch.manual_seed(step + rank)
    model(torch.rand(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
if rank == 0:
    torch.save(state, "model.pt")
dist.barrier()
dist.destroy_process_group()
