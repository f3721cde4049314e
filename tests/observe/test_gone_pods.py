"""Gone Pods of which the Events show no cause; those with one are recorded as gone-*.json."""

import pytest
from observed import NOW, about, about_job, snapshot

from k8sjob.observe.diagnose import diagnose

TRAINS = "spec.containers{pytorch}"
LIMIT = "Failed:PyTorchJobFailed:Job job has failed because it has reached the backoff limit"
RUNC = "failed to create shim task: OCI runtime create failed: runc create failed: unable to start"
START_ERROR = f'Error: {RUNC} container process: exec: "pythonn": not found: unknown'


def why(failed):
    return diagnose(failed, {}, now=NOW)


def told(*rows, uid="w"):
    """Events about a Pod: a reason, a message, and the field, a minute apart."""
    for minute, (reason, message, *field) in enumerate(rows, 1):
        event = about("Pod", "job-worker-0", reason, message, uid=uid, time=f"0{minute}:00")
        event["involvedObject"]["fieldPath"] = field[0] if field else ""
        yield event


SCHEDULED = ("Scheduled", "Successfully assigned ns/job-worker-0 to node-7")
PULL = ("Failed", 'Failed to pull image "r/t:1": not found', TRAINS)
START = ("Failed", START_ERROR, TRAINS)
UNPLACED = ("FailedScheduling", "0/6 nodes are available: 6 Insufficient nvidia.com/gpu.")
UNMOUNTED = ("FailedMount", 'MountVolume.SetUp failed for volume "c" : configmap "c" not found')
STARTED = ("Started", "Started container pytorch", TRAINS)


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
    assert [finding.id for finding in why(snapshot(LIMIT, events=told(*rows)))] == ["restart-limit"]


def test_the_newest_gone_pod_of_a_replica_counts_and_one_that_is_there_does_not():
    healthy = told(SCHEDULED, STARTED, uid="newer")
    events = [*told(SCHEDULED, PULL), *healthy]
    assert why(snapshot(LIMIT, events=events))[0].id == "restart-limit"
    for event in (events := list(told(SCHEDULED, PULL))):  # of an earlier job of this name
        event["lastTimestamp"] = "2025-12-31T23:59:00Z"
    assert why(snapshot(LIMIT, events=events))[0].id == "restart-limit"
    other = about_job("Error", "Error pod job-master-0 container pytorch exitCode: 1 terminated")
    assert why(snapshot(LIMIT, events=[other]))[0].id == "restart-limit"
