"""The split of the time to the first step, over a job recorded from Kubernetes 1.34.4 with training
operator 1.9.4: its worker's Pod was deleted when the job had ended, its Events were still there.
"""

import copy
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from observed import Script, about_job, lacking, make_pod

from k8sjob.backends.api import JobRef, LogLine, Snapshot
from k8sjob.contract import Event, EventKind
from k8sjob.errors import BackendError
from k8sjob.observe.timing import OutputTimes, output_times, read_output_times, timing
from k8sjob.targets.jobs import job_of

RECORDED = json.loads(Path(__file__).with_name("recorded_timing.json").read_text())
BEGIN = 1795288967.0
"""When the job was made, by the cluster's clock."""


@pytest.fixture
def seen():
    """A copy of what was recorded, to be changed."""
    return copy.deepcopy(RECORDED)


def snapshot_of(seen):
    return Snapshot(job_of(seen["job"]), tuple(seen["pods"]), tuple(seen["events"]))


def lines_of(seen):
    return [
        LogLine(replica, 0, stamp, text)
        for replica, lines in seen["lines"].items()
        for stamp, text in lines
    ]


def split(seen):
    return timing(snapshot_of(seen), {"master-0": output_times(lines_of(seen))})


def phases(found):
    return {phase.phase: round(phase.seconds, 3) for phase in found.phases}


def test_a_recorded_job(seen):
    found = split(seen)
    assert found.ref == JobRef("tiny", "team", seen["job"]["metadata"]["uid"])
    assert phases(found) == {
        "pod": 0,
        "scheduling": 0.497,
        "setup": 0.503,
        "init": 2,
        "image": 0,
        "container": 0,
        "runtime+import+meeting": 2.697,
        "step": 1.525,
    }
    assert found.seconds == pytest.approx(sum(phase.seconds for phase in found.phases))
    assert [phase.exact for phase in found.phases] == [False] * 7 + [True]
    assert {phase.replica for phase in found.phases[:6]} == {"worker-0"}
    assert found.phases[3].detail == "init-pytorch"
    assert found.phases[4].detail == "was on the node"
    (master, worker) = found.replicas
    assert (worker.node, worker.init, worker.container, worker.met) == ("node", 3.0, 3.0, None)
    assert (master.container, round(master.imported, 2)) == (1.0, 4.02)
    (note,) = found.notes
    assert note.startswith("master-0 imported for 2.7 s and then waited 1.7 s for the others")
    assert note.endswith("worker-0 was started last")
    assert found.missing == ("what worker-0 did then: its output is gone with its Pod",)


def test_the_last_replica_to_start_is_followed(seen):
    """Its own first line splits what came after its start."""
    times = {
        "master-0": output_times(lines_of(seen)),
        "worker-0": OutputTimes(first_line=BEGIN + 3.4),
    }
    found = timing(snapshot_of(seen), times)
    assert phases(found)["runtime"] == 0.4
    assert phases(found)["import+meeting"] == 2.297
    assert found.missing == ()


def test_only_rank_0_reports_all_of_it(seen):
    del seen["job"]["spec"]["pytorchReplicaSpecs"]["Worker"]
    found = split(seen)
    assert phases(found) == {
        "pod": 0,
        "scheduling": 0.448,
        "setup": 0.552,
        "image": 0,
        "container": 0,
        "runtime": 0.326,
        "import": 2.698,
        "meeting": 1.673,
        "step": 1.525,
    }
    assert found.phases[3].detail == "pulled in 95ms"
    assert not found.notes


def test_missing_events_are_reported_and_nothing_is_made_up(seen):
    seen["events"] = []
    found = split(seen)
    assert [row.name for row in found.replicas] == ["master-0"]
    assert "image" not in phases(found)
    assert phases(found)["setup+image+container"] == 1.0
    assert found.missing == (
        "when master-0's image was there: a cluster keeps Events for about an hour",
    )


def test_a_job_without_any_trace(seen):
    seen["events"], seen["pods"] = [], []
    found = timing(snapshot_of(seen), {})
    assert (found.seconds, found.phases, found.replicas) == (None, (), ())
    assert "no pod" in found.missing[0]


@pytest.mark.parametrize(
    ("count", "phase", "says"),
    [(1, "runtime", "runtime.session()"), (2, "meeting", "run.step(...)")],
)
def test_a_script_that_does_not_tell_all(seen, count, phase, says):
    del seen["job"]["spec"]["pytorchReplicaSpecs"]["Worker"]
    seen["lines"]["master-0"] = seen["lines"]["master-0"][:count]
    found = split(seen)
    assert (found.seconds, found.phases[-1].phase) == (None, phase)
    assert says in found.missing[-1]


