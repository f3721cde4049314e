"""Script checks beyond the reference's examples: where they must speak, and where be silent."""

from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8sjob.checks.lint import Setting, lint_script

ROOT = Path(__file__).resolve().parents[3]
OWN = sorted((Path(__file__).parent / "good").glob("*.py"))
EXAMPLES = sorted((ROOT / "manifests").glob("*/main.py"))
GROUP = (
    "import os\nimport torch\nimport torch.distributed as dist\n\ndist.init_process_group('gloo')\n"
)
END = "\ndist.destroy_process_group()\n"


def ids(body, setting=None, *, group=True):
    text = dedent(body)
    return [f.id for f in lint_script(GROUP + text + END if group else text, "x.py", setting)]


@pytest.mark.parametrize("script", OWN + EXAMPLES, ids=lambda path: "/".join(path.parts[-2:]))
def test_good_scripts_give_nothing(script):
    assert [str(f) for f in lint_script(script.read_text(), str(script))] == []


def test_nothing_is_executed(tmp_path):
    trap = tmp_path / "trap"
    assert lint_script(f"open({str(trap)!r}, 'w').close()\n") == []
    assert not trap.exists()


SAVE = "def save(to):\n    if to is not None:\n        torch.save(m, to)\n\n"
SAVER = """
class Saver:
    def __init__(self, enabled):
        self.enabled = enabled
    def save(self):
        if not self.enabled:
            return
        torch.save(m, 'm.pt')

"""
KEPT = f"{SAVER}saver = None\n"


