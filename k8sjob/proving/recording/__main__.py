"""`python -P -m k8sjob.proving.recording`: a rank, and a record of what it does.

The options of a request are those of a Recorder, and `hashes`, see run_group.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k8sjob.forking.script import run_rank
from k8sjob.proving.recording.recorder import LEAVE, Recorder
from k8sjob.proving.recording.wraps import install
from k8sjob.runtime.base.env import dist_env

if TYPE_CHECKING:
    from collections.abc import Callable


def _record(request: dict[str, Any], script: Callable[[], Any]) -> int:
    env = dist_env()
    local_rank = env.local_rank
    options = {**request["options"], "root": request["root"], "local_rank": local_rank}
    # The ranks of a node have the same files, so its first rank keeps them; the first rank of all
    # keeps the volumes, which all nodes share.
    if options.get("snapshot"):
        folder, volumes = request["cwd"], f"{request['root']}/volumes"
        options["snapshot"] = [] if local_rank else [folder, *[volumes][request["node"] :]]
    signal.signal(LEAVE, lambda *_: os._exit(0))
    recorder = Recorder(Path(request["folder"]), env.rank, options)
    install(recorder)
    return recorder.run(script)


if __name__ == "__main__":
    run_rank(_record)
