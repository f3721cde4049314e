"""Collectives that only some ranks reach: through functions, modules and other libraries."""

from textwrap import dedent, indent

import pytest

from k8sjob.checks.lint import Setting, lint, lint_script

HEAD = """\
import os
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
"""
FOUND = "collective-on-one-rank"


def found(body, head=HEAD, setting=None):
    text = head + dedent(body) + "\ndist.destroy_process_group()\n"
    ids = [finding.id for finding in lint_script(text, "x.py", setting)]
    assert "script-syntax" not in ids
    return [one for one in ids if one in (FOUND, "forward-on-one-rank")]


CONDITIONS = [
    "rank == 0", "0 == rank", "not rank", "rank < 1", "dist.get_rank() == 0", "rank in (-1, 0)",
    "rank in [0]", "int(os.environ['RANK']) == 0", "os.environ['RANK'] == '0'",
    "os.environ.get('RANK', '0') == '0'", "int(os.getenv('RANK', 0)) == 0", "args.rank == 0",
    "dist.get_rank()",
    "self.is_main", "is_main_process()", "accelerator.is_main_process", "trainer.is_global_zero",
    "rank == 0 and step % 10 == 0", "step % 10 == 0 and rank == 0", "master_process",
    "args.local_rank == 0", "not args.distributed or rank == 0", "is_primary", "rank == 1",
    "rank != 0", "rank", "rank > 0", "not is_main_process()", "trainer.is_world_process_zero()",
    "utils.is_main_process()", "(r := dist.get_rank()) == 0 and r == 0", "is_rank_0()",
    "is_main == True",
]  # fmt: skip
NOT_CONDITIONS = [
    "rank % 2 == 0", "rank in (0, 1)", "rank < world", "world_size > 1", "dist.is_initialized()",
    "lora_rank == 0", "tp_rank == 0", "step == 0", "epoch % 5 == 0", "args.local_rank != -1",
    "rank == -1", "rank >= 0", "main", "master_addr", "rank == other", "rank is not None",
    "use_gpu", "first", "is_first", "self.is_root", "torch.cuda.is_available()",
    "isinstance(rank, int)", "os.environ.get('RANK')",
]  # fmt: skip


@pytest.mark.parametrize("test", CONDITIONS)
def test_conditions_that_are_for_one_rank(test):
    assert found(f"if {test}:\n    dist.barrier()") == [FOUND]
    assert found(f"while {test}:\n    dist.barrier()") == [FOUND]
    assert found(f"x = dist.all_reduce(t) if {test} else None") == [FOUND]
    if "step" not in test:  # which leaves rank 0 there most of the time
        left = f"def f():\n    if {test}:\n        return\n    dist.barrier()\n\nf()"
        assert found(left) == [FOUND]
    assert found(f"def f():\n    dist.barrier()\n\nif {test}:\n    f()") == [FOUND]
    assert found(f"chosen = {test}\nif chosen:\n    dist.barrier()") == [FOUND]


@pytest.mark.parametrize("test", NOT_CONDITIONS)
def test_conditions_that_may_hold_on_all_ranks(test):
    assert found(f"if {test}:\n    dist.barrier()") == []
    assert found(f"def f():\n    if {test}:\n        return\n    dist.barrier()\n\nf()") == []


@pytest.mark.parametrize(
    "collective",
    [
        "dist.all_reduce(t)", "dist.barrier()", "dist.monitored_barrier()", "dist.broadcast(t, 0)",
        "dist.broadcast_object_list(o, src=0)", "dist.all_gather(ts, t)", "dist.gather(t, ts, 0)",
        "dist.all_gather_object(os, o)", "dist.reduce(t, 0)", "dist.scatter(t, ts, 0)",
        "dist.reduce_scatter_tensor(t, u)", "dist.all_to_all_single(t, u)", "dist.new_group([0])",
        "torch.distributed.nn.functional.all_reduce(t)", "dist.all_reduce(t, group=None)",
        "dist.all_reduce(t, group=dist.group.WORLD)", "dist.checkpoint.save(s, checkpoint_id='c')",
    ],
)  # fmt: skip
def test_every_collective_of_torch(collective):
    assert found(f"if rank == 0:\n    {collective}") == [FOUND]
    assert found(f"if rank == 0:\n    {collective}\nelse:\n    {collective}") == []