SPEAKS = {
    "save-on-every-rank": [
        ("torch.save(m, 'm.pt')", True),
        ("if dist.get_rank() == 0:\n    torch.save(m, 'm.pt')", False),
        ("if step == 0:\n    torch.save(m, 'm.pt')", True),
        ("dist.get_rank() == 0 and torch.save(m, 'm.pt')", False),
        ("torch.save(m, f'm-{dist.get_rank()}.pt')", False),
        ("def save():\n    torch.save(m, 'm.pt')\n\nsave()", True),
        ("def save():\n    torch.save(m, 'm.pt')", False),
        ("def save():\n    if rank:\n        return\n    torch.save(m, 'm.pt')\n\nsave()", False),
        ("@rank_zero_only\ndef save():\n    torch.save(m, 'm.pt')\n\nsave()", False),
        ("def a():\n    b()\n\ndef b():\n    a()\n    torch.save(m, 'm.pt')\n\na()", True),
        ("model = torch.nn.Linear(1, 1).to(rank)\nif model:\n    torch.save(m, 'm.pt')", True),
        ("import io\nbuffer = io.BytesIO()\ntorch.save(m, buffer)", False),
        ("from torch import save as write\nwrite(m, 'm.pt')", True),
        ("import socket\ntorch.save(m, f'{socket.gethostname()}.pt')", False),
        ("import tempfile\nwith tempfile.NamedTemporaryFile() as h:\n    torch.save(m, h)", False),
        ("import tempfile\ntorch.save(m, tempfile.gettempdir() + '/m.pt')", True),
        ("import os\npath = os.path.join('out', f'{rank}.pt')\ntorch.save(m, path)", False),
        ("match mode:\n    case 0:\n        torch.save(m, 'm.pt')", True),
        (f"{SAVE}save('m.pt' if rank == 0 else None)", False),
        (f"{SAVE}save('m.pt' if step == 0 else None)", True),
        (f"{SAVER}Saver(enabled=rank == 0).save()", False),
        (f"{SAVER}Saver(enabled=True).save()", True),
        (f"{KEPT}if rank == 0:\n    saver = Saver(True)\nif saver:\n    saver.save()", False),
        (f"{KEPT}if step == 0:\n    saver = Saver(True)\nif saver:\n    saver.save()", True),
    ],
    "device-by-global-rank": [
        ("rank = dist.get_rank()\nx.cuda(rank)", True),
        ("rank = dist.get_rank()\nx.to(f'cuda:{rank}')", True),
        ("torch.cuda.set_device(dist.get_rank())", True),
        ("r = int(os.environ['RANK'])\ntorch.device('cuda', r)", True),
        ("rank = dist.get_rank() % torch.cuda.device_count()\nx.cuda(rank)", False),
        ("rank = dist.get_rank()\nrank = local\nx.cuda(rank)", False),
        ("rank = dist.get_rank()\ndef f(rank):\n    x.cuda(rank)", False),
        ("rank = dist.get_rank()\ndef f():\n    x.cuda(rank)", True),
        ("def f(number):\n    x.cuda(number)\n\nf(dist.get_rank())", True),
        ("for rank in range(2):\n    x.cuda(rank)", False),
    ],
    "hard-coded-rank": [
        ("os.environ.update({'RANK': '0', 'A': 'b'})", True),
        ("os.environ['RANK'] = str(rank)", False),
        ("if 'RANK' not in os.environ:\n    os.environ['RANK'] = '0'", False),
        ("def f():\n    os.environ['RANK'] = '0'\n\nif alone:\n    f()", False),
    ],
    "hard-coded-address": [
        ("os.environ['MASTER_ADDR'] = '127.0.0.1'", True),
        ("os.environ.update(MASTER_ADDR='localhost')", True),
        ("os.environ['MASTER_ADDR'] = 'training.example'", False),
        ("if alone:\n    os.environ['MASTER_ADDR'] = 'localhost'", False),
        ("os.environ['MASTER_PORT'] = '29500'", False),
        ("config['MASTER_ADDR'] = 'localhost'", False),
        # RPC and stores
        ("o = dist.rpc.TensorPipeRpcBackendOptions(init_method='tcp://localhost:29501')", True),
        ("s = dist.TCPStore('localhost', 29500, 2, False)", True),
        ("s = dist.TCPStore(host_name='::1', port=29500)", True),
        ("o = dist.rpc.TensorPipeRpcBackendOptions(init_method='tcp://master:29501')", False),
        # followed to its constant
        ("a = 'localhost'\nos.environ['MASTER_ADDR'] = a", True),
        ("def f(a='localhost'):\n    os.environ['MASTER_ADDR'] = a\n\nf()", True),
        ("def a():\n    return 'localhost'\n\nos.environ['MASTER_ADDR'] = a()", True),
        ("os.environ.update({'MASTER_ADDR': 'localhost', **os.environ})", False),
        ("p = free()\no = dist.rpc.Options(init_method=f'tcp://localhost:{p}')", True),
        ("a = 'localhost'\nif b:\n    a = 'host'\nos.environ['MASTER_ADDR'] = a", False),
        ("def f(a='localhost'):\n    os.environ['MASTER_ADDR'] = a\n\nf(host)", False),
        ("def f(a='localhost'):\n    os.environ['MASTER_ADDR'] = a\n\nf(**k)", False),
        ("def f(a='localhost'):\n    os.environ['MASTER_ADDR'] = a\n\nf()\nrun(f)", False),
        ("@cli\ndef f(a='localhost'):\n    os.environ['MASTER_ADDR'] = a\n\nf()", False),
        ("a = '::1'\ndef f():\n    global a\n    a = b\nos.environ['MASTER_ADDR'] = a", False),
        ("a = 'localhost'\na = f'{a}.net'\nos.environ['MASTER_ADDR'] = a", False),
        ("if d:\n    dist.init_process_group('gloo', 'tcp://localhost:1')", False),
        ("from b import a\na = '::1'\nos.environ['MASTER_ADDR'] = a", False),
    ],
}
"""Bodies after GROUP, and whether the check finds them."""


@pytest.mark.parametrize(
    ("check", "body", "found"), [(check, *one) for check, all_ in SPEAKS.items() for one in all_]
)
def test_where_a_check_speaks(check, body, found):
    assert ids(body) == [check] * found
    if check in {"device-by-global-rank", "hard-coded-address"}:
        assert ids(body, Setting(nodes=1)) == []


