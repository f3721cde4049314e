"""Checks of what all ranks must do in the same way: groups, roots, shares, orders, launchers."""

import textwrap

import pytest

from k8sjob.checks.lint import Setting, lint_script

HEAD = """\
import glob, os, subprocess, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import new_group as new
from torch.utils.data import DistributedSampler

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
"""
PAIRS = "for pair in [[0, 1], [2, 3]]:\n    "
MODEL = "class M(nn.Module):\n    def __init__(self, config):\n        "
FIND = {
    "group-differs-by-rank": [
        ("dist.new_group([0, 1] if rank < 2 else [2, 3])", True),
        ("node = rank // 8\ndist.new_group(list(range(node * 8, node * 8 + 8)))", True),
        (f"{PAIRS}if rank in pair:\n        dist.new_group(pair)", True),
        (f"{PAIRS}if rank not in pair:\n        continue\n    dist.new_group(pair)", True),
        ("if rank < 2:\n    dist.new_group([0, 1])", True),
        ("def pair(r):\n    return dist.new_group([r, r + 1])\n\npair(dist.get_rank())", True),
        (f"{PAIRS}made = dist.new_group(pair)\n    if rank in pair:\n        group = made", False),
        ("dist.new_group([rank])", False),
        ("dist.new_group(list(range(world)))", False),
        ("dist.new_group([r for r in range(world) if r % 2 == 0])", False),
        ("dist.new_group([rank, rank ^ 1], use_local_synchronization=True)", False),
        ("if rank < 2:\n    dist.new_group([0, 1])\nelse:\n    dist.new_group([2, 3])", True),
        ("if rank < 2:\n    dist.new_group([0, 1])\nelse:\n    dist.new_group([0, 1])", False),
        (f"{PAIRS}if rank in pair:\n        new(pair)\n        continue\n    new(pair)", False),
        ("if rank >= 0:\n    dist.new_group([0, 1])", False),
        ("if rank != -1:\n    dist.new_group([0, 1])", False),
        ("if world > 1:\n    dist.new_group([0, 1])", False),
    ],
    "root-differs-by-rank": [
        ("dist.broadcast(x, src=rank)", True),
        ("dist.gather(x, out, dst=int(os.environ['RANK']))", True),
        ("dist.broadcast_object_list(x, dist.get_rank())", True),
        ("def send(r):\n    dist.broadcast(x, src=r)\n\nsend(dist.get_rank())", True),
        ("for rank in range(world):\n    dist.broadcast(x, src=rank)", False),
        ("if rank == 2:\n    dist.broadcast(x, rank)\nelse:\n    dist.broadcast(x, 2)", False),
        ("def send(x, rank=0):\n    dist.broadcast(x, src=rank)\n\nsend(1)", False),
        ("torch.gather(x, 1, rank)", False),
        ("dist.broadcast(x, rank, group=dist.new_group([rank]))", False),
    ],
    "sampler-by-local-rank": [
        ("DistributedSampler(d, world, int(os.environ['LOCAL_RANK']), False)", True),
        ("n = int(os.getenv('LOCAL_WORLD_SIZE'))\nDistributedSampler(d, n, rank, False)", True),
        ("DistributedSampler(d, rank=args.local_rank, shuffle=False)", True),
        ("DistributedSampler(d, torch.cuda.device_count(), rank, False)", True),
        ("lr = int(os.getenv('LOCAL_RANK', 0))\nStatefulSampler(d, rank=lr)", True),
        ("d.shard(num_shards=world, index=int(os.environ['LOCAL_RANK']))", True),
        ("split_dataset_by_node(d, int(os.environ['LOCAL_RANK']), world)", True),
        ("DistributedSampler(d, world, rank, False)", False),
        ("BatchSampler(s, torch.cuda.device_count(), True)", False),
        ("NodeSampler(d, local_rank=int(os.environ['LOCAL_RANK']))", False),
        ("def f(local_rank):\n    DistributedSampler(d, 2, local_rank, False)\n\nspawn(f)", False),
    ],
    "order-by-hash": [
        (f"{MODEL}for t in set(config.x):\n            self.register_buffer(f'{{t}}_x', t)", True),
        (f"{MODEL}for t in {{'a', 'b'}}:\n            setattr(self, t, nn.Linear(1, 1))", True),
        ("nn.ModuleDict({k: nn.Linear(1, 1) for k in {'a', 'b'}})", True),
        ("files = list(set(glob.glob('*.pt')) - {'a.pt'})", True),
        ("names = set(os.listdir('x'))\nfor i, name in enumerate(names):\n    use(i, name)", True),
        ("vocabulary = {w: i for i, w in enumerate(set(open('t').read().split()))}", True),
        ("mine = [f for f in files if hash(f) % world == rank]", True),
        ("bucket = hash(f'{name}.txt') % 16", True),
        ("class C:\n    def f(self, d):\n        for k in set(d):\n            setattr(self, k, d)",
         False),
        ("ids = {n: i for i, n in enumerate({int(t) for t in line.split()})}", False),
        ("files = sorted(set(glob.glob('*.pt')))", False),
        ("files = list(set(glob.glob('*.pt')))\nfiles.sort()", False),
        ("classes = {c: i for i, c in enumerate(set(labels))}", False),
        ("for name in set(names):\n    print(name)", False),
        ("torch.manual_seed(hash(f'{rank}') % 2**32)", False),
        ("for i in range(9):\n    if hash(i) % world == rank:\n        use(i)", False),
        ("mine = [f for i, f in enumerate(files) if hash(i) % world == rank]", False),
        ("mine = [f for i, f in enumerate(files) if hash(f) % world == rank]", True),
        ("number = len(files)\nuse(hash(number) % world == rank)", False),
    ],
}  # fmt: skip
"""Bodies after HEAD, and whether the check finds them."""


