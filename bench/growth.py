"""Growth of lint's time and memory with the size of what it reads, over pathological inputs.

    python bench/growth.py [--base BYTES] [--limit SECONDS] [--profile] [WORD ...]

Each shape is made at about BYTES, 4 and 16 times as much, and read in a process of its own. The exponent is
that of the last two sizes: 1 is linear, 2 quadratic. Where it is above the bound, the shape is read again, three
times in all, and the shortest times count: other work of the machine only makes them longer. WORD selects shapes
by a part of their names.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import math
import multiprocessing
import os
import pstats
import resource
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = (1, 4, 16)
FLOOR = 0.04
"""Seconds below which a time is mostly what is read for any file."""
BOUND = 1.1

HEAD = """\
import glob, os, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
TAIL = """
for epoch in range(2):
    for batch in loader:
        model(batch).backward()
        optimizer.step()
if rank == 0:
    torch.save(model, "m.pt")
    dist.barrier()
"""


def lines(form: str, before: str = "", after: str = "") -> Callable[[int], str]:
    """A script of a line, or several, with `@` for its number, `<` for the one before, `>` for the next and NUL for a decorator's sign."""

    def text(size: int) -> str:
        count = max(2, size // (len(form) + 4))
        parts = [before]
        for i in range(count):
            part = form.replace("@", str(i)).replace("<", str(max(i - 1, 0)))
            parts.append(part.replace(">", str(i + 1)).replace("\0", "@") + "\n")
        return HEAD + "".join(parts) + after.replace("@", str(count - 1)) + TAIL

    return text


def inline(form: str, part: str, joint: str, before: str = "") -> Callable[[int], str]:
    """A script with one expression: `form` with `%` for many parts."""

    def text(size: int) -> str:
        count = max(2, size // (len(part) + len(joint)))
        return (
            HEAD
            + before
            + form.replace(
                "%", joint.join(part.replace("@", str(i)).replace("\0", "@") for i in range(count))
            )
            + TAIL
        )

    return text


def towers(form: str, end: str, depth: int = 18) -> Callable[[int], str]:
    """Blocks in each other, `depth` of them, again and again."""

    def text(size: int) -> str:
        rows = [row for row in form.split("\n") if row]
        tower = ""
        for level in range(depth):
            tower += " " * level + rows[0].replace("@", str(level)) + "\n"
        tower += " " * depth + end + "\n"
        for level in range(depth - 1, -1, -1):
            for row in rows[1:]:
                tower += " " * level + row.replace("@", str(level)) + "\n"
        return HEAD + tower * max(1, size // len(tower)) + TAIL

    return text


def function_of(form: str, after: str = "") -> Callable[[int], str]:
    """One function of many lines, which is called on rank 0 and on all ranks."""
    inner = "".join(f"    {row}\n" for row in form.split("\n"))

    def text(size: int) -> str:
        count = max(2, size // (len(inner) + 4))
        body = "".join(
            inner.replace("@", str(i)).replace("<", str(max(i - 1, 0))) for i in range(count)
        )
        return f"{HEAD}def work(x, rank):\n{body}    {after or 'dist.barrier()'}\nif rank == 0:\n    work(x, rank)\nwork(x, 0)\n{TAIL}"

    return text


def elifs(size: int) -> str:
    """One chain, as long as Python parses."""
    return (
        HEAD
        + "if rank == 0:\n    dist.barrier()\n"
        + "".join(f"elif rank == {i}:\n    dist.barrier()\n" for i in range(size // 36))
        + TAIL
    )


def calling(size: int) -> str:
    """Functions that each call eight others, in circles."""
    count = max(9, size // 120)
    body = "".join(
        f"def f{i}(x):\n" + "".join(f"    f{(i * 7 + 3 * k + 1) % count}(x)\n" for k in range(8))
        for i in range(count)
    )
    return HEAD + body + "def g(): dist.barrier()\nif rank == 0:\n    f0(1)\n    g()\n" + TAIL


def many_parameters(size: int) -> str:
    """A function of many parameters, which is called with all of them by several callers."""
    count = max(2, int(size / 48))
    names = ", ".join(f"a{i}" for i in range(count))
    given = ", ".join(f"a{i}=rank" for i in range(count))
    used = "".join(f"    dist.broadcast(a{i}, src=a{i})\n" for i in range(count))
    return HEAD + f"def f({names}):\n{used}\n" + f"f({given})\n" + TAIL


def many_callers(size: int) -> str:
    """A function with some parameters and very many callers."""
    return lines(
        "f(rank, @, x@)", "def f(a, b, c):\n    if a == 0:\n        dist.barrier()\n    return a\n"
    )(size)


def ways(size: int) -> str:
    """Many uses of one name, each of which leads to many lines."""
    count = max(2, size // 60)
    return HEAD + "def save():\n" + "    torch.save(m, 'm')\n" * count + "save()\n" * count + TAIL


def white(form: str) -> Callable[[int], str]:
    """One text with very many of a character."""

    def text(size: int) -> str:
        before, many, after = form.split("|")
        return before + many * (size // max(1, len(many))) + after

    return text


SCRIPTS: dict[str, Callable[[int], str]] = {
    "assign-concat": lines("c = c + [@]", "c = []\n", "dist.broadcast(c, src=c)"),
    "assign-call": lines("c = f(c, @)", "c = rank\n", "if c:\n    dist.barrier()\n"),
    "assign-number": lines("c = @\nif c == 0: dist.barrier()"),
    "assign-rank": lines("c = rank\nif c == 0: dist.barrier()\nelse: dist.barrier()"),
    "assign-chain": lines("c@ = c<", "c0 = rank\n", "if c@ == 0:\n    dist.barrier()\n"),
    "assign-chain-sum": lines("c@ = c< + c<", "c0 = rank\n", "if c@ == 0:\n    dist.barrier()\n"),
    "assign-back-chain": lines("c@ = c>", "", "c@ = rank\nif c0 == 0:\n    dist.barrier()\n"),
    "assign-two": lines("a = b\nb = a\nif a: dist.barrier()"),
    "assign-many-names-one-use": lines("c = name@", "", "if c == 0: dist.barrier()\n"),
    "assign-ddp": lines("model = DDP(model)\nmodel(x)\nmodel.train()"),
    "assign-tuple": lines("a, b = b, a\nif a: dist.barrier()"),
    "augmented": lines("c += [@]\nc.sort()"),
    "attribute-assign": lines("self.x = self.x + 1\nif self.x: dist.barrier()"),
    "attribute-of-class": lines(
        "    def f@(self):\n        self.x = self.y = self.x + @\n        if self.x: dist.barrier()",
        "class A:\n",
    ),
    "attribute-deep": inline("x = a%\nif x: dist.barrier()\n", ".b", ""),
    "attribute-deep-short": lines("a" + ".bc" * 150 + ".all_reduce()"),
    "attribute-calls": inline("x = a%\n", ".b(1)", ""),
    "arguments": inline("f(%)\n", "a@", ", "),
    "arguments-star": inline("f(%)\n", "*a@", ", "),
    "arguments-option": inline("f(%)\n", "a@=rank", ", "),
    "boolean-and": inline("if rank == 0 and %: dist.barrier()\n", "a@", " and "),
    "boolean-barriers": inline("rank == 0 and %\n", "dist.barrier()", " and "),
    "boolean-or": inline("if rank == 0 or %: dist.barrier()\n", "a@", " or "),
    "boolean-mixed": inline("if %: dist.barrier()\n", "(a@ or not rank)", " and "),
    "breaks": lines("for i in y:\n    if rank: break\ndist.barrier()"),
    "breaks-inside": lines("    if a@: break\n    dist.barrier()", "while True:\n"),
    "calling": calling,
    "chain-of-functions": lines(
        "def f@(x):\n    return f>(x)",
        "",
        "def f@(x):\n    dist.barrier()\nif rank == 0:\n    f0(1)\n",
    ),
    "chain-of-functions-back": lines(
        "def f@(x):\n    return f<(x)", "", "if rank == 0:\n    f@(1)\n    dist.barrier()\n"
    ),
    "chain-of-parameters": lines(
        "def f@(x):\n    if x == 0: dist.barrier()\n    f>(x)", "", "f0(rank)\n"
    ),
    "classes": lines(
        "class A@(A<):\n    def f(self):\n        super().f()",
        "class A0:\n    def f(self): dist.barrier()\n",
        "A@().f()\n",
    ),
    "class-of-methods": lines(
        "    def f@(self):\n        self.f>()", "class A:\n", "\nif rank == 0: A().f0()\n"
    ),
    "class-instances": lines(
        "a@ = A()\na@.f()", "class A:\n    def f(self):\n        dist.barrier()\n"
    ),
    "class-one-name": lines(
        "a = A()\na.f()\nif rank == 0: a.f()",
        "class A:\n    def f(self):\n        dist.barrier()\n",
    ),
    "class-made-often": lines(
        "A(rank)", "class A:\n    def f(self):\n" + "        torch.save(m, 'm')\n" * 50
    ),
    "classes-of-one-name": lines("class A:\n    def f(self): dist.barrier()\nA().f()"),
    "collectives": lines("if rank == 0: dist.barrier()"),
    "collectives-by-name": lines(
        "if rank == 0: dist.all_reduce(x@)\nelse: dist.broadcast(x@, src=rank)"
    ),
    "collectives-of-names": lines(
        "def all_reduce@(): dist.all_reduce(x)\nif rank == 0: all_reduce@()"
    ),
    "comments-ignore": lines("x = 1  # k8sjob: ignore[save-on-every-rank]"),
    "comments-ignore-many": inline("x = 1  # k8sjob: ignore[%]\n", "save-on-every-rank", ","),
    "comments-unknown": lines("x = 1  # k8sjob: ignore[unknown@]"),
    "comments-open": inline("x = 1  #%\n", " k8sjob: ignore[", "#"),
    "comments-spaces": white("x = 1  # k8sjob:| |\n"),
    "comments-hashes": white("x = 1  |#  |\n"),
    "comprehension-loops": inline("x = [a0 %]\n", "for a@ in b@ if rank", " "),
    "comprehension-many": lines(
        "x@ = [hash(a) % 8 for a in [b for b in [c for c in os.listdir(x<)]]]"
    ),
    "contexts": inline("with %:\n    dist.barrier()\n", "lock@()", ", "),
    "contexts-lines": lines("with open(@) as f:\n    torch.save(m, f)"),
    "continues": lines("    if x@: continue\n    dist.barrier()", "for i in y:\n"),
    "data-loaders": lines("l@ = DataLoader(d, sampler=DistributedSampler(d), shuffle=True)"),
    "data-samplers": lines("sampler = DistributedSampler(d)\nsampler.set_epoch(1)"),
    "data-sampler-names": lines("s@ = DistributedSampler(d)\ns@.epoch = 1"),
    "data-by-local-rank": lines(
        "DistributedSampler(d, rank=r@)\nr@ = int(os.environ['LOCAL_RANK'])"
    ),
    "data-loops-of-loaders": lines(
        "for b in DataLoader(d):\n    for c in b:\n        c.backward()"
    ),
    "decorators-of-functions": lines("\0rank_zero_only\ndef f@(): dist.barrier()\nf@()"),
    "devices": lines("model.to(r@)\nr@ = rank\ntorch.cuda.set_device(rank)"),
    "dictionary": inline("x = {%}\nif x: dist.barrier()\n", "'k@': rank", ", "),
    "downloads": lines(
        "torchvision.datasets.MNIST('.', download=True)",
        "import torchvision\ndef f():\n    with lock: pass\n",
    ),
    "downloads-in-function": lines(
        "def f@(): torchvision.datasets.MNIST('.', download=True)\nf@()\nf@()",
        "import torchvision\n",
    ),
    "elif": elifs,
    "environment-writes": lines(
        "os.environ['MASTER_ADDR'] = a@\na@ = 'local' + 'host'\nos.environ['RANK'] = '0'"
    ),
    "environment-reads": lines("r@ = int(os.environ.get('RANK'))\nif r@ == 0: dist.barrier()"),
    "exits": function_of("if rank == @: return\ndist.barrier()"),
    "exits-nested": function_of("if rank:\n        if x:\n            return"),
    "exits-while": function_of("while rank:\n        return"),
    "exits-of-system": lines("if rank: sys.exit()\ndist.barrier()", "import sys\n"),
    "exits-without-collective": function_of("if rank == @: return"),
    "exits-of-functions": lines(
        "def f@():\n    if rank: return\n    if x: return\n    dist.barrier()\nf@()"
    ),
    "globals": lines("def f@():\n    global g@, g<\n    g@ = rank\n    if g< == 0: dist.barrier()"),
    "global-names": inline("def f():\n    global %\n    a0 = rank\n", "a@", ", "),
    "globs": lines("x = list(glob.glob('*'))"),
    "globs-of-set": lines("x@ = list(set(glob.glob('*')))\nx@.sort()"),
    "groups-same": lines("g = dist.new_group([0, 1])\nif rank in [0]: dist.new_group([2])"),
    "groups-other": lines("if rank == @: g = dist.new_group([@])"),
    "groups-rank": lines("dist.new_group([rank, @])"),
    "hashes": lines("x = hash('a@') % 8\ny = hash(x) % rank"),
    "hash-of-chain": lines("c@ = str(c<) + str(@)\nh = hash(c@) % 8", "c0 = str(1)\n"),
    "imports": lines("import a@"),
    "imports-dotted": inline("import %\n", "a", "."),
    "imports-dotted-many": lines("import a@." + ".".join("bcdefghijk" * 8)),
    "imports-from": inline("from a import %\n", "b@", ", "),
    "imports-aliases": lines("import a@ as a<", "", ""),
    "imports-stars": lines("from a@ import *"),
    "imports-circle": lines("from a import b@ as b<\nif b@: dist.barrier()"),
    "keras-models": lines(
        "m@ = keras.Sequential([keras.layers.Dropout(0.1)])\nm@.fit(x)\nm@(x)", "import keras\n"
    ),
    "keras-one-model": lines(
        "m = keras.Sequential([keras.layers.Dropout(1)])\nw = m.trainable_weights\nfor i in y:\n    m(x).backward()",
        "import keras\n",
    ),
    "lambdas": lines("f@ = lambda: f<() or dist.barrier()\nif rank: f@()"),
    "list": inline("x = [%]\nif x: dist.barrier()\nos.system(x)\n", "'a@'", ", "),
    "list-of-ranks": inline("x = [%]\nif rank in x: dist.barrier()\n", "rank", ", "),
    "launches": lines("subprocess.run(words)\nwords = ['torchrun', str(@)]", "import subprocess\n"),
    "loops-registers": lines("for n in set(a):\n    m.register_buffer(n)"),
    "loops-nested": towers("for a@ in b@:", "dist.barrier(); x.backward(); torch.save(m, 'm')"),
    "ifs-nested": towers("if a@:", "dist.barrier(); x.backward(); torch.save(m, 'm')", 90),
    "ifs-flat": lines("if a@: dist.barrier()"),
    "ifs-rank": lines(
        "if rank == 0 and x@:\n    dist.barrier()\nelif rank:\n    dist.all_reduce(x)"
    ),
    "match": lines("    case @:\n        dist.barrier()", "match x:\n"),
    "match-returns": function_of("match x:\n        case @: return\ndist.barrier()"),
    "match-one": lines(
        "        case @: return", "def f(rank):\n    match rank:\n", "    dist.barrier()\nf(rank)\n"
    ),
    "match-ifs": lines(
        "        case @:\n            if rank: return\n            dist.barrier()",
        "def f(rank):\n    match rank:\n",
        "    dist.barrier()\nf(rank)\n",
    ),
    "methods-of-many": lines(
        "x@.all_reduce()\nx@.barrier()\nx@ = accelerate.Accelerator()", "import accelerate\n"
    ),
    "negations": inline("if % rank: dist.barrier()\n", "not", " "),
    "optimizers": lines("o@ = torch.optim.SGD(p)\nfor i in y:\n    o@.step()"),
    "optimizer-one-name": lines("for i in y:\n    o = torch.optim.SGD(p)\n    o.step()"),
    "options": lines("p.add_argument('--o@', default=@)\nif args.o@ == 0: dist.barrier()"),
    "options-local-rank": lines("p.add_argument('--local_rank', default=@)"),
    "parameters": many_parameters,
    "callers": many_callers,
    "returns": function_of("if x: return rank", "return 0"),
    "returns-used": lines(
        "if f(@) == 0: dist.barrier()", "def f(x):\n" + "    if x: return rank\n" * 100
    ),
    "saves": lines("torch.save(m, 'm@.pt')"),
    "saves-in-functions": lines("def f@():\n    torch.save(m, 'm')\nf@()\nf<()"),
    "saves-of-one-function": ways,
    "semicolons": inline("%\n", "dist.barrier()", "; "),
    "sets": lines("s = s | {'a@'}\nfor x in s: m.register_buffer(x)\nt = list(s)", "s = {'a'}\n"),
    "slices": lines("x = y[rank::@]"),
    "spawns": lines(
        "mp.spawn(f, nprocs=n@)\nn@ = torch.cuda.device_count()",
        "import torch.multiprocessing as mp\n",
    ),
    "strings": inline(
        "x = '%'\nif x: dist.barrier()\nos.environ['MASTER_ADDR'] = x\n", "abcdefghij klmno", ""
    ),
    "strings-joined": inline("x = (%)\nos.environ['MASTER_ADDR'] = x\n", "'a@'", " "),
    "strings-format-lines": lines("x = f'{x}{y}@'\ny = f'{y}{x}'\nos.environ['MASTER_ADDR'] = x"),
    "strings-lines": lines("s += 'text@'\nprint(s, 'rank')"),
    "subscripts": inline("x = a%\n", "[0]", ""),
    "sum": inline("x = %\nif x: dist.barrier()\n", "a@", " + "),
    "sum-short": lines(
        "x@ = " + " + ".join(["rank"] * 150) + "\nif x@ == 0: dist.barrier()\nlist(x@)"
    ),
    "tries": lines(
        "try:\n    dist.barrier()\nexcept E@:\n    return\nfinally:\n    x = 1".replace(
            "return", "sys.exit()"
        )
    ),
    "tries-nested": towers("try:\nfinally:\n a@ = rank", "dist.barrier()"),
    "tries-handlers": lines("except E@:\n    dist.barrier()", "try:\n    dist.barrier()\n"),
    "walrus": lines("if (c := c + @) == 0: dist.barrier()", "c = rank\n"),
    "worlds": lines("if world_size@ != 1: dist.barrier()\nif is_distributed: dist.barrier()"),
    "white-lines": white("import torch\n|\n|x = 1\n"),
    "white-spaces": white("import torch\nx = 1|   |\n"),
    "brackets": inline("x = %\n", "[]", ", "),
    "bytes": white("x = b'|\\x00|'\n"),
    "number": white("x = 1|0|\n"),
    "number-hex": white(
        "import torch.distributed as dist\ndist.init_process_group()\nrank = 0x|f|\nif rank == 0: dist.barrier()\n"
    ),
    "number-list": lines("if rank in (@, 1, 2, 3, 4, 5, 6, 7, 8, 9): dist.barrier()"),
    "power": lines("f(rank=1" + "0" * 60 + ")\nx = 'a' * @"),
}
SCRIPTS["comprehensions"] = lines("x = " + "[a for a in " * 12 + "set(y)" + "]" * 12)
SCRIPTS["decorators"] = inline("%\ndef f(): dist.barrier()\nf()\n", "\0rank_zero_only", "\n")
SCRIPTS["walrus-nested"] = lines("if (a@ := (b@ := (c@ := a<))): dist.barrier()")

HEADER = "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nmetadata: {name: a}\nspec:\n  pytorchReplicaSpecs:\n    Master:\n      replicas: 1\n      restartPolicy: OnFailure\n      template:\n        spec:\n          containers:\n"
TRAINER = "          - {name: pytorch, image: a/b:1, command: [python, main.py]}\n"


def manifest(form: str, before: str = HEADER + TRAINER, after: str = "") -> Callable[[int], str]:
    """A manifest with a line, or several, again and again."""

    def text(size: int) -> str:
        return (
            before
            + "".join(
                form.replace("@", str(i)) + "\n" for i in range(max(1, size // (len(form) + 3)))
            )
            + after
        )

    return text


OPEN = HEADER + "          - name: pytorch\n            image: a/b:1\n"
MANIFESTS: dict[str, Callable[[int], str]] = {
    "yaml-containers": manifest("          - {name: c@, image: x/c@}"),
    "yaml-args": manifest(
        "            - $(X) $UPPER@", OPEN + "            command: [python]\n            args:\n"
    ),
    "yaml-env": manifest("            - {name: V@, value: a}", OPEN + "            env:\n"),
    "yaml-env-same": manifest(
        "            - {name: MASTER_ADDR, value: a}", OPEN + "            env:\n"
    ),
    "yaml-mounts": manifest(
        "            - {name: v@, mountPath: /a@}", OPEN + "            volumeMounts:\n"
    ),
    "yaml-resources": manifest(
        "              a.b/r@: 1", OPEN + "            resources:\n              limits:\n"
    ),
    "yaml-shell": manifest(
        "              torchrun --a=$X @ && python x & for",
        OPEN + "            command: [sh, -c]\n            args:\n            - |\n",
    ),
    "yaml-wrong-types": manifest(
        "            - {name: 1, value: [@]}", OPEN + "            env:\n"
    ),
    "yaml-jobs": manifest(
        "---\napiVersion: kubeflow.org/v1\nkind: PyTorchJob\nmetadata: {name: a@}\nspec: {pytorchReplicaSpecs: {Worker: {template: {spec: {containers: [{name: pytorch, image: x}]}}}}}",
        "",
    ),
    "yaml-others": manifest("---\napiVersion: v1\nkind: Kind@\nmetadata: {name: a@}", ""),
    "yaml-unknown": manifest("  x@: 1", HEADER.partition("  pytorch")[0]),
    "yaml-image": manifest("a/", OPEN.replace("a/b:1", "") + "            image: "),
    "yaml-comments": manifest("# k8sjob: ignore[no-shared-memory]"),
    "yaml-templates": manifest("{{ x }}"),
    "job-yaml-args": manifest(
        "    - a@",
        "name: a\nimage: {repository: r.io/x, base: 'python:3.12'}\nrun:\n  script: main.py\n  args:\n",
    ),
    "job-yaml-env": manifest(
        "    V@: a",
        "name: a\nimage: {repository: r.io/x, base: 'python:3.12'}\nrun:\n  script: main.py\n  env:\n",
    ),
    "job-yaml-wrong": manifest(
        "x@: 1",
        "name: a\nimage: {repository: r.io/x, base: 'python:3.12'}\nrun: {script: main.py}\n",
    ),
    "job-yaml-overlay": manifest(
        "    x@: {y: 1}",
        "name: a\nimage: {repository: r.io/x, base: 'python:3.12'}\nrun: {script: main.py}\noverlay:\n  metadata:\n   annotations:\n",
    ),
    "job-yaml-volumes": manifest(
        "- {mount: /m@, host_path: /x@}",
        "name: a\nimage: {repository: r.io/x, base: 'python:3.12'}\nrun: {script: main.py}\nreplicas: {workers: 1}\nvolumes:\n",
    ),
    "job-yaml-dependencies": manifest(
        "  - a@==1", "name: a\nimage:\n  repository: r.io/x\n  base: 'python:3.12'\n  packages:\n"
    ),
}
UNNAMED: dict[str, Callable[[int], str]] = {
    "dockerfile-spaces": white("|  |FROM python\nRUN x\n"),
    "dockerfile-lines": white("|\n|FROM python\nRUN x\n"),
    "dockerfile-tabs": white("RUN x \\\n| \t|FROM\n"),
    "dockerfile-from": white("RUN x -y\n|FROM |\n"),
    "dockerfile-runs": white("FROM python\n|RUN a b \\\n c\n|\n"),
    "dockerfile-feeds": white("|\x0b\x0c\x1c|FROM python\nRUN x\n"),
    "unnamed-shebang": white("#!|python|\nx = 1\n"),
    "unnamed-shebang-not": white("#!|/pytho|\nx = 1\n"),
    "unnamed-text": white("|word word: |\n"),
    "unnamed-python": lines("x@ = [\n  1]"),
}


def notebook(form: str, joined: bool = False) -> Callable[[int], str]:
    """A notebook: a cell again and again, or one cell of many lines."""

    def text(size: int) -> str:
        rows = [form.replace("@", str(i)) for i in range(max(1, size // (len(form) + 20)))]
        sources = ["\n".join(rows)] if joined else rows
        return json.dumps({"cells": [{"cell_type": "code", "source": [row]} for row in sources]})

    return text


NOTEBOOKS: dict[str, Callable[[int], str]] = {
    "notebook-cells": notebook("import torch\nx = @"),
    "notebook-magics": notebook("%%time\nx = @\n!pip install x"),
    "notebook-magic-lines": notebook("!pip install x\nx = @", joined=True),
    "notebook-questions": notebook("x.y?\nx = [@,\n 1]", joined=True),
    "notebook-open": notebook("!x\nx = (", joined=True),
    "notebook-text": notebook("!x\ns = '''", joined=True),
    "notebook-words": notebook("a.b.c.d"[:2] * 40, joined=True),
}


def folder(kind: str) -> Callable[[Path, int], Path]:
    """A folder of modules, or of scripts, for `init --from`."""

    def write(root: Path, size: int) -> Path:
        count = max(2, size // 400)
        many = range(min(count, 2000))
        main = "import torch\n"
        for i in many:
            body = "".join(
                f"import m{(i + k) % count}\nfrom m{(i + k) % count} import *\ndef f{i}_{k}(): pass\n"
                for k in range(6)
            )
            if kind == "scripts":
                body = "import torch\nfor i in x:\n    torch.save(i)\n" + body
            if kind == "packages":
                (root / f"m{i}").mkdir()
            (root / (f"m{i}/__init__.py" if kind == "packages" else f"m{i}.py")).write_text(body)
            main += f"import m{i}\nm{i}.f()\n"
        (root / "train.py").write_text(main + "for i in x: torch.save(i, '../data')\n")
        return root if kind == "scripts" else root / "train.py"

    return write


FOLDERS = {f"init-{kind}": folder(kind) for kind in ("modules", "packages", "scripts")}
KINDS = {
    "script": SCRIPTS,
    "manifest": MANIFESTS,
    "unnamed": UNNAMED,
    "notebook": NOTEBOOKS,
    "init": SCRIPTS,
}


def prepared(kind: str, shape: Callable, size: int, root: Path) -> tuple[int, Callable[[], object]]:
    """What is measured of a shape at a size, and how long its text is."""
    from k8sjob.checks.lint import lint, lint_script
    from k8sjob.checks.scripts.job_draft import draft, find_script
    from k8sjob.errors import SpecError

    if kind == "folder":
        path = shape(root, size)

        def read() -> object:
            return draft(find_script(path), root)

        return size, read
    text = shape(size)
    name = {
        "script": "main.py",
        "init": "main.py",
        "notebook": "main.ipynb",
        "unnamed": "Dockerfile",
    }.get(kind, "job.yaml")
    (root / name).write_text(text)
    if kind in ("notebook", "init"):
        return len(text), lambda: draft(root / name, root)
    if kind == "script":
        return len(text), lambda: lint_script(text, "main.py")

    def linted() -> object:
        try:
            return lint(root / name)
        except SpecError as error:
            return [error]

    return len(text), linted


def _measure(kind: str, shape: Callable, size: int, answer: object, profile: bool) -> None:
    with tempfile.TemporaryDirectory() as place:
        length, read = prepared(kind, shape, size, Path(place))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        profiler = cProfile.Profile() if profile else None
        if profiler:
            profiler.enable()
        start = time.process_time()
        try:
            result = read()
            note = str(len(result)) if isinstance(result, list) else "ok"
            if isinstance(result, list) and any(
                getattr(one, "id", "") == "script-syntax" for one in result
            ):
                note = "refused"
            if isinstance(result, list) and any(
                getattr(one, "id", "") == "script-unfinished" for one in result
            ):
                note = "unfinished"
        except Exception as error:  # noqa: BLE001 - what is measured may refuse
            note = type(error).__name__ + (
                ": " + str(error)[:60] if "SpecError" not in type(error).__name__ else ""
            )
        seconds = time.process_time() - start
        if profiler:
            profiler.disable()
            pstats.Stats(profiler).sort_stats("cumulative").print_stats(25)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        answer.send((length, seconds, memory / 1024, note))


def measure(
    kind: str, shape: Callable, size: int, limit: float, profile: bool = False
) -> tuple[int, float, float, str]:
    """Bytes, seconds of the CPU, MiB and the outcome, measured in a process of its own."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    child = fork.Process(target=_measure, args=(kind, shape, size, there, profile))
    child.start()
    there.close()
    try:
        return here.recv() if here.poll(limit) else (size, math.inf, math.nan, f"> {limit:.0f} s")
    except EOFError:
        return size, math.inf, math.nan, "died"
    finally:
        child.kill()
        child.join()


def growth(rows: list[tuple[int, float, float, str]]) -> float:
    """The exponent of the last two sizes; 0 where the time is too short to tell, inf where one is too long."""
    (small, early, *_), (large, late, *_) = rows[-2:]
    if late == math.inf:
        return math.inf
    if late <= FLOOR or large <= small:
        return 0
    return math.log(late / max(early, 1e-4)) / math.log(large / small)


def main() -> None:
    """Measure the shapes and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--base", type=int, default=8000)
    parser.add_argument("--limit", type=float, default=30)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--init", action="store_true", help="also init --from for the scripts")
    options = parser.parse_args()

    shapes = [
        (name, kind, shape)
        for kind, group in KINDS.items()
        if kind != "init"
        for name, shape in group.items()
    ]
    shapes += [(name, "folder", shape) for name, shape in FOLDERS.items()]
    if options.init:
        shapes += [(f"init-{name}", "init", shape) for name, shape in SCRIPTS.items()]
    if options.words:
        shapes = [row for row in shapes if any(word in row[0] for word in options.words)]
    print(f"{'shape':<28}{'KB':>8}{'seconds at 1, 4 and 16 times':>34}{'MiB':>8}{'exponent':>10}")
    worst = 0
    for name, kind, shape in shapes:
        rows = [(0, math.inf, 0.0, "")] * len(SIZES)
        for _ in range(3):
            for i, times in enumerate(SIZES):
                row = measure(kind, shape, options.base * times, options.limit)
                rows[i] = min(rows[i], row, key=lambda row: row[1])
                if row[1] == math.inf:
                    break
            exponent = growth(rows)
            if exponent <= BOUND or exponent == math.inf:
                break
        seconds = "".join(f"{row[1]:>10.3f}" for row in rows)
        mark = "  <--" if exponent > BOUND else ""
        worst += bool(mark)
        print(
            f"{name:<28}{rows[-1][0] / 1000:>8.0f}{seconds:>34}{rows[-1][2]:>8.0f}{exponent:>10.2f} {rows[-1][3]}{mark}",
            flush=True,
        )
        if options.profile:
            measure(kind, shape, options.base * SIZES[-1], 4 * options.limit, profile=True)
    print(f"{len(shapes)} shapes, {worst} above {BOUND}, {os.cpu_count()} CPUs")


if __name__ == "__main__":
    main()