SPAWN = """\
import torch.distributed as dist
import torch.multiprocessing as mp

def train(i, n):
    {}
    dist.destroy_process_group()

mp.spawn(train, args=(2,), nprocs={})
"""


@pytest.mark.parametrize(
    ("made", "nprocs", "expected"),
    [
        ("dist.init_process_group('gloo', rank=i, world_size=n)", "2", "every rank exists several"),
        ("dist.init_process_group('gloo', rank=i, world_size=n)", "1", "every rank exists several"),
        ("dist.init_process_group('gloo')", "2", "find the same RANK"),
        ("dist.init_process_group('gloo')", "1", None),
        ("dist.init_process_group('gloo')", "args.n); p.add_argument('-n', default=1", None),
        ("dist.init_process_group('gloo')", "torch.cuda.device_count()", "find the same RANK"),
        ("dist.init_process_group('gloo', rank=i + 2 * int(os.environ['RANK']))", "2", None),
    ],
)
def test_spawned_processes_meet_those_of_other_pods(made, nprocs, expected):
    found = lint_script("import os\n" + SPAWN.format(made, nprocs))
    assert [f.id for f in found] == (["spawn-in-every-pod"] if expected else [])
    assert all(expected in f.message for f in found)


def test_an_init_method_that_never_leaves_the_pod():
    text = "import torch\ntorch.distributed.init_process_group('gloo', 'tcp://localhost:29500')\n"
    assert ids(text, group=False) == ["group-not-destroyed", "hard-coded-address"]
    assert ids(text, Setting(nodes=1), group=False) == ["group-not-destroyed"]


@pytest.mark.parametrize(
    ("gpus", "backend", "expected"),
    [(0, "'nccl'", ["nccl-without-gpu"]), (1, "'nccl'", []), (None, "'nccl'", []), (0, "b", [])],
)
def test_nccl_is_wrong_only_where_there_are_known_to_be_no_gpus(gpus, backend, expected):
    text = GROUP.replace("'gloo'", backend) + END
    assert ids(text, Setting(gpus=gpus), group=False) == expected


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (Setting(), ["local-rank-argument"]),
        (Setting(launcher="k8sjob", local_rank_arg="--local_rank"), []),
        (Setting(launcher="k8sjob", local_rank_arg="--local-rank"), ["local-rank-argument"]),
        (Setting(nodes=2, processes=2, gpus=1), []),  # it has its pod to itself
        (Setting(nodes=2, processes=4, gpus=0), []),
    ],
)
def test_a_local_rank_argument(setting, expected):
    text = "import argparse\nargparse.ArgumentParser().add_argument('--local_rank', type=int)\n"
    assert ids(text, setting, group=False) == expected
    both = text.replace("'--local_rank'", "'--local_rank', '--local-rank'")
    assert ids(both, setting, group=False) == []


@pytest.mark.parametrize(
    ("imports", "found"),
    [
        ("", True),
        ("import numpy, os", True),
        ("from torch.distributed import init_process_group", True),
        ("start = torch.distributed.init_process_group\nstart()", False),
        ("partial(torch.distributed.init_process_group, 'gloo')()", False),
        ("from torch.distributed import *\ninit_process_group()", False),
        ("getattr(torch.distributed, 'init_process_group')()", False),
        ("from helpers import setup", False),
        ("from . import setup", False),
        ("import lightning", False),
    ],
)
def test_a_missing_group_is_reported_only_where_nothing_else_could_make_it(imports, found):
    text = f"import torch\n{imports}\nprint(torch.nn.parallel.DistributedDataParallel(m))\n"
    assert ("process-group-missing" in ids(text, group=False)) is found
    training = ids(f"{text}loss.backward()\n", Setting(processes=2), group=False)
    assert ("training-not-distributed" in training) is found


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("DistributedSampler(train)", True),
        ("DistributedSampler(train, shuffle=False)", False),
        ("DistributedSampler(test_set)", False),
        ("DistributedSampler(dataset=train, num_replicas=2, rank=0)", True),
        ("DistributedSampler(latest)", True),
    ],
)
def test_an_epoch_that_is_never_set(call, found):
    loop = "for epoch in range(3):\n    for x in loader:\n        model(x).backward()\n"
    text = f"from torch.utils.data import DistributedSampler\nsampler = {call}\n{loop}"
    expected = ["sampler-in-evaluation"] if "test_set" in call else []
    assert ids(text) == (["sampler-without-set-epoch"] if found else expected)
    assert "sampler-without-set-epoch" not in ids(text + "    sampler.set_epoch(epoch)\n")


