"""Forks ranks from a process that has imported torch and scikit-learn, which takes seconds.

Reads one JSON object a line from stdin: {"argv", "env", "out", "err", "code"}; the last three are
files. Answers with the pid; writes the exit status to "code" when the process has ended. Ends, and
all ranks with it, when stdin does.
"""

import json
import os
import select
import sys
from pathlib import Path

import sklearn.datasets  # noqa: F401 - for those that are forked
import torch
import torch.distributed
import torch.distributed.optim
import torch.distributed.rpc
import torch.nn.parallel
import torch.optim

from k8sjob.runtime.agent import rank_main


def become(request):
    """In the child: a fresh process, as if started with this environment."""
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(request["env"])
    torch.set_num_threads(1)
    rank_main.main(request["argv"])


def reap(codes):
    while codes:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        path = codes.pop(pid)
        draft = Path(f"{path}.draft")
        draft.write_text(str(os.waitstatus_to_exitcode(status)))
        draft.rename(path)


def answer(word):
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main():
    # The first step of an optimizer imports half of torch again.
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], lr=0.1).step()
    codes = {}
    answer("ready")
    while True:
        reap(codes)
        if not select.select([sys.stdin], [], [], 0.02)[0]:
            continue
        line = os.read(0, 1 << 20)
        if not line:
            return
        request = json.loads(line)
        pid = os.fork()
        if not pid:
            become(request)
        codes[pid] = request["code"]
        answer(pid)


main()
