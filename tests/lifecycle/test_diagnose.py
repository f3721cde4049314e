import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8sjob.backends.api import Snapshot
from k8sjob.contract import Event, Reason
from k8sjob.lifecycle.diagnose import Cause, diagnose

PAST = "Failed:x:Job j has failed because"


def ended(code, message="", reason="Error", at="2026-01-01T00:05:00Z"):
    return {"exitCode": code, "reason": reason, "message": message, "finishedAt": at}


def test_nothing_is_wrong_with_a_job_that_runs_or_ended_well(snapshot, make_pod):
    pods = [make_pod(name, running={}) for name in ("master-0", "worker-0", "worker-1")]
    for state in ("Created", "Running"):
        assert diagnose(snapshot(state, pods=pods), {}) == []
    ended_well = [make_pod("master-0", "Succeeded", terminated=ended(0))]
    assert diagnose(snapshot("Succeeded", pods=ended_well), {}) == []


@pytest.mark.parametrize(
    ("condition", "cause", "step"),
    [
        ("Suspended", "suspended", "k8sjob resume ns/job"),
        ("Failed:PyTorchJobStopped:job was stopped: Ctrl-C.", "stopped", "run the job again"),
        ("Failed:PyTorchJobSupervisorGone:lost", "supervisor-gone", "run the job again"),
        (f"{PAST} it was active longer than specified deadline", "deadline", "active_deadline"),
        (f"{PAST} it has reached the specified backoff limit", "restart-limit", "max_restarts"),
        (f"{PAST} w failed 2 times and max_restarts is 1", "restart-limit", "max_restarts"),
    ],
)
def test_the_job_itself(snapshot, condition, cause, step):
    (finding,) = diagnose(snapshot("Created", condition), {})
    assert finding.cause == cause
    assert step in finding.next_step
    assert finding.replica == ""


@pytest.mark.parametrize(
    ("end", "tail", "cause", "said"),
    [
        (ended(1), ["ValueError: no"], "crash", "exit code 1: ValueError: no"),
        (ended(1, "ValueError: no\n"), [], "crash", "exit code 1: ValueError: no"),
        (ended(3), [], "crash", "worker-0: exit code 3"),
        (
            ended(1, Reason(1, 5, "KeyError", "'x'", "main.py:3").encode()),
            [],
            "crash",
            "worker-0, rank 5: exit code 1: KeyError: 'x' (main.py:3)",
        ),
        (ended(137, reason="OOMKilled"), [], "memory", "out of memory"),
        (ended(137), [], "killed", "ended by SIGKILL"),
        (ended(139), [], "killed", "ended by SIGSEGV"),
        (
            ended(139, Reason(139, 5, "Signal", "killed by SIGSEGV").encode()),
            [],
            "killed",
            "worker-0, rank 5: ended by SIGSEGV$",
        ),
        (
            ended(7, Reason(7, 5, "Exit", "it gave no reason").encode()),
            ["the last line", "k8sjob: rank 5: Exit: it gave no reason, exit code 7"],
            "crash",
            "exit code 7: the last line",
        ),
        (ended(128, "cannot start 'x'", "StartError"), [], "start", "cannot start 'x'"),
        (ended(127), ["sh: nothing: not found"], "start", "nothing: not found"),
        (
            ended(1),
            ["Traceback", "ModuleNotFoundError: No module named 'pandas.core'", "more"],
            "missing-module",
            "no module named 'pandas.core'",
        ),
        (
            ended(1, Reason(1, 0, "ModuleNotFoundError", "No module named 'x'").encode()),
            [],
            "missing-module",
            "no module named 'x'",
        ),
        (
            ended(1),
            ["torch.OutOfMemoryError: CUDA out of memory. Tried"],
            "gpu-memory",
            "out of GPU memory",
        ),
        (ended(1), ["OSError: [Errno 98] Address already in use"], "address-in-use", "is taken"),
        (
            ended(140, Reason(140, 1, "Hang", "no beat for 9 s", culprits=(2, 3)).encode()),
            [],
            "hung",
            "ranks 2, 3 hung: no beat for 9 s",
        ),
        (
            ended(138, Reason(138, 0, "PeerLost", "2 of 3 came", culprits=(1,)).encode()),
            [],
            "rendezvous",
            "rank 1 did not come: 2 of 3 came",
        ),
        (
            ended(2, Reason(2, -1, "EnvError", "WORLD_SIZE=0 is too small").encode()),
            [],
            "configuration",
            "WORLD_SIZE=0 is too small",
        ),
    ],
)
def test_a_container_that_ended(snapshot, make_pod, end, tail, cause, said):  # noqa: PLR0917 - fixtures
    pods = [make_pod("master-0", "Succeeded"), make_pod("worker-0", "Failed", terminated=end)]
    (finding, *rest) = diagnose(snapshot("Failed:x:why", pods=pods), {"worker-0": tail})
    assert finding.cause == cause
    assert said in finding.message + "$"
    assert finding.replica == "worker-0"
    assert finding.next_step
    assert rest == []