EPOCHS = "for e in range(3):\n    {}\n    for x in loader:\n        model(x).backward()\n"
STEPS = (
    "batches = iter(loader)\nfor step in range(9):\n    for micro in {}:\n        f().backward()\n"
)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (EPOCHS.format("pass"), True),
        (EPOCHS.format("sampler.set_epoch(0)"), True),
        (EPOCHS.format("sampler.set_epoch(epoch=0)"), True),
        (EPOCHS.format("sampler.set_epoch(first)"), False),
        (EPOCHS.format("sampler.set_epoch(0)\n    f(sampler)\n    sampler.set_epoch(1)"), False),
        (EPOCHS.format("sampler.epoch = e"), False),
        (EPOCHS.format("state.epoch = e"), True),
        (EPOCHS.format("loader.sampler.epoch = e"), False),
        (EPOCHS.format("getattr(sampler, 'set_epoch')(e)"), False),
        (EPOCHS.format("other = DistributedSampler(train, seed=e, shuffle=False)"), True),
        (STEPS.format("range(2)"), False),
        (STEPS.format("next(batches).chunk(2)"), False),
        (EPOCHS.format("pass").replace("in loader", "in DataLoader(train, 4)"), True),
    ],
)
def test_an_epoch_that_is_set_in_another_way(body, found):
    text = "from torch.utils.data import DataLoader, DistributedSampler\n"
    text += f"sampler = DistributedSampler(train)\n{body}"
    assert ("sampler-without-set-epoch" in ids(text)) is found
    anew = text.replace("pass\n", "sampler = DistributedSampler(train, seed=e)\n")
    anew = anew.replace("sampler = DistributedSampler(train)\n", "")
    assert "sampler-without-set-epoch" not in ids(anew)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("s = DistributedSampler(d)\ns.set_epoch(e)\nDataLoader(d, 4, shuffle=True)", True),
        ("s = DistributedSampler(d)\nDataLoader(d, 4, True)", True),
        ("DataLoader(d, 4, shuffle=True)", True),
        ("DataLoader(d, 4, shuffle=False)", False),
        ("s = DistributedSampler(d)\nDataLoader(d, 4, sampler=s)", False),
        ("s = DistributedSampler(d)\nrest = {'sampler': s}\nDataLoader(d, shuffle=True)", False),
        ("DataLoader(d, sampler=DistributedSampler(d))\nDataLoader(e, shuffle=True)", False),
        ("class S(DistributedSampler): pass\nDataLoader(d, shuffle=True)", False),
        ("class S(IterableDataset): pass\nDataLoader(d, shuffle=True)", False),
    ],
)
def test_data_that_nothing_divides(body, found):
    head = "from torch.utils.data import DataLoader, DistributedSampler, IterableDataset\n"
    text = f"{head}model = torch.nn.parallel.DistributedDataParallel(net)\n{body}"
    assert ids(text) == (["data-not-sharded"] if found else [])


@pytest.mark.parametrize(
    ("made", "found"),
    [
        ("MNIST('d', download=True)", True),
        ("MNIST(f'd/{rank}', download=True)", False),
        ("MNIST(root=tempfile.mkdtemp(), download=True)", False),
        ("f()\nwith FileLock('d.lock'):\n    MNIST('d', download=True)", False),
        ("f()\ndef get():\n    MNIST('d', download=True)\nwith FileLock('l'):\n    get()", False),
    ],
)
def test_a_download_on_every_rank(made, found):
    head = (
        "import tempfile\nfrom torchvision.datasets import MNIST\nfrom filelock import FileLock\n"
    )
    assert ids(f"{head}data = {made}") == (["download-on-every-rank"] if found else [])


