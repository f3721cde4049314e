"""`python -P -m k8sjob.proving.recording`: forks the ranks of each run, and records what they do.

The options of a request are those of a Recorder, and `hashes`: each rank has its own seed of
hashes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k8sjob.forking.ranks import local_place, run_rank, serve
from k8sjob.proving.recording.recorder import LEAVE, Recorder
from k8sjob.proving.recording.wraps import install
from k8sjob.runtime.base.env import export

if TYPE_CHECKING:
    from collections.abc import Callable


def _start(request: dict[str, Any], rank: int, port: int) -> None:
    options = request["options"]
    if rank and options.pop("hashes", False):  # a process has one seed all its life
        export("PYTHONHASHSEED", str(rank))
        line = [sys.executable, "-P", "-m", "k8sjob.proving.recording"]
        os.execv(line[0], [*line, json.dumps([request, rank, port])])  # noqa: S606 - as it is

    def recorded(script: Callable[[], Any]) -> int:
        index, local_rank = local_place(request, rank)
        if options.get("snapshot"):  # the ranks of a node have the same files
            folder, volumes = request["nodes"][index]["cwd"], f"{request['root']}/volumes"
            options["snapshot"] = [] if local_rank else [folder, *[volumes][index:]]
        signal.signal(LEAVE, lambda *_: os._exit(0))
        options.update(root=request["root"], local_rank=local_rank)
        recorder = Recorder(Path(request["folder"]), rank, options)
        recorder.event("start", rank=rank)
        install(recorder)
        return recorder.run(script)

    run_rank(request, rank, port, recorded)


if __name__ == "__main__":
    if sys.argv[1:]:
        _start(*json.loads(sys.argv[1]))
    serve(_start)