def test_what_a_lost_supervisor_took_along_is_not_a_cause_of_its_own(snapshot, make_pod):
    killed = make_pod("worker-0", "Failed", **ended(137, reason="ContainerStatusUnknown"))
    state = snapshot("Failed:PyTorchJobSupervisorGone:lost", pods=[killed])
    assert [finding.cause for finding in diagnose(state, {})] == ["supervisor-gone"]


def test_the_first_cause_is_not_its_consequences(snapshot, make_pod):
    lost = Reason(138, 0, "PeerLost", "gone", time=1.0).encode()
    broke = Reason(1, 2, "ValueError", "the cause", time=3.0).encode()
    later = Reason(1, 1, "ValueError", "not this one", time=4.0).encode()
    pods = [
        make_pod("master-0", "Failed", terminated=ended(138, lost)),
        make_pod("worker-0", "Failed", terminated=ended(1, later)),
        make_pod("worker-1", "Failed", terminated=ended(1, broke)),
        make_pod("worker-2", "Failed", terminated=ended(143)),
    ]
    (finding,) = diagnose(snapshot("Failed", pods=pods), {})
    assert finding.replica == "worker-1"
    assert "the cause" in finding.message


def test_a_deleted_pod_is_still_explained_by_the_events_about_it(snapshot, make_pod):
    reason = Reason(1, 2, "ValueError", "long " * 300).encode()
    text = f"Error pod job-worker-1 container pytorch exitCode: 1 terminated message: {reason}"
    for message in (text, text[:1024]):  # the apiserver keeps so much
        event = {"message": message, "reason": "Error", "lastTimestamp": "2026-01-01T00:05:00Z"}
        (finding,) = diagnose(snapshot("Failed", events=[event]), {})
        assert finding.cause == "crash"
        assert finding.replica == "worker-1"
        assert "long long" in finding.message


def test_a_newer_end_of_a_replica_counts(snapshot, make_pod):
    pod = make_pod("master-0", "Failed", terminated=ended(139, at="2026-01-01T00:08:00Z"))
    text = "Error pod job-master-0 container pytorch exitCode: 1 terminated message: old"
    event = {"message": text, "reason": "Error", "lastTimestamp": "2026-01-01T00:05:00Z"}
    (finding,) = diagnose(snapshot("Failed", pods=[pod], events=[event]), {})
    assert finding.cause == "killed"


def test_a_job_that_runs_again_still_says_why_it_was_restarted(snapshot, make_pod):
    pods = [
        make_pod("master-0", running={}),
        make_pod("worker-0", restarts=1, running={}, last=ended(137)),
        make_pod("worker-1", running={}),
    ]
    (finding,) = diagnose(snapshot("Running", pods=pods), {})
    assert finding.cause == "killed"


def test_runtime_events_are_not_taken_for_words(snapshot, make_pod):
    pod = make_pod("worker-0", "Failed", terminated=ended(1))
    tail = ["RuntimeError: it", Event("progress", {"x": "ValueError"}).encode()]
    (finding,) = diagnose(snapshot("Failed", pods=[pod]), {"worker-0": tail})
    assert finding.message.endswith("RuntimeError: it")


@given(
    code=st.integers(1, 255),
    message=st.text() | st.just('{"exit_code": 1, "message": "cut'),
    why=st.sampled_from(["Error", "OOMKilled", "StartError", ""]),
    tail=st.lists(st.text(), max_size=3),
)
def test_whatever_a_job_wrote_there_is_one_finding(code, message, why, tail):
    pod = {
        "metadata": {"name": "job-worker-0", "labels": {}},
        "status": {
            "phase": "Failed",
            "containerStatuses": [
                {"name": "pytorch", "state": {"terminated": ended(code, message, why)}}
            ],
        },
    }
    job = {
        "metadata": {"name": "job"},
        "status": {"conditions": [{"type": "Failed", "status": "True"}]},
    }
    (finding,) = diagnose(Snapshot(job, [pod]), {"worker-0": tail})
    assert finding.message.startswith("worker-0")
    assert set(finding.as_dict()) == {"cause", "message", "next_step", "replica", "replicas"}


def test_every_cause_is_in_the_reference():
    page = Path(__file__).resolve().parents[2] / "docs/reference/states.md"
    listed = re.findall(r"^\| `([a-z-]+)` \|", page.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(Cause)
