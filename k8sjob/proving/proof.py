"""The proof: the runs of a script on this machine, and what they show."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from k8sjob.backends.local.prepare import Places, prepare
from k8sjob.backends.local.state_folder import Store
from k8sjob.contract import AGENT, counted
from k8sjob.environment import variables
from k8sjob.errors import BackendError, Problem, SpecError
from k8sjob.jobs.plan import load_spec, plan_run
from k8sjob.proving.rules import NEXT, Evidence, first_difference
from k8sjob.proving.trace import Trace, TracedRun
from k8sjob.targets.jobs import DEFAULT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from k8sjob.backends.api import Plan
    from k8sjob.spec import JobSpec

_STEPS: Final = 200
_SECONDS: Final = 25.0
"""CPU time of training on rank 0, in each run."""
_QUIET: Final = 8.0
"""Seconds without work after which the ranks wait for each other."""
_SILENT_SECONDS: Final = 100.0
"""Seconds of work without a batch, loss or step after which a run is ended."""
_LIMIT: Final = 300.0
"""Seconds of one run."""
_DATA_PARALLEL: Final = frozenset({"ddp", "fsdp"})


@dataclass(frozen=True, slots=True)
class Proof:
    """Whether a training gives the same numbers on one process and on several.

    Attributes:
        equal: it does.
        cause: a Fault, or None.
        tensor: what differs first: input, loss, gradient, buffer, weight or evaluation.
        name: of the parameter or buffer.
        step: optimizer steps done before.
        rank: that differs from the others.
        values: what was compared: on one process, on several.
        message: what was seen.
        next: how to correct it.
        steps: optimizer steps that were compared with one process.
        processes: of the run with several.
    """

    equal: bool
    cause: str | None = None
    tensor: str | None = None
    name: str | None = None
    step: int | None = None
    rank: int | None = None
    values: tuple[Any, Any] | None = None
    message: str = ""
    next: str = ""
    steps: int = 0
    processes: int = 2

    def as_dict(self) -> dict[str, Any]:
        """The proof as JSON data."""
        return asdict(self)


def prove(
    spec: JobSpec | str | Path,
    *,
    nproc: int | None = None,
    steps: int | None = None,
    folder: str | Path | None = None,
    progress: Callable[[str], object] = lambda _text: None,
    forks: Forks | None = None,
) -> Proof:
    """Compare a training run on one process with the same run on several, on this machine.

    Args:
        spec: a JobSpec, or the path of a job.yaml, of its folder, or of a script.
        nproc: processes of the run with several; None: replicas.nproc_per_node, at least 2.
        steps: optimizer steps to compare at most; None: 200, or as many as fit in 25 seconds.
        folder: what relative paths of the spec start from; None: that of the job.yaml.
        progress: called with a line before each run.
        forks: the process that starts the ranks, to be used for several proofs; None: an own one.

    Raises:
        SpecError: the spec is not valid, or not one of data-parallel training by a script.
        BackendError: it cannot be started here.
    """
    spec, folder = load_spec(spec, folder, here=True)
    nproc = max(spec.replicas.nproc_per_node or 2, 2) if nproc is None else nproc
    _check(spec, nproc)
    shape: dict[str, Any] = {"workers": 0, "nproc_per_node": nproc, "elastic": None}
    spec = spec.with_(replicas=shape, resources={"gpus": 0}, target=DEFAULT.name)
    plan = plan_run(spec, folder)
    if Places(plan, Path(), Path(), Store()).checkpoints_are_the_users:
        # The job resumes from that folder; nothing of a comparison may be in it.
        plan = plan_run(spec.with_(checkpoint={"dir": "/k8sjob-prove"}), folder)
    started = Forks() if forks is None else nullcontext(forks)
    with TemporaryDirectory(prefix="k8sjob-prove-") as temporary, started as forking:
        runs = _Runs(plan, Path(temporary), forking, steps or _STEPS, progress)
        return _proof(runs.evidence(nproc), nproc)


_LINES: Final = {
    "many": "training on {} processes",
    "one": "training on {} process with the same batches",
    "single": "training on {} process with the ranks' batches one after another",
    "again": "training on {} processes once more",
    "resumed": "training on {} processes from the first checkpoint",
}


def _check(spec: JobSpec, nproc: int) -> None:
    if nproc < 2:
        message = f"--nproc {nproc}: one process is compared with several; give at least 2"
        raise SpecError([Problem("", message)])
    check_script(spec, "prove")
    if spec.strategy.kind not in _DATA_PARALLEL:
        message = (
            f"prove compares data-parallel training (ddp, fsdp), and strategy.kind is"
            f" {spec.strategy.kind}"
        )
        raise SpecError([Problem("strategy.kind", message)])


def check_script(spec: JobSpec, command: str) -> None:
    """SpecError where a job runs no Python script, which the command needs."""
    if not (spec.run.script or spec.run.module):
        message = "a Python script; set run.script or run.module in place of run.command"
        raise SpecError([Problem("run.command", f"{command} needs {message}")])


def _proof(evidence: Evidence, nproc: int) -> Proof:
    found = first_difference(evidence)
    asked, nproc = nproc, evidence.size  # a script with mp.spawn starts as many as it likes
    common, (compared, reason) = evidence.common, evidence.compared
    if found is not None:
        advice = found.next or NEXT[found.cause]
        fields = found._asdict() | {"cause": str(found.cause), "next": advice}
        return Proof(equal=False, **fields, steps=compared, processes=nproc)
    if not compared:
        message = (
            f"the {nproc} ranks agree over {counted(common, 'step')}, and none can be compared"
        )
        raise BackendError(f"{message} with one process: {reason}")
    text = f"equal over {counted(compared, 'step')} on 1 and on {nproc} processes"
    if compared < common:
        text += f"; the ranks agree over {counted(common, 'step')}, and {reason} with one process"
    if (loose := evidence.loose) is not None:
        text += f"; from step {loose} on, only large differences count: rounding has"
        text += " changed the weights"
    if nproc != asked:
        text += f"; the script starts {nproc} itself, whatever --nproc is"
    return Proof(equal=True, message=text, steps=compared, processes=nproc)


def _accumulates_for_all(one: Trace, many: TracedRun) -> bool:
    """Whether one process does the backward passes of all ranks for a step."""
    if not one.steps:
        return False
    counts = [len(trace.steps[0].losses) for trace in many.traces if trace.steps]
    return 0 < len(one.steps[0].losses) == sum(counts)


class _Runs:
    """The runs of one script, each in a folder of its own."""

    def __init__(
        self, plan: Plan, root: Path, forks: Forks, steps: int, progress: Callable[[str], object]
    ) -> None:
        self._plan, self._root, self._forks = plan, root, forks
        self._steps, self._progress = steps, progress

    def evidence(self, nproc: int) -> Evidence:
        """The traces of the runs; none follows one that fails."""
        many = self._run("many", nproc, save=True, snapshot=True)
        if many.answer["hung"] or any(trace.end["how"] == "error" for trace in many.traces):
            return Evidence(many)
        done = min(len(trace.steps) for trace in many.traces)
        if not max(len(trace.steps) for trace in many.traces):
            run, ended = self._plan.spec.run, ""
            if many.answer["places"]:  # it was ended
                rank, place = next(iter(many.answer["places"].items()))
                ended = f" in {_SILENT_SECONDS:.0f} seconds, and rank {rank} still runs ({place})"
            raise BackendError(
                f"{run.script or run.module}: no optimizer step was seen{ended}; prove needs a"
                " script that trains with an optimizer of torch.optim"
            )
        records = str(self._root / "records" / "many")
        limit = done if many.traces[0].end["how"] == "enough" else self._steps
        options: dict[str, Any] = {"replay": records, "parts": len(many.traces), "steps": limit}
        one = self._run("one", 1, **options)
        if _accumulates_for_all(one.traces[0], many):
            one = self._run("single", 1, **options, joined=False)
        again = self._run("again", nproc)
        resumed = None
        kept = next(iter(many.traces[0].of("snapshot")), None)
        if kept is not None:
            resumed = self._run("resumed", nproc, files=Path(kept["folder"]))
        return Evidence(many, one, again, resumed)

    def _run(
        self, name: str, ranks: int, *, files: Path | None = None, **options: Any
    ) -> TracedRun:
        self._progress(_LINES[name].format(ranks))
        folder = self._root / "records" / name
        limits = {"quiet": _QUIET, "silent": _SILENT_SECONDS, "limit": _LIMIT}
        options = {"steps": self._steps, "seconds": _SECONDS, **options}
        request = {"folder": str(folder), "ranks": ranks, "options": options, **limits}
        return TracedRun.read(
            folder, self._forks.start(self._plan, self._root / name, request, files)
        )


class Forks:
    """A process that has torch imported, and forks the ranks of each run."""

    program: ClassVar = ("-m", "k8sjob.runtime.prover")

    def __enter__(self) -> Self:
        env = {
            **variables(),
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        home = str(Path(__file__).parents[2])
        env["PYTHONPATH"] = os.pathsep.join([home, *filter(None, [env.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-P", *self.program],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, process_group=0,
        )  # fmt: skip
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # Ctrl-C, which the terminal sends only to this process
            self._process.terminate()
        with suppress(BrokenPipeError):
            self._process.communicate()

    def start(
        self, plan: Plan, root: Path, request: Mapping[str, Any], files: Path | None = None
    ) -> dict[str, Any]:
        """Run the script of a plan in a new folder, with copies of these files; see `run`."""
        places = Places(plan, root, root / "checkpoints", Store())
        launch = prepare(places, places.job).launches["master-0"]
        if files is not None:
            shutil.copytree(files, launch.cwd, dirs_exist_ok=True)
        argv = launch.argv[len(AGENT) :]
        return self.run({"argv": argv, "env": launch.env, "cwd": launch.cwd, **request})

    def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run a script; see k8sjob.runtime.prover.

        Raises:
            BackendError: the process has died.
        """
        requests, answers = self._process.stdin, self._process.stdout
        with suppress(BrokenPipeError):
            print(json.dumps(request), file=requests, flush=True)
        answer = answers.readline() if answers else ""
        if not answer:
            raise BackendError("the processes could not be started; see the lines above")
        found: dict[str, Any] = json.loads(answer)
        return found