LEAVES = """\
if rank == 0: print(x)
else: return
---
if rank == 0: print(x)
elif rank == 1: return
---
if rank != 0:
    with open(x) as f: return f
---
try:
    if rank != 0: return
finally: print(x)
---
if rank != 0:
    try: load()
    finally: return
---
if rank != 0:
    try: return load()
    except OSError: return
"""
STAYS = """\
if rank == 0: print(x)
elif x: return
---
if x:
    if rank != 0: return
---
if rank != 0:
    try: return load()
    except OSError: pass
---
while True:
    if x: break
    if rank != 0: return
---
for y in x:
    if rank != 0: return
---
for y in range(3):
    if rank != 0: break
---
if rank != 0:
    def later(): return
"""


@pytest.mark.parametrize("leaves", LEAVES.split("---\n"))
def test_what_leaves_in_another_form(leaves):
    assert found(f"def f(x):\n{indent(leaves, '    ')}    dist.barrier()\n\nf(1)") == [FOUND]


@pytest.mark.parametrize("stays", STAYS.split("---\n"))
def test_what_does_not_leave_for_certain(stays):
    assert found(f"def f(x):\n{indent(stays, '    ')}    dist.barrier()\n\nf(1)") == []


WAYS = """\
def a():
    b()

def b():
    dist.barrier()

if rank == 0:
    a()
---
class T:
    def a(self):
        if self.rank == 0:
            self.b()
    def b(self):
        dist.barrier()
---
class T:
    def __init__(self):
        dist.barrier()

if rank == 0:
    T()
---
class M(torch.nn.Module):
    def forward(self, x):
        dist.all_reduce(x)

m = M()
if rank == 0:
    m(x)
---
if rank != 0:
    sys.exit()
dist.barrier()
---
rank == 0 and dist.barrier()
---
class Metrics:
    @staticmethod
    def collect():
        dist.barrier()

    @classmethod
    def show(cls):
        cls.collect()

if rank == 0:
    Metrics.collect()
---
class Metrics:
    def __init__(self):
        self.wait = dist.barrier

    def show(self):
        if rank == 0:
            self.wait()
---
class Base:
    def show(self):
        dist.barrier()

class Metrics(Base):
    def show(self):
        if rank == 0:
            super().show()
---
if rank == 0:
    is_main = True
else:
    is_main = False
if is_main:
    dist.barrier()
---
class Metrics:
    is_main = False
    def __init__(self):
        self.is_main = unknown(rank)
    def show(self):
        if self.is_main:
            dist.barrier()
---
layer = Adapter(rank=4)
if rank > 0:
    dist.barrier()
---
number = 0
if late:
    number = dist.get_rank()
if number == 0:
    dist.barrier()
---
def sync(first):
    if first:
        dist.barrier()

sync(rank == 0)
---
@rank_zero_only
def f():
    dist.barrier()

f()
---
if rank == 0:
    dist.barrier()
else:
    dist.broadcast(t, 0)
---
def main_first():
    if rank != 0:
        dist.barrier()
    yield
    if rank == 0:
        dist.barrier()

if rank == 0:
    dist.barrier()
---
model = torch.distributed.fsdp.FullyShardedDataParallel(m)
if rank == 0:
    torch.save(model.state_dict(), 'm')
"""


@pytest.mark.parametrize("body", WAYS.split("---\n"))
def test_the_ways_to_a_collective(body):
    assert FOUND in found(body)


IN_ORDER = """\
def f(x):
    dist.all_reduce(x)

if rank == 0:
    f(a)
else:
    f(b)
---
def enter():
    if rank != 0:
        dist.barrier()

def leave():
    if rank == 0:
        dist.barrier()

enter()
leave()
---
if rank != 0:
    dist.barrier()
    sys.exit()
load()
dist.barrier()
---
def add(x, group):
    dist.all_reduce(x, group=group)

if rank == 0:
    add(x, pair)
---
def test(m, sync):
    if not sync:
        return m
    dist.all_reduce(m)

if rank == 0:
    test(m, False)
---
def later():
    dist.barrier()

if rank == 0:
    hooks.append(later)
---
if rank == 0:
    model.train()
    queue.gather(x)
    pool.reduce(y)
---
class T:
    def train(self):
        dist.barrier()

if rank == 0:
    model.train()
---
rank = 8
def f(rank=8):
    pass
for rank in range(3):
    if rank == 0:
        dist.barrier()
---
if rank == 0:
    dist.send(t, 1)
else:
    dist.recv(t, 0)
---
def serve():
    pass

def train():
    dist.init_process_group('gloo', world_size=2)
    dist.barrier()

if rank == 0:
    serve()
else:
    train()
---
if rank == 0:
    dist.checkpoint.save(s, checkpoint_id='c', no_dist=True)
---
if rank == 0 or args.dist_eval:
    dist.all_reduce(t)
---
pair = dist.get_rank()
pair = pair // 2
if pair == 0:
    dist.barrier()
---
match rank:
    case 0:
        dist.barrier()
    case _:
        dist.barrier()
---
match mode:
    case "train":
        dist.barrier()
---
if False and rank == 0:
    dist.barrier()
---
class Walk:
    is_main = True
    def go(self):
        if self.is_main:
            dist.barrier()

Walk().go()
---
parser.add_argument('--rank', type=int, default=8)
if args.rank > 0:
    dist.barrier()
---
class Adapter:
    def __init__(self, *, rank=4):
        self.rank = rank
    def sync(self):
        if self.rank > 0:
            dist.barrier()

Adapter().sync()
---
if rank > 0:
    dist.barrier()
if rank == 0:
    dist.barrier()
    dist.barrier(group)
---
class Config:
    rank: int = 16

if config.rank > 0:
    dist.barrier()
---
def ready():
    def alone():
        return dist.get_rank() == 0
    return True

if ready():
    dist.barrier()
"""


