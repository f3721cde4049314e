"""The proof: the runs of a script on this machine, and what they show."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from k8sjob.contract import counted
from k8sjob.errors import BackendError, SpecError
from k8sjob.findings import invalid
from k8sjob.forking.forks import NO_GPUS, Forks, check_script
from k8sjob.image.builders.process import signals_as_exit
from k8sjob.jobs.plan import load_spec, plan_run
from k8sjob.proving.rules import (
    NEXT,
    Evidence,
    first_difference,
    message,
    not_compared,
    notes,
    repeats,
)
from k8sjob.proving.trace import TracedRun
from k8sjob.temporary import temporary_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from k8sjob.spec import JobSpec

RECORDING: Final = "k8sjob.proving.recording"
"""The program that forks the ranks of a proof."""
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
_MAX_PROCESSES: Final = 8
"""Of a job with more, two nodes of two processes are run; see Layout."""


class Layout(NamedTuple):
    """The nodes of a run, and the processes on each."""

    nodes: int
    processes: int

    @property
    def size(self) -> int:
        """All processes."""
        return self.nodes * self.processes

    def __str__(self) -> str:
        return f"{counted(self.nodes, 'node')} x {counted(self.processes, 'process', 'es')}"

    @classmethod
    def of(cls, spec: JobSpec, nproc: int | None) -> Layout:
        """The layout to be run for a job: its own, or a smaller one with nodes and processes."""
        layout = cls(spec.nnodes, nproc or spec.nproc_per_node)
        # Two of each are enough to tell nodes from processes, as a sampler that divides by the
        # local rank does not.
        if layout.size > _MAX_PROCESSES:
            layout = cls(min(layout.nodes, 2), nproc or min(layout.processes, 2))
        # One process has nothing to compare with: a job of one is proven for the day it has two.
        return cls(1, 2) if layout.size == 1 and nproc is None else layout


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
        layout: its nodes and processes: the job's own, unless `not_compared` has another one.
        notes: what is no difference and may be worth a change.
        not_compared: what was not compared, and why.
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
    layout: str = ""
    notes: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()

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
        nproc: processes of each node of the run with several; None: those of the job, and two for
            a job of one process.
        steps: optimizer steps to compare at most; None: 200, or as many as fit in 25 seconds.
        folder: what relative paths of the spec start from; None: that of the job.yaml.
        progress: called with a line before each run.
        forks: the process that starts the ranks, to be used for several proofs; None: an own one.

    Raises:
        SpecError: the spec is not valid, or not one of data-parallel training by a script.
        BackendError: it cannot be started here.
    """
    spec, folder = load_spec(spec, folder, local=True)
    layout = Layout.of(spec, nproc)
    _check(spec, layout)
    started = Forks(RECORDING) if forks is None else nullcontext(forks)
    with signals_as_exit(), temporary_folder("prove") as temporary, started as forking:
        # With as many processes as the GPUs would give, where the spec does not name a number.
        shape = {"nproc_per_node": spec.nproc_per_node, "elastic": None}
        cpu_spec = spec.with_(replicas=shape, resources=NO_GPUS)
        runs = _Runs(cpu_spec, folder, temporary, forking, steps or _STEPS, progress)
        return _proof(runs.evidence(layout), Layout(spec.nnodes, spec.nproc_per_node), layout)


def _check(spec: JobSpec, layout: Layout) -> None:
    if layout.size < 2:
        text = message("one-process", size=layout.size)
        raise SpecError([invalid((), text, "give at least 2")])
    check_script(spec, "prove")
    if spec.strategy.kind not in _DATA_PARALLEL:
        text = message("no-data-parallel", kind=spec.strategy.kind)
        raise SpecError([invalid(("strategy", "kind"), text)])


