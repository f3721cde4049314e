"""A loop of one's own over a model that FSDP2 divides, saved by job.save."""

import json
import sys

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

from k8sjob import runtime

OPTIONS = {"steps": 6, "like": True, **json.loads(sys.argv[1])}


with runtime.session() as job:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    for layer in model:
        fully_shard(layer)
    optimizer = torch.optim.Adam(fully_shard(model).parameters(), lr=0.1)
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
    losses = state["losses"] if state else []
    for step in range(len(losses), OPTIONS["steps"]):
        loss = model(torch.linspace(-1, 1, 24).view(4, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights, moments = get_state_dict(model, optimizer)
    if job.checkpoint_dir:
        job.save(len(losses), {"model": weights, "optimizer": moments, "losses": losses})
    if job.is_main:
        sys.stdout.write(f"RESULT {json.dumps(losses)}\n")
