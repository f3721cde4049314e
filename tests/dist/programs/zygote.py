"""Forks ranks from a process that has imported torch and scikit-learn, which takes seconds.

Reads one JSON object a line from stdin: {"argv", "env", "out", "err", "code"}; the last three are
files. Answers with the pid; writes the exit status to "code" when the process has ended. Ends, and
all ranks with it, when stdin does.

Ranks with KERAS_BACKEND are forked from a fork of this process that has imported Keras, too: one
for each environment that Keras reads as it is imported. What JAX compiles is kept for the next.
"""

import json
import os
import select
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import sklearn.datasets  # noqa: F401 - for those that are forked
import torch
import torch.distributed
import torch.distributed.optim
import torch.distributed.rpc
import torch.nn.parallel
import torch.optim

from k8sjob.runtime.agent import rank_main

FAST = {  # what JAX reads as it is imported: half of the time is its compiler's
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


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


def imported_with(env):
    """What Keras reads as it is imported; nothing where a rank has no Keras."""
    if "KERAS_BACKEND" not in env:
        return ()
    return tuple(sorted(item for item in env.items() if item[0].startswith("KERAS_")))


def begin_with_keras(settings):
    """(where to write requests, where to read answers) of a fork that has imported Keras."""
    requests, answers = os.pipe(), os.pipe()
    if not os.fork():
        os.close(requests[1])
        with TemporaryDirectory() as compiled:
            os.environ.update(FAST, JAX_COMPILATION_CACHE_DIR=compiled)
            os.environ.update(settings)
            import keras  # noqa: F401 - it does not compute: JAX begins in the ranks

            warnings.filterwarnings("ignore", "os.fork")
            serve(requests[0], answers[1], settings)
        os._exit(0)
    os.close(requests[0])
    os.close(answers[1])
    return requests[1], answers[0]


def serve(requests, answers, settings=()):
    """Fork a rank for each request until there are none any more."""
    codes, others = {}, {}
    while True:
        reap(codes)
        if not select.select([requests], [], [], 0.02 if codes else None)[0]:
            continue
        line = os.read(requests, 1 << 20)
        if not line:
            return
        request = json.loads(line)
        wanted = imported_with(request["env"])
        if wanted != settings:
            if wanted not in others:
                others[wanted] = begin_with_keras(wanted)
            os.write(others[wanted][0], line)
            os.write(answers, os.read(others[wanted][1], 100))
            continue
        pid = os.fork()
        if not pid:
            become(request)
        codes[pid] = request["code"]
        os.write(answers, f"{pid}\n".encode())


def main():
    # The first step of an optimizer imports half of torch again.
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], lr=0.1).step()
    os.write(1, b"ready\n")
    serve(0, 1)


main()