def test_a_replica_that_has_not_been_started(seen):
    pod = make_pod("worker-0", "Pending", waiting={"reason": "PodInitializing"})
    pod["metadata"] |= {"name": "tiny-worker-0", "creationTimestamp": "2026-11-21T19:22:47Z"}
    seen["events"], seen["pods"] = [], [*seen["pods"], pod]
    seen["job"]["status"]["conditions"] = []
    found = timing(snapshot_of(seen), {})
    assert found.phases[-1].phase == "pod"
    assert found.missing[0] == (
        "worker-0 has not been started yet; k8sjob why shows what it is waiting for"
    )


def test_a_job_that_waited_in_a_queue(seen):
    seen["job"]["metadata"]["creationTimestamp"] = "2026-11-21T19:00:00Z"
    let_go = {"type": "Suspended", "status": "False", "lastTransitionTime": "2026-11-21T19:22:46Z"}
    seen["job"]["status"]["conditions"].append(let_go)
    seen["job"]["metadata"]["generation"] = 2  # the resume is the only change of its spec
    found = split(seen)
    assert list(phases(found))[:2] == ["suspended", "pod"]
    assert phases(found)["suspended"] == 22 * 60 + 46
    assert phases(found)["pod"] == 1
    assert (found.since, found.notes[-1:]) == ("submission", found.notes[:1])


def test_what_ran_before_a_suspension_is_not_counted_as_a_wait(seen):
    seen["job"]["metadata"] |= {"creationTimestamp": "2026-11-21T09:00:00Z", "generation": 3}
    resumed = {"type": "Suspended", "status": "False", "lastTransitionTime": "2026-11-21T19:22:46Z"}
    seen["job"]["status"]["conditions"].append(resumed)
    found = split(seen)
    assert (found.since, found.phases[0].phase, found.phases[0].seconds) == ("resume", "pod", 1)
    assert "whether it ran before" in found.missing[0]
    stopped = {"reason": "SuccessfulDeletePod", "lastTimestamp": "2026-11-21T19:20:46Z"}
    seen["events"].append({**about_job("", "Deleted pod: tiny-master-0"), **stopped})
    found = split(seen)
    assert (found.since, phases(found)["suspended"]) == ("suspension", 120)
    assert found.notes[-1].startswith("the job ran before it was suspended")
    assert found.seconds == pytest.approx(sum(phase.seconds for phase in found.phases))


def test_output_of_a_run_before_the_suspension_is_passed_over(seen):
    """As this machine and records keep it."""
    seen["job"]["metadata"] |= {"creationTimestamp": "2026-11-21T09:00:00Z", "generation": 3}
    resumed = {"type": "Suspended", "status": "False", "lastTransitionTime": "2026-11-21T19:22:46Z"}
    seen["job"]["status"]["conditions"].append(resumed)
    step = Event(EventKind.PROGRESS, {"epoch": 0, "step": 1}, 1.0).encode()
    earlier = LogLine("master-0", 0, "2026-11-21T09:00:05Z", step)

    class Output:
        def logs(self, _ref, replica, since):
            assert since.isoformat() == "2026-11-21T19:22:46+00:00"
            yield from [earlier, *lines_of(seen)] if replica == "master-0" else ()

    times = read_output_times(Output(), snapshot_of(seen))
    assert times == {"master-0": output_times(lines_of(seen))}


def test_a_pod_that_was_recreated_after_the_first_step_does_not_count(seen):
    late = copy.deepcopy(seen["pods"][0])
    late["metadata"] |= {"uid": "late", "creationTimestamp": "2026-11-21T20:00:00Z"}
    late["status"]["containerStatuses"][0]["state"] = {
        "running": {"startedAt": "2026-11-21T20:00:01Z"}
    }
    seen["pods"] = [late]
    found = split(seen)
    assert found.phases[-1].phase == "step"
    assert found.replicas[0].container == 1.0