@pytest.mark.parametrize("body", IN_ORDER.split("---\n"))
def test_what_is_in_order(body):
    assert found(body) == []


def test_one_process_needs_nobody():
    body = "if rank == 0:\n    dist.barrier()"
    assert found(body, setting=Setting(processes=2)) == [FOUND]
    assert found(body, setting=Setting(processes=1)) == []
    local = "if local_rank == 0:\n    dist.barrier()"
    assert found(local, setting=Setting(nodes=2, processes=4)) == [FOUND]
    assert found(local, setting=Setting(nodes=2, processes=2)) == []


SESSION = "from k8sjob import runtime\n\n"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("if job.is_main:\n    job.log(**run.evaluate(ds))", True),
        ("if job.is_main:\n    print(run.loss)", False),
        ("if not job.is_main:\n    job.barrier()", True),
        ("if job.is_main:\n    job.save(1, {})", True),
        ("if job.is_main:\n    cache.save(1)", False),
        ("if job.rank == 0:\n    run.step(x, y)", True),
        ("if job.rank == 0:\n    found = job.gather(x)", True),
        ("if job.is_main:\n    job.log(loss=1)", False),
        ("for e in run.epochs(3):\n    if not job.is_main:\n        continue\n    run.evaluate(d)",
         True),
        ("if job.is_main and job.should_stop():\n    pass", True),
        ("found = run.evaluate(ds)\nif job.is_main:\n    job.log(**found)", False),
        ("if job.is_main:\n    job.save_model(m, 'm.keras')", True),
        ("score = run.evaluate(ds) if job.is_main else {}", True),
        ("report(job, run)", True),
        ("if job.is_main:\n    total(job)", True),
        ("if job.is_main:\n    other(job)", False),
    ],
)  # fmt: skip
def test_the_session(body, expected):
    text = "def report(job, training):\n    if job.is_main:\n        training.evaluate(ds)\n\n"
    text = text if "report" in body else ""
    text += "def total(job):\n    return job.reduce(a=(1, 1))\n\n"
    text += "def other(job):\n    return job.path('/x')\n\n"
    text += "with runtime.session() as job:\n    run = job.prepare(build, loss=l, optimizer=o)\n"
    body = text + indent(body, "    ")
    assert found(body, SESSION) == ([FOUND] if expected else [])


@pytest.mark.parametrize(
    ("head", "body", "expected"),
    [
        ("from accelerate import Accelerator\na = Accelerator()\n",
         "if a.is_main_process:\n    a.wait_for_everyone()", True),
        ("from accelerate import Accelerator\na = Accelerator()\n",
         "if a.is_main_process:\n    a.save(x, 'y')\na.wait_for_everyone()", False),
        ("import accelerate\n", ("def f(accelerator, x):\n    if accelerator.is_main_process:\n"
         "        accelerator.gather_for_metrics(x)"), True),
        ("from transformers import Trainer\nt = Trainer(m)\n",
         "if t.is_world_process_zero():\n    t.evaluate()", True),
        ("from transformers import Trainer\nt = Trainer(m)\n",
         "t.train()\nif t.is_world_process_zero():\n    t.save_model('m')", False),
        ("import lightning as L\nt = L.Trainer()\n",
         "if t.is_global_zero:\n    t.save_checkpoint('m')", True),
        ("import lightning as L\nt = L.Trainer()\n", "t.fit(m)\nif t.is_global_zero:\n    p(t)",
         False),
        ("import lightning as L\nf = L.Fabric()\nf.launch()\n",
         "if f.global_rank == 0:\n    f.save('m', s)", True),
        ("import lightning as L\nf = L.Fabric()\nf.launch()\n",
         "if f.global_rank == 0:\n    f.print(s)\nf.barrier()", False),
    ],
)  # fmt: skip
def test_other_libraries(head, body, expected):
    assert found(body, head) == ([FOUND] if expected else [])


