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


@pytest.mark.parametrize(
    "error",
    [
        "backend 'nccl' needs a GPU for each process",
        *(f"backend '{name}' is not in this torch" for name in ("gluu", "mpi", "tcp")),
    ],
)
def test_other_backends_are_refused_by_name(error):
    with pytest.raises(EnvError, match=error):
        backend_for(error.split("'")[1], CPU)


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


def test_alone_a_collective_is_a_copy():
    group = Group(DistEnv(0, 0, 1, 1, "127.0.0.1", 0), "gloo", CPU)
    value = torch.tensor([1.0, 2.0])
    for copy in (group.all_reduce(value), group.broadcast(value), group.gather(value)[0]):
        assert torch.equal(copy, value)
        copy.zero_()
    assert value.tolist() == [1.0, 2.0]
    assert group.sums([1, 2.5]) == [1.0, 2.5]
    assert group.table([1, 2.5]) == [[1.0, 2.5]]
    assert group.broadcast_bytes(b"x") == b"x"
    assert group.broadcast_bytes(None) is None
    group.barrier()
    with pytest.raises(ValueError, match="op='mean'"):
        group.all_reduce(value, "mean")
    with pytest.raises(ValueError, match="to=1: it must be one of the ranks 0 to 0"):
        group.gather(value, to=1)
