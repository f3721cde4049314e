"""The cause of a job's failure when its Pods are gone and only their Events are left."""

from dataclasses import replace

import pytest
from observed import NOW, about, about_job, condition, make_jobset, snapshot

from k8sjob.observe.diagnose import diagnose
from k8sjob.targets.jobs import job_of

TRAINS, FETCHES = "spec.containers{pytorch}", "spec.initContainers{fetch}"
DEADLINE = "Failed:PyTorchJobFailed:Job job has failed because it was active longer than specified"
LIMIT = "Failed:PyTorchJobFailed:Job job has failed because it has reached the backoff limit"
RUNC = "failed to create shim task: OCI runtime create failed: runc create failed: unable to start"
START_ERROR = f'Error: {RUNC} container process: exec: "pythonn": not found: unknown'


def why(failed):
    return diagnose(failed, {}, now=NOW)


def told(*rows, pod="job-worker-0", uid="w"):
    """Events about a Pod: a reason, a message, and the field, a minute apart."""
    for minute, (reason, message, *field) in enumerate(rows, 1):
        event = about("Pod", pod, reason, message, uid=uid, time=f"0{minute}:00")
        event["involvedObject"]["fieldPath"] = field[0] if field else ""
        yield event


SCHEDULED = ("Scheduled", "Successfully assigned ns/job-worker-0 to node-7")
PULL = ("Failed", 'Failed to pull image "r/t:1": not found', TRAINS)
AGAIN = ("Failed", "Error: ImagePullBackOff", TRAINS)
SECRET = ("Failed", 'Error: secret "token" not found', TRAINS)
START = ("Failed", START_ERROR, TRAINS)
UNPLACED = ("FailedScheduling", "0/6 nodes are available: 6 Insufficient nvidia.com/gpu.")
UNMOUNTED = ("FailedMount", 'MountVolume.SetUp failed for volume "c" : configmap "c" not found')
STARTED = ("Started", "Started container pytorch", TRAINS)


@pytest.mark.parametrize("failed", [LIMIT, f"{DEADLINE} deadline"])
@pytest.mark.parametrize(
    ("rows", "cause"),
    [
        ([SCHEDULED, PULL, AGAIN], "image-missing"),
        ([SCHEDULED, ("InspectFailed", "couldn't parse image name", TRAINS)], "image-name"),
        ([SCHEDULED, ("ErrImageNeverPull", "not present", TRAINS)], "image-missing"),
        ([SCHEDULED, SECRET], "secret"),
        ([SCHEDULED, START], "start"),
        ([SCHEDULED, ("Failed", "Error: runAsNonRoot: image runs as root", FETCHES)], "container"),
        ([UNPLACED], "unschedulable"),
        ([SCHEDULED, UNMOUNTED], "config-map"),
        ([SCHEDULED, ("FailedCreatePodSandBox", "no addresses left")], "sandbox"),
    ],
)
def test_the_events_of_a_gone_pod_have_the_cause(rows, cause, failed):
    first, *others = why(snapshot(failed, events=told(*rows)))
    assert (first.id, first.replicas) == (cause, ("worker-0",))
    assert [finding.id for finding in others] == ["deadline"] * (DEADLINE in failed)


@pytest.mark.parametrize(
    "rows",
    [
        [UNPLACED, SCHEDULED, STARTED],
        [SCHEDULED, PULL, ("Pulled", 'Successfully pulled image "r/t:1"', TRAINS), STARTED],
        [SCHEDULED, START, STARTED],
        [SCHEDULED, UNMOUNTED, ("Pulled", "present", TRAINS), STARTED],
    ],
)
def test_a_problem_that_a_gone_pod_survived_is_no_cause(rows):
    assert [one.id for one in why(snapshot(LIMIT, events=told(*rows)))] == ["restart-limit"]


def test_the_newest_gone_pod_of_a_replica_counts_and_one_that_is_there_does_not():
    healthy = told(SCHEDULED, STARTED, uid="newer")
    for event in (events := [*told(SCHEDULED, PULL), *healthy]):
        event["involvedObject"]["name"] = "job-worker-0"
    assert why(snapshot(LIMIT, events=events))[0].id == "restart-limit"
    for event in (events := list(told(SCHEDULED, PULL))):  # of an earlier job of this name
        event["lastTimestamp"] = "2025-12-31T23:59:00Z"
    assert why(snapshot(LIMIT, events=events))[0].id == "restart-limit"
    other = about_job("Error", "Error pod job-master-0 container pytorch exitCode: 1 terminated")
    assert why(snapshot(LIMIT, events=[other]))[0].id == "restart-limit"


def test_a_jobset_of_others_has_replicas_by_the_names_of_their_pods():
    """Pods of a Job have random suffixes, and here no labels are left to name their replica."""
    pod = {"template": {"spec": {"containers": [{"name": "main", "image": "r/t:1"}]}}}
    parts = [
        {"name": name, "template": {"spec": {"completions": 1, "parallelism": 1, **pod}}}
        for name in ("leader", "actors")
    ]
    job = make_jobset(*parts, condition=condition("Failed:FailedJobs:jobset failed"))
    row = ("Failed", START_ERROR, "spec.containers{main}")
    events = tuple(told(SCHEDULED, row, pod="job-actors-0-0-x7k2p"))
    [finding] = why(replace(snapshot(), job=job_of(job), events=events))
    assert (finding.id, finding.replica) == ("start", "actors-0-0")