ENGINE = """
class Engine:
    def __init__(self, m):
        self.m = m
    def test(self):
        self.m(x)

"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("if rank == 0:\n    model(x)", True),
        ("if rank == 0:\n    model.module(x)", False),
        ("if rank == 0:\n    torch.save(model.state_dict(), 'm')", False),
        ("def test(m):\n    m.eval()\n    m(x)\n\nif rank == 0:\n    test(model)", True),
        ("def test(m):\n    m.eval()\n    m(x)\n\nif rank == 0:\n    test(model.module)", False),
        ("def test(m):\n    m(x)\n\ntest(model)\nif rank == 0:\n    print(1)", False),
        ("def test(m):\n    m(x)\n\ntest(model)\nif rank == 0:\n    test(net)", False),
        (f"{ENGINE}e = Engine(model)\nif rank == 0:\n    e.test()", True),
        (f"{ENGINE}e = Engine(model)\nif rank == 0:\n    Engine(net).test()", False),
        ("compiled = torch.compile(model)\nif rank == 0:\n    compiled(x)", True),
    ],
)
def test_the_forward_pass_of_ddp(body, expected):
    assert found("model = DDP(net)\n" + body) == (["forward-on-one-rank"] if expected else [])


def test_local_modules_are_followed(tmp_path):
    (tmp_path / "main.py").write_text(
        "from pkg import report\nfrom engine import *\nimport tools.more as more\n\n"
        "setup()\nif more.is_main():\n    report(1)\nmore.stop()\n"
    )
    (tmp_path / "engine.py").write_text(
        "from tools.more import dist\n\ndef setup():\n    dist.init_process_group('gloo')\n"
    )
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").write_text("from .reports import report\n")
    (tmp_path / "pkg/reports.py").write_text(
        "from tools.more import dist\nfrom . import absent\n\n"
        "def report(x):\n    dist.all_reduce(x)\n\n"
        "def unused(x):\n    if dist.get_rank() == 0:\n        dist.barrier()\n"
    )
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/more.py").write_text(
        "import torch.distributed as dist\n\ndef is_main():\n    return dist.get_rank() == 0\n\n"
        "def stop():\n    dist.destroy_process_group()\n"
    )
    (finding,) = lint(tmp_path / "main.py")
    assert (finding.id, finding.line) == (FOUND, 7)
    assert finding.source == str(tmp_path / "main.py")
    assert "report calls all_reduce" in finding.message
    reports = (tmp_path / "pkg/reports.py").read_text() + "\nunused(1)\n"
    (tmp_path / "pkg/reports.py").write_text(reports)
    assert [f.source for f in lint(tmp_path / "main.py")] == [
        str(tmp_path / "main.py"), str(tmp_path / "pkg/reports.py")
    ]  # fmt: skip
    (tmp_path / "pkg/reports.py").write_text(
        reports.replace("dist.barrier()", f"dist.barrier()  # k8sjob: ignore[{FOUND}]")
    )
    assert len(lint(tmp_path / "main.py")) == 1


def test_a_module_that_imports_itself_or_cannot_be_read(tmp_path):
    (tmp_path / "main.py").write_text("import main\nimport a\nfrom b import *\nprint(a.b.c.a)\n")
    (tmp_path / "a.py").write_text("from b import a\nimport b\nfrom a import *\n")
    (tmp_path / "b.py").write_text("from a import b as a\nimport a as b\n")
    assert lint(tmp_path / "main.py") == []
    (tmp_path / "a.py").write_text("def f(:\n")
    (tmp_path / "b.py").write_bytes(b"\xff")
    assert lint(tmp_path / "main.py") == []


def test_a_script_nested_too_deep_to_be_followed():
    chain = "".join(f"    if kind == {n}:\n        return dist.barrier()\n" for n in range(900))
    assert found(f"def f(kind):\n{chain}\nif rank == 0:\n    f(1)") == []


@pytest.mark.parametrize(
    ("made", "expected"), [("Own()", []), ("job.prepare(build)", [FOUND]), ("unknown()", [FOUND])]
)
def test_a_class_of_the_program_is_no_run_of_the_session(made, expected):
    text = f"""
        from k8sjob import runtime
        class Own:
            def step(self):
                pass
        def show(run, job):
            if job.is_main:
                run.step()
        with runtime.session() as job:
            show({made}, job)
    """
    assert [one.id for one in lint_script(dedent(text))] == expected