def test_a_pod_that_was_recreated_before_it_counts_from_the_submission(seen):
    del seen["job"]["spec"]["pytorchReplicaSpecs"]["Worker"]
    seen["job"]["metadata"]["creationTimestamp"] = "2026-11-21T19:20:00Z"
    first = copy.deepcopy(next(e for e in seen["events"] if e["reason"] == "Scheduled"))
    first["involvedObject"] = {"kind": "Pod", "name": "tiny-master-0", "uid": "first"}
    first["eventTime"] = "2026-11-21T19:20:01.000000Z"
    seen["events"] = [first, *seen["events"]]
    found = split(seen)
    assert phases(found)["pod"] == 167
    assert found.notes == ("this is Pod number 2 of master-0",)


def test_a_container_that_was_started_again(seen):
    """What counts is the attempt that came to a step."""
    lines = lines_of(seen)
    early = LogLine("master-0", 0, "2026-11-21T19:22:48.000000001Z", "Traceback: no")
    lines = [early, *(LogLine("master-0", 1, line.timestamp, line.text) for line in lines)]
    times = output_times(lines)
    assert times.attempt == 1
    assert times.first_line == pytest.approx(BEGIN + 1.326, abs=0.001)
    found = timing(snapshot_of(seen), {"master-0": times})
    assert "this is start number 2 of master-0's container" in found.notes


def test_clocks_that_differ_are_reported(seen):
    del seen["job"]["spec"]["pytorchReplicaSpecs"]["Worker"]
    seen["pods"][0]["status"]["containerStatuses"][0]["state"] = {
        "running": {"startedAt": "2026-11-21T19:22:52Z"}
    }
    seen["events"] = [e for e in seen["events"] if e["reason"] != "Started"]
    found = split(seen)
    assert all(phase.seconds >= 0 for phase in found.phases)
    assert "clocks" in found.notes[-1]


def test_a_container_that_could_not_be_started_has_no_start(seen):
    """Its kubelet writes 1970 for it."""
    del seen["job"]["spec"]["pytorchReplicaSpecs"]["Worker"]
    state = {"terminated": {"startedAt": "1970-01-01T00:00:00Z", "reason": "StartError"}}
    seen["pods"][0]["status"]["containerStatuses"][0]["state"] = state
    seen["events"] = [e for e in seen["events"] if e["reason"] != "Started"]
    found = timing(snapshot_of(seen), {})
    assert (found.notes, found.phases[-1].phase) == ((), "image")
    assert found.missing == (
        "master-0 has not been started yet; k8sjob why shows what it is waiting for",
    )


def test_this_machine_has_no_scheduler_and_no_image(seen):
    seen["job"]["metadata"]["namespace"] = "local"
    seen["events"] = []
    seen["pods"][0]["status"]["conditions"] = []
    found = split(seen)
    assert list(phases(found)) == ["pod", "container", "runtime", "import", "meeting", "step"]
    assert not found.missing


@pytest.mark.parametrize("value", [None, "x", True, -1, float("nan"), 1e300, [1]])
def test_times_that_cannot_be_are_not_believed(value):
    data = {"import_s": value, "rendezvous_s": 1.5}
    line = Event(EventKind.STARTED, data, 0.0).encode()
    times = output_times([LogLine("master-0", 0, "2026-11-21T19:22:48.000000000Z", line)])
    assert times.began is None
    assert times.imported == times.met - 1.5


def test_the_output_of_all_replicas_is_read(seen):
    lines = [*lines_of(seen), LogLine("worker-0", 0, "2026-11-21T19:22:50.400000000Z", "hello")]
    gap = LogLine("worker-0", 0, "2026-11-21T19:22:47.000000000Z", "missing", gap=True)
    backend = Script([snapshot_of(seen)], [gap, *lines])
    times = read_output_times(backend, snapshot_of(seen))
    assert times["worker-0"] == OutputTimes(first_line=BEGIN + 3.4)
    assert times["master-0"].step


def test_output_that_may_not_be_read_is_left_out(seen):
    errors = {"worker-0": BackendError("forbidden")}
    backend = Script([snapshot_of(seen)], lines_of(seen), errors=errors)
    assert list(read_output_times(backend, snapshot_of(seen))) == ["master-0"]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_objects_that_lack_something_are_no_error(data):
    """Other versions, other kubelets and virtual ones leave out what these objects have."""
    objects = {key: RECORDED[key] for key in ("job", "pods", "events")}
    seen = lacking(data, objects, lambda path: path[2:] and path[-1] not in {"metadata", "name"})
    times = {"master-0": output_times(lines_of(RECORDED))}
    found = timing(Snapshot(job_of(seen["job"]), seen["pods"], seen["events"]), times)
    assert all(phase.seconds >= 0 for phase in found.phases)
    assert json.dumps(found.as_dict())
