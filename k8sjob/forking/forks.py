"""A process that has torch imported and forks the ranks of each run of a script."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from k8sjob.backends.local import mounts
from k8sjob.backends.local.machine import check_torch
from k8sjob.backends.local.prepare import Places, prepare
from k8sjob.backends.local.state_folder import Store
from k8sjob.contract import AGENT
from k8sjob.environment import variables
from k8sjob.errors import BackendError, SpecError
from k8sjob.findings import invalid
from k8sjob.forking.volumes import detach, private, refuse_unhidden

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from k8sjob.backends.api import Plan
    from k8sjob.spec import JobSpec

NO_GPUS: Final = {"gpus": 0, "gpu_type": None, "master": None}
"""`resources` of a run on this machine's CPU."""


def check_script(spec: JobSpec, command: str) -> None:
    """SpecError where a job runs no Python script, which the command needs."""
    if not (spec.run.script or spec.run.module):
        step = "set run.script or run.module in place of run.command"
        raise SpecError([invalid(("run", "command"), f"{command} needs a Python script", step)])


class Forks:
    """A process that has torch imported, and forks the ranks of each run."""

    def __init__(self, program: str, *imported: str) -> None:
        """The module that a rank runs, and others that are imported beforehand."""
        self._modules = [program, *imported]

    def __enter__(self) -> Self:
        check_torch()
        env = {
            **variables(),
            # All ranks have the same seed, as under the agent; a rank that needs another one starts
            # a new Python process.
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        # -P leaves out the current folder, and so this package where it is not installed.
        home = str(Path(__file__).parents[2])
        env["PYTHONPATH"] = os.pathsep.join([home, *filter(None, [env.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "k8sjob.forking.ranks", *self._modules],
            # A process group of its own: on Ctrl-C this process decides what ends.
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, process_group=0,
        )  # fmt: skip
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # Ctrl-C, which the terminal sends only to this process
            self._process.terminate()
        with suppress(BrokenPipeError):
            self._process.communicate()

    def start(
        self, plan: Plan, root: Path, request: Mapping[str, Any], files: Sequence[Path] = ()
    ) -> dict[str, Any]:
        """Run the script of a plan on all its nodes in a new folder, with copies of its volumes.

        `files` are folders to lay over the new one, as another run has kept them; see `run`.
        """
        root.mkdir(parents=True)
        places = Places(private(plan, root), root, root / "checkpoints", Store(), hides=True)
        launches = prepare(places, places.job).launches.values()
        # prepare() has copied the code; its links may still lead into folders of the user.
        detach(root)
        refuse_unhidden(places.plan.spec, next(iter(launches)).mounts)
        for folder in files:
            shutil.copytree(folder, root, dirs_exist_ok=True)
        # Without the agent: the ranks are forked, and run what it would run.
        nodes = [asdict(launch) | {"argv": launch.argv[len(AGENT) :]} for launch in launches]
        request = {"mounter": mounts.__file__, "root": str(root), **request}
        return self.run({"nodes": nodes, "local_rank_arg": plan.spec.run.local_rank_arg, **request})

    def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run a script; see k8sjob.forking.ranks.

        Raises:
            BackendError: the process has died.
        """
        requests, answers = self._process.stdin, self._process.stdout
        with suppress(BrokenPipeError):
            print(json.dumps(request), file=requests, flush=True)
        answer = answers.readline() if answers else ""
        if not answer:
            raise BackendError("the processes could not be started; see the lines above")
        return dict(json.loads(answer))
