"""Scripts that have never heard of k8sjob, each started as its author would, as a local job."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from k8sjob.backends.local import LocalBackend
from k8sjob.observe.status import JobState
from k8sjob.python_api import run
from k8sjob.spec import JobSpec, load

pytestmark = pytest.mark.dist

TRAIN = """
    import os
    from pathlib import Path
    import torch
    import torch.distributed as dist

    def train(tell):
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.ones(4, 2)).sum().backward()
        ranks = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(ranks)
        line = f"rank {dist.get_rank()} of {dist.get_world_size()}, {tell}, sum {ranks.item():g}"
        os.write(1, f"{line}\\n".encode())  # print writes the newline apart, if it is not buffered
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), Path(__file__).parent / "ckpt.pt")
        dist.destroy_process_group()
"""
# Whoever another launcher than ours has started leaves at once: torch aborts one process in eighty
# that comes to its end (pytorch#190489), of which k8sjob keeps its own ranks alone.
PLAIN = """
    from train import train
    train("local rank " + os.environ["LOCAL_RANK"])
    os._exit(0)
"""
SPAWNS = """
    import torch.multiprocessing as mp
    from train import train

    def begin(local_rank, count):
        node = int(os.environ["RANK"])
        os.environ["WORLD_SIZE"] = str(count * int(os.environ["WORLD_SIZE"]))
        os.environ["RANK"] = str(node * count + local_rank)
        train(f"local rank {local_rank}")
        os._exit(0)

    if __name__ == "__main__":
        mp.spawn(begin, args=(2,), nprocs=2)
"""


@pytest.fixture
def start(tmp_path):
    """start(script, replicas=, run=) -> the lines of its ranks, in order; the job must succeed."""
    context = tmp_path / "context"
    context.mkdir()
    (context / "train.py").write_text(textwrap.dedent(TRAIN))

    def to_the_end(script, **fields):
        (context / "main.py").write_text("import os\n" + textwrap.dedent(script))
        fields["run"]["env"] = {"OMP_NUM_THREADS": "1"}
        policy = {"max_restarts": 0}
        spec = JobSpec(name="own", image="example/own:1", policy=policy, **fields)
        backend = LocalBackend(tmp_path / "state")
        events = []
        status = run(spec, view=events.append, folder=context, backend=backend, check=False)
        lines = [event.data.get("text", "") for event in events if event.kind == "log"]
        assert status.state is JobState.SUCCEEDED, "\n".join(lines)
        folder = backend.folder(status.ref)
        assert (folder.replica("master-0") / "work" / "ckpt.pt").exists()
        return sorted(line for line in lines if line.startswith("rank "))

    return to_the_end


TWO_BY_TWO = {"workers": 1, "nproc_per_node": 2}
ALL_FOUR = [f"rank {rank} of 4, local rank {rank % 2}, sum 6" for rank in range(4)]
BOTH = [f"rank {rank} of 2, local rank {rank}, sum 1" for rank in range(2)]


def test_a_launcher_of_its_own_finds_the_group_in_the_environment(start):
    """Number of nodes and processes, rank and address come by PET_*: nothing is typed."""
    launcher = ["python", "-m", "torch.distributed.launch", "main.py"]
    assert start(PLAIN, replicas=TWO_BY_TWO, run={"command": launcher}) == ALL_FOUR


def test_a_script_that_spawns_its_ranks_itself(start):
    assert start(SPAWNS, replicas={"workers": 0}, run={"script": "main.py"}) == BOTH


def test_the_example_learns_and_is_short(tmp_path):
    home = Path(__file__).resolve().parents[2] / "manifests/own-script"
    events = []
    backend = LocalBackend(tmp_path / "state")
    spec = load(home / "job.yaml")
    status = run(spec, view=events.append, folder=home, backend=backend, check=False)
    lines = [event.data.get("text", "") for event in events if event.kind == "log"]
    assert status.state is JobState.SUCCEEDED, "\n".join(lines)
    # print() writes a line and its end apart, so two ranks' lines may meet.
    assert set(re.findall(r"rank \d of 4, local rank \d", " ".join(lines))) == {
        f"rank {rank} of 4, local rank {rank % 2}" for rank in range(4)
    }
    (accuracy,) = [line for line in lines if line.startswith("accuracy ")]
    assert float(accuracy.removeprefix("accuracy ")) > 0.9
    assert len((home / "main.py").read_text().splitlines()) <= 60


def test_the_curve_is_of_what_rank_0_prints(tmp_path):
    context = tmp_path / "context"
    context.mkdir()
    (context / "main.py").write_text(
        "import os, time\n"
        "for step in range(1, 5):\n"
        "    line = f'{step}/4 in {0.5:.1f} s: error={int(os.environ[\"RANK\"]) * 10 + step}'\n"
        "    print(line)\n"
        "    time.sleep(0.1)\n"
    )
    spec = JobSpec(
        name="own",
        image="example/own:1",
        replicas={"nproc_per_node": 2},
        run={"script": "main.py", "metrics": ["{step}/{steps} in {} s: error={error}"]},
    )
    result = run(spec, view="plain", folder=context, backend=LocalBackend(tmp_path / "state"))
    rows = [(row["step"], row["error"]) for row in result.history]
    assert rows == [(step, step) for step in range(1, 5)]
    assert len(re.findall("error=", result.logs["master-0"])) == 8
