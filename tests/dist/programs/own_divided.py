"""A loop of one's own over a model that FSDP2 divides, saved by job.save."""

import json
import sys
from collections import Counter

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from k8sjob import runtime

OPTIONS = {"steps": 6, "like": True, "tensor_parallel": False, **json.loads(sys.argv[1])}


with runtime.session() as job:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    mesh = init_device_mesh("cpu", (job.world_size,), mesh_dim_names=("data",))
    if OPTIONS["tensor_parallel"]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        parallelize_module(model, mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    weights, moments = get_state_dict(model, optimizer)
    like = {"model": weights, "optimizer": moments} if OPTIONS["like"] else None
    state = job.load(like) if job.checkpoint_dir else None
    whole = StateDictOptions(full_state_dict=not OPTIONS["like"])
    if state is not None:
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=whole,
        )
        assert isinstance(state["milestones"], Counter)
    losses = state["losses"] if state else []
    for _ in range(len(losses), OPTIONS["steps"]):
        loss = model(torch.linspace(-1, 1, 24).view(4, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights, moments = get_state_dict(model, optimizer)
    if job.checkpoint_dir:
        others = {"losses": losses, "milestones": Counter([3]), "shape": torch.Size([2, 3])}
        job.save(len(losses), {"model": weights, "optimizer": moments, **others})
    if job.is_main:
        sys.stdout.write(f"RESULT {json.dumps(losses)}\n")