def test_a_spec_for_one_process_needs_no_group():
    text = "import torch\nloss.backward()\n"
    assert ids(text, Setting(processes=4), group=False) == ["training-not-distributed"]
    assert ids(text, Setting(processes=1), group=False) == []
    assert ids(text, group=False) == []


def test_a_spawn_of_one_process_in_each_pod():
    text = SPAWN.format("dist.init_process_group('gloo')", "torch.cuda.device_count()")
    assert lint_script(text, setting=Setting(nodes=2, processes=2, gpus=1)) == []
    assert lint_script(text.replace(", nprocs=torch.cuda.device_count()", "")) == []


KERAS = "import keras\nmodel = keras.Sequential([keras.layers.Dropout(0.5)])\n"
LOOP = "optimizer = torch.optim.SGD(model.parameters())\nfor x, y in data:\n    "


@pytest.mark.parametrize(
    ("imports", "body", "found"),
    [
        ("", "model.fit(data)", True),
        ("from sklearn.preprocessing import StandardScaler", "model.fit(data)", True),
        ("from sklearn.svm import SVC", "svc = SVC()\nsvc.fit(x)", False),
        ("import keras.distribution as kd", "kd.initialize()\nmodel.fit(data)", False),
        ("import os", "print(os.environ['RANK'])\nmodel.fit(data)", False),
        ("import lightning", "model.fit(data)", False),
    ],
)
def test_fit_in_each_pod_trains_alone(imports, body, found):
    text = f"{imports}\n{KERAS}{body}\n"
    expected = ["training-not-distributed"] if found else []
    assert ids(text, Setting(processes=2), group=False) == expected
    assert ids(text, Setting(processes=1), group=False) == []


@pytest.mark.parametrize(
    ("step", "found"),
    [
        ("model(x).sum().backward()", True),
        ("model(x, training=True).sum().backward()", False),
        ("other(x).sum().backward()", False),
        ("model(x, **given).sum().backward()", False),
        ("loss(x, model(x, training=True)).backward()", False),
        ("f(model(x, training=True), teacher(x).detach()).backward()", False),
        ("model(x, training=True).backward()\n    for x in held_out:\n        model(x)", False),
        ("with torch.no_grad():\n        model(x)\n    other(x).backward()", False),
    ],
)
def test_a_keras_model_in_a_loop_of_ones_own(step, found):
    others = "loss = keras.losses.MeanSquaredError()\nteacher = keras.models.clone_model(model)\n"
    others += "for p in teacher.parameters():\n    p.requires_grad = False\n"
    text = f"{KERAS}{others}{LOOP}{step}\n    optimizer.step()\n    optimizer.zero_grad()\n"
    assert ids(f"import torch\n{text}", group=False) == (["keras-not-training"] if found else [])
    assert ids(text.replace("Dropout(0.5)", "Dense(2)"), group=False) == []


