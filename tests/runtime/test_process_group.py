import pytest
import torch

from k8sjob.runtime.base.env import DistEnv
from k8sjob.runtime.base.errors import EnvError
from k8sjob.runtime.comm.process_group import Group, backend_for, common_backend
from k8sjob.runtime.comm.rendezvous import RankInfo

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def info(rank, backend, gpu="", host="a"):
    return RankInfo(rank, 3, host, backend, gpu)


def test_the_device_chooses_the_backend():
    assert backend_for(None, CPU) == "gloo"
    assert backend_for(None, GPU) == "nccl"
    assert backend_for("gloo", GPU) == "gloo"


def test_nccl_needs_gpus():
    with pytest.raises(EnvError, match="backend 'nccl' needs a GPU for each process"):
        backend_for("nccl", CPU)


@pytest.mark.parametrize(
    ("infos", "backend", "remark"),
    [
        ([info(0, "gloo"), info(1, "gloo")], "gloo", ""),
        ([info(0, "nccl", "x"), info(1, "nccl", "y")], "nccl", ""),
        ([info(0, "nccl", "x"), info(1, "nccl", "x", host="b")], "nccl", ""),
        ([info(0, "nccl", "x"), info(1, "nccl", "x")], "gloo", "0 and 1 share one GPU on a"),
        ([info(0, "nccl"), info(1, "nccl")], "nccl", ""),  # a torch that names no GPUs
        ([info(0, "nccl", "x"), info(1, "gloo")], "gloo", "no GPU for rank 1,"),
    ],
)
def test_one_backend_for_all(infos, backend, remark):
    found = common_backend(infos)
    assert found[0] == backend
    assert remark in found[1]
    assert bool(found[1]) == bool(remark)


def test_what_a_collective_does_not_take_is_refused():
    group, value = Group(DistEnv(0, 0, 1, 1, "127.0.0.1", 0), "gloo", CPU), torch.ones(2)
    with pytest.raises(ValueError, match="op='mean'"):
        group.all_reduce(value, "mean")
    with pytest.raises(ValueError, match="to=1: it must be one of the ranks 0 to 0"):
        group.gather(value, to=1)