def ids(body, setting=None):
    text = f"{HEAD}{textwrap.dedent(body)}\ndist.destroy_process_group()\n"
    return [finding.id for finding in lint_script(text, "x.py", setting)]


@pytest.mark.parametrize(
    ("check", "body", "wrong"), [(check, *case) for check, cases in FIND.items() for case in cases]
)
def test_what_must_be_the_same_on_all_ranks(check, body, wrong):
    assert set(ids(body)) == ({check} if wrong else set())
    if check != "order-by-hash":  # the next run has another order, too
        assert ids(body, Setting(nodes=1, processes=1, launcher="k8sjob")) == []


def test_a_list_of_all_ranks_selects_nobody():
    body = "if rank in (0, 1):\n    dist.new_group([0, 1])"
    assert ids(body, Setting(processes=2)) == []
    assert ids(body, Setting(processes=4)) == ["group-differs-by-rank"]


LAUNCHES = [
    ("os.system('torchrun --nproc-per-node 2 t.py')", True),
    ("os.system(f'CUDA_VISIBLE_DEVICES=0 torchrun --nproc-per-node {n} t.py')", True),
    ("subprocess.run([sys.executable, '-m', 'torch.distributed.run', 't.py'])", True),
    ("command = ['deepspeed', 't.py']\nsubprocess.Popen(command)", True),
    ("def go(command):\n    subprocess.run(command)\n\ngo(['accelerate', 'launch', 't.py'])", True),
    ("subprocess.run('cd /a && mpirun -n 2 x', shell=True)", True),
    ("from torch.distributed.run import main\nmain(['t.py'])", True),
    (
        "import tempfile\nwith tempfile.TemporaryDirectory() as d:\n    os.system('torchrun x')",
        True,
    ),
    ("import accelerate\naccelerate.notebook_launcher(f, (), num_processes=1)", False),
    ("os.system('pip install deepspeed')", False),
    ("subprocess.check_output(['mpirun', '--version'])", False),
    ("subprocess.run(['which', 'torchrun'])", False),
    ("subprocess.check_output(['git', 'rev-parse', 'HEAD'])", False),
    ("print('start it with torchrun t.py')", False),
    ("if 'RANK' not in os.environ:\n    os.execvp('torchrun', ['torchrun', 't.py'])", False),
]


@pytest.mark.parametrize(("body", "wrong"), LAUNCHES)
def test_a_launcher_inside_of_a_launcher(body, wrong):
    assert ids(body) == ["own-launcher"] * wrong
    assert ids(body, Setting(processes=2, launcher="k8sjob")) == ["own-launcher"] * wrong
    assert "own-launcher" not in ids(body, Setting(processes=2, launcher="none"))
    alone = lint_script(f"import os, subprocess, sys\n{body}\n", "launch.py")
    assert alone == []  # it only launches, so a plain python starts it