def _proof(evidence: Evidence, job: Layout, layout: Layout) -> Proof:
    difference = first_difference(evidence)
    common, (compared, reason) = evidence.common, evidence.compared
    size = evidence.size  # a script that starts processes itself starts as many as it likes
    ran = Layout(layout.nodes, size // layout.nodes)
    answer: dict[str, Any] = {
        "steps": compared,
        "processes": size,
        "layout": str(ran),
        "notes": tuple(notes(evidence)),
        "not_compared": tuple(not_compared(evidence)),
    }
    if job.size > layout.size:
        reduced = f"the job's own layout, {job} (it is run as {layout})"
        answer["not_compared"] = (reduced, *answer["not_compared"])
    if difference is not None:
        advice = difference.next or NEXT[difference.cause]
        fields = difference._asdict() | {"cause": str(difference.cause), "next": advice}
        return Proof(equal=False, **fields, **answer)
    if not compared:
        # No difference, and no step that one process could be compared at: that is no proof.
        steps = counted(common, "step")
        raise BackendError(message("nothing-compared", size=size, steps=steps, reason=reason))
    text = f"equal over {counted(compared, 'step')} on 1 process and on {ran}"
    if compared < common:
        text += f"; the ranks agree over {counted(common, 'step')}, and {reason} with one process"
    if (loose := evidence.loose) is not None:
        text += message("rounding", step=loose)
    if ran != layout:
        text += f"; the script starts {ran.processes} itself, whatever --nproc is"
    return Proof(equal=True, message=text, **answer)


@dataclass(frozen=True, slots=True)
class _Runs:
    """The runs of one script, each in a folder of its own below the root."""

    spec: JobSpec
    folder: str | Path
    root: Path
    forks: Forks
    steps: int
    progress: Callable[[str], object]

    def evidence(self, layout: Layout) -> Evidence:
        """The traces of the runs; none follows one that fails."""
        many = self._run("many", layout, save=True, snapshot=True)
        # What fails has its cause in the first run; the others would only fail again.
        if many.fails:
            return Evidence(many)
        # The run may have ended by its time: the run of one process then does as many steps, and no
        # more.
        done = min(len(trace.steps) for trace in many.traces)
        if not max(len(trace.steps) for trace in many.traces):
            script, ended = self.spec.run.script or self.spec.run.module, ""
            if many.answer["places"]:  # it was ended
                rank, place = next(iter(many.answer["places"].items()))
                ended = f" in {_SILENT_SECONDS:.0f} seconds, and rank {rank} still runs ({place})"
            raise BackendError(message("no-step", script=script, ended=ended))
        records = str(self.root / "records" / "many")
        limit = done if many.traces[0].end["how"] == "enough" else self.steps
        options: dict[str, Any] = {"replay": records, "parts": len(many.traces), "steps": limit}
        single = Layout(1, 1)
        alone = self._run("one", single, **options)
        # Backward passes of each rank for its first step: more than one where gradients are
        # accumulated.
        losses = [len(trace.steps[0].losses) for trace in many.traces if trace.steps]
        if any(len(step.losses) == sum(losses) > 0 for step in alone.traces[0].steps[:1]):
            # It does the backward passes of all ranks for a step.
            # So the script divides a global batch by the number of processes: one process gets the
            # ranks' batches one after another.
            alone = self._run("single", single, **options, joined=False)
        # The agent gives all ranks one seed of hashes; another launcher does not.
        hashes = "PYTHONHASHSEED" not in self.spec.run.env
        again, hashed = self._run("again", layout, hashes=hashes), None
        # With one seed of hashes once more: else a set's order would look like training that does
        # not repeat.
        if hashes and not repeats(many, again):
            again, hashed = self._run("repeated", layout), again
        # What the first run had on disk when it went on after its first checkpoint, one folder for
        # each node.
        files = [Path(event["folder"]) for trace in many.traces for event in trace.of("snapshot")]
        if not files:
            return Evidence(many, alone, again, hashed=hashed)
        resumed = self._run("resumed", layout, files=files)
        # One step is enough: it is asked only whether the script starts from the checkpoint at all.
        moved = self._run("moved", single, files=files, steps=1)
        return Evidence(many, alone, again, resumed, moved, hashed)

    def _run(
        self, name: str, layout: Layout, *, files: Sequence[Path] = (), **options: Any
    ) -> TracedRun:
        where = layout if layout.size > 1 else "1 process"
        self.progress(message(f"run-{name}", layout=where))
        folder = self.root / "records" / name
        limits = {"quiet": _QUIET, "silent": _SILENT_SECONDS, "limit": _LIMIT}
        options = {"steps": self.steps, "seconds": _SECONDS, **options}
        request = {"folder": str(folder), "ranks": layout.size, "options": options, **limits}
        shape = {"workers": layout.nodes - 1, "nproc_per_node": layout.processes}
        plan = plan_run(self.spec.with_(replicas=shape), self.folder)
        return TracedRun.read(folder, self.forks.start(plan, self.root / name, request, files))