@pytest.mark.parametrize("weights", ["model", "ddp"])
@pytest.mark.parametrize("called", ["ddp(x)", "ddp.to(0)(x)"])
def test_a_keras_model_inside_of_ddp(weights, called):
    text = (
        f"import torch\n{KERAS}model = model.to(0)\n"
        "ddp = torch.nn.parallel.DistributedDataParallel(model)\n"
        f"optimizer = torch.optim.SGD({weights}.parameters())\n"
        f"for x in data:\n    {called}.sum().backward()\n    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    found = ids(text, Setting(nodes=1, processes=1), group=False)
    assert "keras-not-training" in found
    assert "keras-not-training" not in ids(text.replace("x)", "x, training=True)"), group=False)


@pytest.mark.parametrize(
    ("made", "found"),
    [
        ("def build():\n    return keras.Model(x, Dropout(0.5)(x))", True),
        ("def build():\n    return keras.Model(x, Dense(2)(x))", False),
        ("class build(keras.Model):\n    def call(self, x): Dropout(x)", True),
        ("class build(keras.Model):\n    def call(self, x, training=True): Dropout(x)", False),
        ("class build(keras.Model):\n    def call(self, x): Dropout(x, training=True)", False),
    ],
)
def test_a_keras_model_is_followed_to_where_it_is_made(made, found):
    text = (
        f"import keras, torch\nfrom keras.layers import Dropout\n{made}\n"
        "def train(model, data):\n    optimizer = torch.optim.SGD(model.parameters())\n"
        "    for x in data:\n        optimizer.zero_grad()\n        model(x).sum().backward()\n"
        "        optimizer.step()\n\ntrain(build(), [])\n"
    )
    assert ids(text, group=False) == (["keras-not-training"] if found else [])


@pytest.mark.parametrize(
    ("clear", "found"),
    [
        ("", True),
        ("optimizer.zero_grad()", False),
        ("model.zero_grad(set_to_none=True)", False),
        ("for p in model.parameters():\n        p.grad = None", False),
        ("p.grad.zero_()", False),
        ("p.grad.fill_(0)", False),
        ("setattr(p, 'grad', None)", False),
        ("getattr(optimizer, 'zero_grad')()", False),
        ("torch._foreach_zero_(gradients)", False),
        ("torch._foreach_mul_([p.grad for p in model.parameters()], 0)", False),
        ("torch.nn.utils.clip_grad_norm_(model.parameters(), 1)", True),
    ],
)
def test_gradients_that_are_never_cleared(clear, found):
    model = "import torch\nmodel = torch.nn.Linear(2, 2)\n"
    text = f"{model}{LOOP}model(x).sum().backward()\n    optimizer.step()\n    {clear}\n"
    assert ids(text, group=False) == (["gradients-not-cleared"] if found else [])
    once = text.replace("for x, y in data", "if x")
    assert ids(once, group=False) == []
    start, loop = LOOP.splitlines(keepends=True)[:2]
    anew = text.replace(start + loop, f"{loop}    {start}")
    assert ids(anew, group=False) == []


KEPT_OPTIMIZERS = [
    """
    def step(opt):
        loss().backward()
        opt.step()

    o = SGD(p)
    for x in data:
        step(o)
    """,
    """
    def make(p):
        return SGD(p)

    o = make(p)
    while True:
        loss().backward()
        o.step()
    """,
    """
    o, s = SGD(p), torch.amp.GradScaler()
    for x in data:
        s.scale(loss()).backward()
        s.step(o)
        s.update()
    """,
    """
    class A:
        def __init__(self, o):
            self.o = o
        def fit(self):
            for x in data:
                loss().backward()
                self.o.step()

    A(SGD(p)).fit()
    """,
]
NEW_OPTIMIZERS = [
    """
    def fit(opt):
        loss().backward()
        opt.step()

    for seed in range(3):
        fit(SGD(p))
    for seed in range(3):
        fit(SGD(q))
    """,
    """
    def fit():
        o = SGD(p)
        loss().backward()
        o.step()

    for seed in range(3):
        fit()
    """,
    """
    o = SGD(p) if p else Own(p)
    for x in data:
        loss().backward()
        o.step()
    """,
]


@pytest.mark.parametrize("body", KEPT_OPTIMIZERS + NEW_OPTIMIZERS, ids=range(7))
def test_an_optimizer_is_followed_to_where_it_is_made(body):
    text = f"import torch\nfrom torch.optim import SGD\n{dedent(body)}"
    expected = ["gradients-not-cleared"] if body in KEPT_OPTIMIZERS else []
    assert ids(text, group=False) == expected


def test_a_comment_silences_its_line_only():
    save = "torch.save(m, 'm.pt')"
    assert ids(f"{save}  # k8sjob: ignore[save-on-every-rank]\n{save}") == ["save-on-every-rank"]
    assert ids(f"{save}  # k8sjob: ignore[ save-on-every-rank , group-not-destroyed]") == []
    assert ids(f"{save}  # k8sjob: ignore[]") == ["save-on-every-rank", "unknown-ignore"]


def test_a_finding_says_where():
    (finding,) = lint_script(GROUP + "\nif x:\n    torch.save(m, 'm.pt')\n" + END, "train.py")
    assert (finding.source, finding.line, finding.column) == ("train.py", 8, 5)
    assert str(finding).startswith("train.py:8:5: warning[save-on-every-rank]: ")


NO_PYTHON = ["def f(:\n", "\0", "(" * 5000, "x\n  y\n", "x = '\ud800'\n"]
NO_PYTHON += ["if a: pass\n" + "elif a: pass\n" * 20_000, "not " * 50_000 + "a"]
NO_PYTHON += ["lambda: " * 5000 + "a", "1 if b else " * 20_000 + "2", "x = " + "9" * 5000]


@pytest.mark.parametrize("text", NO_PYTHON, ids=range(len(NO_PYTHON)))
def test_what_is_not_python_is_reported_and_not_raised(text):
    assert [f.id for f in lint_script(text)] == ["script-syntax"]


def test_a_long_chain_of_branches_is_followed():
    chain = "".join(f"elif rank == {n}:\n    f({n})\n" for n in range(1, 500))
    assert ids(f"def f(n):\n    dist.barrier()\n\nif rank == 0:\n    f(0)\n{chain}") == []


@pytest.mark.parametrize("text", ["\ufeffprint(1)\n", "x = '\\d'\n", "x = 1\r\ny = 2\r\n", ""])
def test_what_python_takes_is_taken(text):
    assert lint_script(text) == []


NAMES = st.sampled_from(["rank", "dist", "torch", "x", "os", "model", "main"])
CALLED = [
    "dist.init_process_group", "dist.barrier", "torch.save", "x.to", "x.cuda", "model.fit", "range",
    "torch.utils.data.DistributedSampler", "torch.nn.parallel.DistributedDataParallel", "f", "*x",
]  # fmt: skip
EXPRESSIONS = st.recursive(
    NAMES | st.sampled_from(["0", "'RANK'", "f'cuda:{rank}'", "os.environ['RANK']"]),
    lambda inner: st.one_of(
        st.builds("{}.{}".format, NAMES, NAMES),
        st.builds("{}({})".format, st.sampled_from(CALLED), inner),
        st.builds("({} == {})".format, inner, inner),
        st.builds("({} if {} else {})".format, inner, inner, inner),
    ),
    max_leaves=6,
)
STATEMENTS = st.recursive(
    st.one_of(
        EXPRESSIONS,
        st.builds("{} = {}".format, NAMES, EXPRESSIONS),
        st.just("return"),
        st.just("*a, b = c"),
    ),
    lambda inner: st.builds(
        lambda head, body: head + ":\n" + "\n".join(f"    {line}" for line in body.splitlines()),
        st.one_of(
            EXPRESSIONS.map("if {}".format),
            EXPRESSIONS.map("with {}".format),
            st.sampled_from(
                ["def f(rank, *a)", "def main()", "for rank in x", "while rank", "class A"]
            ),
        ),
        st.lists(inner, min_size=1, max_size=3).map("\n".join),
    ),
    max_leaves=8,
)


@given(st.lists(STATEMENTS, max_size=5).map("\n".join))
def test_no_script_makes_it_fail(text):
    head = "import os, torch, keras\nimport torch.distributed as dist\n"
    lines = (head + text).count("\n") + 1
    for finding in lint_script(head + text, setting=Setting(gpus=0, processes=2, launcher="none")):
        assert 1 <= finding.line <= lines
        assert finding.message


def test_in_a_session_the_fit_of_a_model_is_reported_and_that_of_the_session_is_not():
    text = (
        "import keras\nfrom k8sjob import runtime\n"
        "with runtime.session() as here:\n"
        "    model = keras.Sequential()\n"
        "    here.fit(model, data, epochs=1, global_batch=8)\n"
        "    model.fit(data)\n"
    )
    setting = Setting(gpus=0, processes=2, launcher="k8sjob")
    found = [hit for hit in lint_script(text, setting=setting) if hit.id == "keras-fit-diverges"]
    assert [hit.line for hit in found] == [6]
