import copy
import re
import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8sjob.backends.api import Snapshot
from k8sjob.contract import Event, Reason
from k8sjob.observe.diagnose import Cause, diagnose
from k8sjob.observe.diagnose.finding import without_replica
from k8sjob.observe.diagnose.output import since_training

WORKERS = ("worker-0", "worker-1")
PAST = "Failed:x:Job j has failed because"


def ended(code, message="", reason="Error", at="2026-01-01T00:05:00Z"):
    return {"exitCode": code, "reason": reason, "message": message, "finishedAt": at}


def test_a_pod_that_is_deleted_after_the_jobs_end_still_shows_the_cause(snapshot, make_pod):
    """A Pod whose container waits to be restarted counts as running: cleanPodPolicy deletes it."""
    pod = make_pod("master-0", "Running", dying=True, terminated=ended(1, "ValueError: no"))
    failed = f"{PAST} w failed 1 time and max_restarts is 0"
    first, limit = diagnose(snapshot("Created", failed, pods=[pod]), {})
    assert (first.cause, limit.cause) == ("crash", "restart-limit")


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
    ("end", "tail", "cause", "note"),
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
            ended(139, Reason(139, 5, "Signal", "killed by SIGSEGV", "main.py:6").encode()),
            [],
            "killed",
            "worker-0, rank 5: ended by SIGSEGV (main.py:6)$",
        ),
        (
            ended(200, Reason(200, 5, "Exit", "exited with code 200", "main.py:6").encode()),
            ["k8sjob: 0.1.0, job x, node 0 of 1, 1 process of 1"],
            "crash",
            "worker-0, rank 5: exit code 200 (main.py:6)$",
        ),
        *(
            (
                ended(code, Reason(code, 5, kind, message, "main.py:6").encode()),
                ["own words"],
                cause,
                note,
            )
            for code, kind, message, cause, note in [
                (138, "Signal", "killed by SIGUSR1", "killed", "ended by SIGUSR1 (main.py:6)$"),
                (140, "Signal", "killed by SIGUSR2", "killed", "ended by SIGUSR2 (main.py:6)$"),
                *(
                    (n, "Exit", f"exited with code {n}", "crash", f"exit code {n}: own words")
                    for n in (127, 137, 138, 140)
                ),
            ]
        ),
        (ended(137, Reason(137, -1, "Exit", "exited with code 137").encode()), [], "killed", ""),
        (ended(127, Reason(127, -1, "Exit", "exited with code 127").encode()), [], "start", ""),
        (  # as older runtimes wrote it
            ended(7, Reason(7, 5, "Exit", "it gave no reason").encode()),
            ["the last line", "k8sjob: rank 5: Exit: it gave no reason, exit code 7"],
            "crash",
            "exit code 7: the last line",
        ),
        (
            ended(7, Reason(7, 5, "Exit", "exited with code 7").encode()),
            ["the last line", "k8sjob: rank 5: exited with code 7"],
            "crash",
            "exit code 7: the last line",
        ),
        (
            ended(7, Reason(7, 5, "Exit", "exited with code 7").encode()),
            ["the last line", "k8sjob: rank 5: Exit: exited with code 7"],
            "crash",
            "exit code 7: the last line",
        ),
        (
            ended(2, Reason(2, 5, "SystemExit", "sys.exit(2)", "main.py:3").encode()),
            [
                "usage: main.py [-h] [--lr LR]",
                "main.py: error: unrecognized arguments: --rl 1",
                "k8sjob: rank 5: SystemExit: sys.exit(2) (main.py:3), exit code 2",
            ],
            "crash",
            "exit code 2: main.py: error: unrecognized arguments: --rl 1 (main.py:3)$",
        ),
        (
            ended(4, Reason(4, 5, "SystemExit", "sys.exit(4)", "main.py:3").encode()),
            ["k8sjob: 0.1.0, job x, node 1 of 2, 1 process of 2, Python 3.12.1"],
            "crash",
            "worker-0, rank 5: exit code 4 (main.py:3)$",
        ),
        (
            ended(1, Reason(1, 5, "SystemExit", "no data in /data", "main.py:3").encode()),
            ["the last line"],
            "crash",
            "exit code 1: SystemExit: no data in /data (main.py:3)$",
        ),
        (
            ended(1, Reason(1, 5, "AssertionError", "", "main.py:3").encode()),
            ["the last line"],
            "crash",
            "exit code 1: AssertionError (main.py:3)$",
        ),
        (
            ended(1),
            ["Traceback (most recent call last):", "  x", "UsageError: ", "", "no key", "see x"],
            "crash",
            "exit code 1: UsageError: no key$",
        ),
        (
            ended(2, Reason(2, 1, "Exit", "exited with code 2", "main.py:5").encode()),
            ["usage: main.py [-h] --lr LR", "main.py: error: the following are required: --lr"],
            "crash",
            "exit code 2: main.py: error: the following are required: --lr (main.py:5)$",
        ),
        (
            ended(2, Reason(2, 1, "Exit", "exited with code 2", "main.py:5").encode()),
            ["no data", "k8sjob: rank 0: exited with code 2 (main.py:5)"],
            "crash",
            "exit code 2: no data (main.py:5)",
        ),
        (
            ended(1, Reason(1, 1, "Exit", "exited with code 1", "main.py:5").encode()),
            ["Traceback (most recent call last):", "  File 'x'", "KeyError: 'handled'", "bye"],
            "crash",
            "exit code 1: KeyError: 'handled' (main.py:5)",
        ),
        (
            ended(1, Reason(1, 1, "AssertionError", "", "main.py:5").encode()),
            [],
            "crash",
            "exit code 1: AssertionError (main.py:5)$",
        ),
        (
            ended(2, Reason(2, -1, "Exit", "exited with code 2").encode()),
            ["k8sjob: cannot start 'torchrum': No such file or directory"],
            "start",
            "cannot start 'torchrum'",
        ),
        (ended(128, "cannot start 'x'", "StartError"), [], "start", "cannot start 'x'"),
        (ended(127), ["sh: nothing: not found"], "start", "nothing: not found"),
        (
            ended(1),
            [
                "Traceback (most recent call last):",
                "ModuleNotFoundError: No module named 'pandas.core'",
                "more",
            ],
            "missing-module",
            "no module named 'pandas.core'",
        ),
        (
            ended(1, Reason(1, 1, "ModuleNotFoundError", "No module named 'x'").encode()),
            [],
            "missing-module",
            "no module named 'x'",
        ),
        (
            ended(1),
            ["/usr/bin/python: ... (ModuleNotFoundError: No module named 'k8sjob')"],
            "missing-module",
            "its image does not contain k8sjob's runtime$",
        ),
        (
            ended(255),
            ["exec /usr/local/bin/python: exec format error"],
            "image",
            "built for another processor architecture",
        ),
        (
            ended(128, "runc: unable to start: exec: x: exec format error: unknown", "StartError"),
            [],
            "image",
            "built for another processor architecture",
        ),
        (
            ended(1, Reason(1, 1, "OSError", "x: exec format error: unknown").encode()),
            [],
            "crash",
            "OSError: x: exec format error",
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
            ended(138, Reason(138, 1, "PeerLost", "2 of 3 came", culprits=(1,)).encode()),
            [],
            "rendezvous",
            "rank 1 did not join the rendezvous: 2 of 3 came",
        ),
        (
            ended(2, Reason(2, -1, "EnvError", "WORLD_SIZE=0 is too small").encode()),
            [],
            "configuration",
            "WORLD_SIZE=0 is too small",
        ),
    ],
)
def test_a_container_that_ended(snapshot, make_pod, end, tail, cause, note):  # noqa: PLR0917 - fixtures
    pods = [make_pod("master-0", "Succeeded"), make_pod("worker-0", "Failed", terminated=end)]
    (finding, *rest) = diagnose(snapshot("Failed:x:why", pods=pods), {"worker-0": tail})
    assert finding.cause == cause
    assert note in finding.message + "$"
    assert finding.replica == "worker-0"
    assert finding.next_step
    assert rest == []


@pytest.mark.parametrize(
    ("line", "here", "there"),
    [
        ("ModuleNotFoundError: No module named 'x'", "in the environment", "image.pip"),
        ("RuntimeError: Found no NVIDIA driver on your system", "this machine", "base image"),
    ],
)
def test_the_next_step_on_this_machine_is_another_one(snapshot, make_pod, line, here, there):
    state = snapshot("Failed:x:why", pods=[make_pod("master-0", "Failed", terminated=ended(1))])
    steps = []
    for namespace in ("local", "blue"):
        state.job["metadata"]["namespace"] = namespace
        (finding,) = diagnose(state, {"master-0": [line]})
        steps.append(finding.next_step)
    assert here in steps[0]
    assert there not in steps[0]
    assert there in steps[1]


@pytest.mark.parametrize("namespace", ["local", "blue"])
def test_a_package_that_was_found_need_not_be_installed(snapshot, make_pod, namespace):
    """Python names the first part that it does not find."""
    state = snapshot("Failed:x:why", pods=[make_pod("master-0", "Failed", terminated=ended(1))])
    state.job["metadata"]["namespace"] = namespace
    for more in ("", "; 'utils' is not a package"):
        line = f"ModuleNotFoundError: No module named 'utils.data'{more}"
        (finding,) = diagnose(state, {"master-0": [line]})
        assert "no module named 'utils.data'" in finding.message
        assert finding.next_step.startswith("'utils' was found, but not that module in it")
        assert "rename a file utils.py" in finding.next_step
        assert "install 'utils'" not in finding.next_step


@pytest.mark.parametrize("kind", ["EnvError", "ValueError"])
def test_a_setting_that_does_not_fit_is_a_field_of_the_job(snapshot, make_pod, kind):
    """The script is right, and job.yaml is not."""
    note = "strategy.splits: 'fc9' is no layer of the chain; valid layers: fc1, fc2"
    end = ended(2 if kind == "EnvError" else 1, Reason(1, 0, kind, note).encode())
    pods = [make_pod("worker-0", "Failed", terminated=end)]
    (finding,) = diagnose(snapshot("Failed:x:why", pods=pods), {})
    assert "strategy.splits" in finding.next_step
    assert "job.yaml" in finding.next_step
    assert "correct the script" not in finding.next_step


def test_replicas_that_ended_with_their_supervisor_are_no_cause(snapshot, make_pod):
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


def test_a_rank_that_ended_early_is_named(snapshot, make_pod):
    master = make_pod("master-0", "Failed", terminated=ended(1))
    tail = {
        "master-0": ["RuntimeError: [gloo/pair.cc:534] Connection closed by peer [10.244.0.7]:1"]
    }
    left, runs = ({"terminated": {"exitCode": 0}}, {"running": {}})
    who = "worker-0 (rank 1) had ended with exit code 0, and master-0 still waited for it"
    for state, note in ((left, who), (runs, "another rank broke")):
        job = snapshot("Failed", pods=[master, make_pod("worker-0", **state)])
        finding = diagnose(job, tail)[0]
        assert finding.cause == ("connection" if state is runs else "left-early")
        assert note in finding.message


def test_a_finished_rank_does_not_join_a_new_rendezvous(snapshot, make_pod):
    reason = Reason(138, 0, "PeerLost", "2 of 3 came", culprits=(1,)).encode()
    master = make_pod("master-0", "Failed", terminated=ended(138, reason))
    done = make_pod("worker-0", "Succeeded", terminated={"exitCode": 0})
    finding = diagnose(snapshot("Failed", pods=[master, done]), {})[0]
    assert (finding.cause, finding.replica) == ("left-early", "worker-0")
    assert finding.message.startswith("worker-0 (rank 1) had ended with exit code 0")
    assert finding.next_step.startswith("submit the job again")


def test_a_deleted_pod_is_explained_by_its_events(snapshot, make_pod):
    reason = Reason(1, 2, "ValueError", "long " * 300).encode()
    text = f"Error pod job-worker-1 container pytorch exitCode: 1 terminated message: {reason}"
    for message in (text, text[:1024]):  # the apiserver keeps so much
        event = {"message": message, "reason": "Error", "lastTimestamp": "2026-01-01T00:05:00Z"}
        (finding,) = diagnose(snapshot("Failed", events=[event]), {})
        assert finding.cause == "crash"
        assert finding.replica == "worker-1"
        assert finding.message.startswith("worker-1, rank 2: exit code 1: ValueError: long long")


@pytest.mark.parametrize("size", range(150, 200))
def test_a_report_may_be_cut_anywhere(snapshot, make_pod, size):
    reason = Reason(1, 2, "ValueError", '\u4e2d\\"' * 50).encode()
    text = f"Error pod job-worker-1 container pytorch exitCode: 1 terminated message: {reason}"
    event = {"message": text[:size], "reason": "Error", "lastTimestamp": "2026-01-01T00:05:00Z"}
    (finding,) = diagnose(snapshot("Failed", events=[event]), {})
    assert finding.cause == "crash"


@pytest.mark.parametrize("numbers", ['9999, "rank": 1', '1, "rank": 99999999'])
def test_a_cut_report_that_no_container_can_have_written(snapshot, numbers):
    note = f'{{"exit_code": {numbers}, "type": "ValueError", "message": "forged'
    text = f"Error pod job-worker-1 container pytorch exitCode: 1 terminated message: {note}"
    event = {"message": text, "reason": "Error", "lastTimestamp": "2026-01-01T00:05:00Z"}
    (finding,) = diagnose(snapshot("Failed", events=[event]), {})
    assert finding.message.startswith("worker-1: exit code 1")


def test_a_newer_end_of_a_replica_counts(snapshot, make_pod):
    pod = make_pod("master-0", "Failed", terminated=ended(139, at="2026-01-01T00:08:00Z"))
    text = "Error pod job-master-0 container pytorch exitCode: 1 terminated message: old"
    event = {"message": text, "reason": "Error", "lastTimestamp": "2026-01-01T00:05:00Z"}
    (finding,) = diagnose(snapshot("Failed", pods=[pod], events=[event]), {})
    assert finding.cause == "killed"


def test_a_running_job_names_the_cause_of_its_restart(snapshot, make_pod):
    pods = [
        make_pod("master-0", running={}),
        make_pod("worker-0", restarts=1, running={}, last=ended(137)),
        make_pod("worker-1", running={}),
    ]
    (finding,) = diagnose(snapshot("Running", pods=pods), {})
    assert finding.cause == "killed"


def test_runtime_events_are_not_output(snapshot, make_pod):
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
def test_any_output_gives_one_finding(code, message, why, tail):
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


# --- what a cluster shows; recorded jobs are in test_recorded.py

NOW = datetime(2026, 1, 1, 0, 10, tzinfo=UTC)


def about(kind, name, reason, message, *, at="2026-01-01T00:05:00Z", uid=""):
    subject = {"kind": kind, "name": name, **({"uid": uid} if uid else {})}
    return {
        "kind": "Event",
        "involvedObject": subject,
        "reason": reason,
        "message": message,
        "lastTimestamp": at,
    }


def pending(make_pod, replica, reason="", message="", **state):
    pod = make_pod(replica, "Pending", **state)
    if reason:
        del pod["spec"]["nodeName"]
        pod["status"] = {
            "phase": "Pending",
            "conditions": [
                {
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": reason,
                    "message": message,
                    "lastTransitionTime": "2026-01-01T00:09:00Z",
                }
            ],
        }
    return pod


SHORT = (
    "0/4 nodes are available: 4 Insufficient nvidia.com/gpu. preemption: 0/4 nodes are available"
)


def test_the_same_problem_of_many_replicas_is_one_finding(snapshot, make_pod):
    replicas = {"Master": 1, "Worker": 1200}
    state = {"waiting": {"reason": "ErrImagePull", "message": "x: not found"}}
    names = ["master-0", *(f"worker-{n}" for n in range(1200))]
    pods = [make_pod(name, "Pending", **copy.deepcopy(state)) for name in names]
    pods[3] = make_pod("worker-2", running={})
    sick = snapshot("Created", pods=pods, replicas=replicas)
    (finding,) = diagnose(sick, {}, now=NOW)
    assert finding.message.startswith("master-0, worker-0 and 1198 more: there is no image")
    assert len(finding.replicas) == 1200
    assert finding.as_dict()["replicas"][-1] == "worker-1199"


def test_pod_identifiers_do_not_split_a_finding(snapshot, make_pod):
    pods = []
    for name in ("master-0", "worker-0", "worker-1"):
        note = f'container has runAsNonRoot (pod: "job-{name}_ns({uuid.uuid4()})", container: x)'
        waiting = {"reason": "CreateContainerConfigError", "message": note}
        pods.append(make_pod(name, "Pending", waiting=waiting))
    (finding,) = diagnose(snapshot("Created", pods=pods), {}, now=NOW)
    assert finding.replicas == ("master-0", "worker-0", "worker-1")
    assert finding.message.endswith("container has runAsNonRoot")


def test_names_of_pods_do_not_split_a_finding(snapshot, make_pod):
    """Pods of an Indexed Job end with five random characters."""
    pods, events = [], []
    for replica, name in (("master-0", "job-0-x7k2p"), ("worker-0", "job-1-9fbzq")):
        pods.append(make_pod(replica, "Pending"))
        pods[-1]["metadata"] |= {"name": name, "uid": name}
        note = f'failed to set up network: plugin type="calico" failed: pod "ns_{name}"'
        events.append(about("Pod", name, "FailedCreatePodSandBox", note, uid=name))
    state = snapshot("Created", pods=pods, events=events, replicas={"Master": 1, "Worker": 1})
    (finding,) = diagnose(state, {}, now=NOW)
    assert finding.replicas == ("master-0", "worker-0")


def node(name, labels=None, **allocatable):
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": labels or {}},
        "status": {
            "allocatable": allocatable,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


@pytest.mark.parametrize(
    ("asked", "note", "step"),
    [
        (
            {"cpu": "500"},
            "cpu (it asks for 501, and the largest node has 2)",
            "waiting will not help: lower resources.cpu, or use more, smaller replicas",
        ),
        (
            {"memory": "4Ti"},
            "memory (it asks for 4Ti, and the largest node has 8Gi)",
            "waiting will not help: lower resources.memory,",
        ),
        (
            {"cpu": "1"},
            "cpu free (it asks for 2)",
            "lower resources.cpu, or wait until others have ended",
        ),
        (
            {"example.com/gpu": "8"},
            "example.com/gpu free (it asks for 8): there is 1 node of example.com/gpu with 4",
            "no node is that large: at most 4 a replica",
        ),
    ],
)
def test_a_request_larger_than_any_node(snapshot, make_pod, asked, note, step):
    (what,) = asked
    message = f"0/1 nodes are available: 1 Insufficient {what}. preemption: 0/1 nodes"
    pod = pending(make_pod, "master-0", "Unschedulable", message)
    main = {"name": "pytorch", "resources": {"requests": asked}}
    sidecar = {"name": "proxy", "resources": {"requests": {"cpu": "1"}}}
    pod["spec"]["containers"] = [main, sidecar]
    there = [node("node-0", **{"cpu": "2", "memory": "8Gi", "example.com/gpu": "4"})]
    sick = snapshot("Created", pods=[pod], replicas={"Master": 1})
    (finding,) = diagnose(sick, {}, there, now=NOW)
    only = "master-0: the only node does not take it: 1 has too little"
    assert finding.message == f"{only} {note}, for 60 s"
    assert finding.next_step.startswith(step)
    (unknown,) = diagnose(sick, {}, now=NOW)  # where nodes may not be read
    assert "wait until others have ended" in unknown.next_step


def test_gpus_in_use_are_not_free(snapshot, make_pod):
    waiting = pending(make_pod, "worker-1", "Unschedulable", SHORT)
    gpus = {"resources": {"limits": {"nvidia.com/gpu": "4"}}}
    waiting["spec"]["containers"] = [{"name": "pytorch", **gpus}]
    nodes = [
        node(f"node-{n}", {"nvidia.com/gpu.product": "H100"}, **{"nvidia.com/gpu": "4"})
        for n in range(4)
    ]
    nodes[3]["spec"] = {"unschedulable": True}
    other = {
        "kind": "Pod",
        "metadata": {"name": "other"},
        "spec": {
            "nodeName": "node-0",
            "containers": [{"resources": {"limits": {"nvidia.com/gpu": 3}}}],
        },
        "status": {"phase": "Running"},
    }
    pods = [make_pod("master-0", running={}), make_pod("worker-0", running={}), waiting]
    sick = snapshot("Running", pods=pods)
    (finding,) = diagnose(sick, {}, [*nodes, other], now=NOW)
    assert finding.message == (
        "worker-1: none of 4 nodes takes it: 4 have too little nvidia.com/gpu free (it asks for 4):"
        " there are 4 nodes of H100 with 4, 9 free in all, for 60 s"
    )
    assert "meanwhile 2 replicas hold what they have" in finding.next_step


def test_a_gate_and_the_reasons_of_other_schedulers(snapshot, make_pod):
    gated = pending(make_pod, "master-0", "SchedulingGated", "held")
    gated["spec"]["schedulingGates"] = [{"name": "queue.example/topology"}]
    gang = pending(make_pod, "worker-0", "Unschedulable", "3/4 tasks in gang unschedulable")
    cordoned = pending(
        make_pod,
        "worker-1",
        "Unschedulable",
        "0/2 nodes are available: 1 Too many pods, 1 node(s) were unschedulable. no new claims to"
        " deallocate, preemption: not helpful",
    )
    found = diagnose(snapshot("Created", pods=[gated, gang, cordoned]), {}, now=NOW)
    note = [finding.message for finding in found]
    assert "master-0: it is held back by scheduling gates: queue.example/topology, for 60 s" in note
    assert "worker-0: no node takes it: 3/4 tasks in gang unschedulable, for 60 s" in note
    assert any("1 is full of pods; 1 is cordoned" in text for text in note)


def test_a_silent_operator(snapshot, make_pod):
    new = snapshot()
    created = datetime(2026, 1, 1, tzinfo=UTC)
    (waits,) = diagnose(new, {}, now=created + timedelta(seconds=2))
    assert (waits.cause, waits.message) == (
        "waiting",
        "the job has no pods yet, 2 s after it was created",
    )
    deployment = {
        "kind": "Deployment",
        "metadata": {"name": "training-operator", "namespace": "kubeflow"},
        "spec": {"replicas": 1},
        "status": {},
    }
    (finding,) = diagnose(new, {}, [deployment], now=created + timedelta(seconds=9))
    assert finding.cause == "operator-silent"
    assert "not touched the job in 9 s" in finding.message
    assert "kubeflow/training-operator has 0 of 1 pods ready" in finding.message

    lost = snapshot("Running", pods=[make_pod("master-0", running={}), make_pod("worker-0")])
    (finding,) = diagnose(lost, {}, now=NOW)
    assert (finding.cause, finding.replicas) == ("operator-silent", ("worker-1",))
    killing = about("Pod", "job-worker-1", "Killing", "Stopping", at="2026-01-01T00:09:55Z")
    assert diagnose(Snapshot(lost.job, lost.pods, [killing]), {}, now=NOW) == []
    assert diagnose(lost, {}, now=created + timedelta(minutes=9, seconds=20)) == []


def test_a_past_refusal_is_not_reported(snapshot, make_pod):
    quota = 'Error creating: pods "job-worker-1" is forbidden: exceeded quota: q, requested: '
    quota += "requests.nvidia.com/gpu=2, used: requests.nvidia.com/gpu=7, limited: "
    quota += "requests.nvidia.com/gpu=8"
    refusal = about("PyTorchJob", "job", "FailedCreatePod", quota)
    there = [make_pod("master-0", running={}), make_pod("worker-0", running={})]
    sick = snapshot("Running", pods=there, events=[refusal])
    (finding,) = diagnose(sick, {}, now=NOW)
    assert finding.message == (
        "worker-1: the namespace's quota 'q' has no room: requests.nvidia.com/gpu 2 asked, 7 of 8"
        " used"
    )
    well = snapshot("Running", pods=[*there, make_pod("worker-1", running={})], events=[refusal])
    assert diagnose(well, {}, now=NOW) == []
    made = about(
        "PyTorchJob", "job", "SuccessfulCreatePod", "Created pod: job-worker-1",
        at="2026-01-01T00:09:50Z",
    )  # fmt: skip
    again = snapshot("Running", pods=there, events=[refusal, made])
    assert diagnose(again, {}, now=NOW) == []


@pytest.mark.parametrize(
    ("note", "cause", "words"),
    [
        (
            'object is being deleted: pods "job-master-0" already exists',
            "name-taken",
            "still being",
        ),
        ('pods "job-master-0" already exists', "name-taken", "job-master-0 exists already"),
        ('admission webhook "x.y" denied the request: no', "webhook", "'x.y' refuses the pod: no"),
        ('pods "job-master-0" is forbidden: no PriorityClass with name p', "refused", "PriorityCl"),
    ],
)
def test_refusals(snapshot, note, cause, words):
    event = about("PyTorchJob", "job", "FailedCreatePod", f"Error creating: {note}")
    (finding,) = diagnose(snapshot(events=[event]), {}, now=NOW)
    assert finding.cause == cause
    assert words in finding.message


def test_the_newest_refusal_of_a_pod_counts(snapshot):
    taken = 'Error creating: pods "job-master-0" already exists'
    going = 'Error creating: object is being deleted: pods "job-master-0" already exists'
    events = [
        about("PyTorchJob", "job", "FailedCreatePod", taken),
        about("PyTorchJob", "job", "FailedCreatePod", going, at="2026-01-01T00:05:01Z"),
    ]
    (finding,) = diagnose(snapshot(events=events), {}, now=NOW)
    assert "of an earlier job, is still being deleted" in finding.message


def test_a_deadline_that_the_operator_has_not_noticed(snapshot, make_pod):
    pods = [make_pod(name, running={}) for name in ("master-0", "worker-0", "worker-1")]
    late = snapshot("Running", pods=pods, startTime="2026-01-01T00:06:00Z")
    (finding,) = diagnose(late, {}, now=NOW)
    assert finding.cause == "deadline"
    assert "its deadline of 60 s passed 3 min ago" in finding.message
    assert "kubectl label pytorchjob job -n ns" in finding.next_step
    assert diagnose(late, {}, now=datetime(2026, 1, 1, 0, 7, 2, tzinfo=UTC)) == []


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("the referenced runtime is not supported", "failed"),
        ("jobset failed due to reaching max number of restarts", "restart-limit"),
    ],
)
def test_a_failure_without_pods_has_the_words_of_its_controller(snapshot, message, cause):
    (finding,) = diagnose(snapshot(f"Failed:Why:{message}"), {}, now=NOW)
    assert finding.cause == cause
    assert message in finding.message
    assert finding.next_step


def test_the_cause_of_a_deadline_comes_first(snapshot, make_pod):
    waiting = {"reason": "ErrImagePull", "message": "x: not found"}
    pods = [make_pod("master-0", "Pending", waiting=waiting)]
    failed = snapshot(f"{PAST} it was active longer than specified deadline", pods=pods)
    causes = [finding.cause for finding in diagnose(failed, {}, now=NOW)]
    assert causes == ["image-missing", "deadline", "leftover"]
    just_now = datetime(2026, 1, 1, 0, 9, 5, tzinfo=UTC)  # 5 s after: its pods may still be ending
    assert [f.cause for f in diagnose(failed, {}, now=just_now)] == ["image-missing", "deadline"]
    killed = make_pod("master-0", "Failed", terminated=ended(143))
    ended_by_it = snapshot(f"{PAST} it was active longer than specified deadline", pods=[killed])
    assert [f.cause for f in diagnose(ended_by_it, {}, now=NOW)] == ["deadline"]


def test_the_pull_error_of_an_old_kubelet_is_in_an_event_alone(snapshot, make_pod):
    waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "r/x:1"'}
    pod = make_pod("worker-0", "Pending", waiting=waiting)
    pod["metadata"]["uid"] = "p"
    pod["spec"]["containers"] = [{"name": "pytorch", "image": "r/x:1"}]
    note = (
        'Failed to pull image "r/x:1": rpc error: code = Unknown desc = failed to pull and unpack'
        ' image "r/x:1": failed to resolve reference "r/x:1": dial tcp: lookup r: no such host'
    )
    event = about("Pod", "job-worker-0", "Failed", note, uid="p")
    sick = snapshot("Created", pods=[pod], events=[event], replicas={"Worker": 1})
    (finding,) = diagnose(sick, {}, now=NOW)
    assert finding.cause == "registry"
    assert finding.message.endswith("from its node: dial tcp: lookup r: no such host")
    other = about("Pod", "job-worker-0", "Failed", note, uid="of a pod before it")
    sick = snapshot("Created", pods=[pod], events=[other], replicas={"Worker": 1})
    assert diagnose(sick, {}, now=NOW)[0].cause == "image"


def test_endless_recreation_of_a_pod_is_reported(snapshot, make_pod):
    job = snapshot("Running", pods=[make_pod("worker-0", running={})], replicas={"Worker": 1})
    job.job["spec"]["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] = "ExitCode"
    note = "Pod: ns.job-worker-0 exited with code 137"
    event = {**about("PyTorchJob", "job", "ExitedWithCode", note), "count": 34}
    (finding,) = diagnose(Snapshot(job.job, job.pods, [event]), {}, now=NOW)
    assert finding.message.endswith("it is running again; its pod was recreated 34 times")
    assert "policy.max_restarts" in finding.next_step
    assert "or one of its processes ran out of memory" in finding.next_step


def gone(replica, reason, message, at):
    """An Event about a Pod that is there no more."""
    return about("Pod", f"job-{replica}", reason, message, at=at, uid=f"old {replica}")


TAINT = gone("worker-0", "TaintManagerEviction", "Marking for deletion", "2026-01-01T00:05:00Z")
KILLING = gone("worker-0", "Killing", "Stopping container pytorch", "2026-01-01T00:05:01Z")
KILLED = {
    **about("PyTorchJob", "job", "ExitedWithCode", "Pod: ns.job-worker-0 exited with code 137"),
    "lastTimestamp": "2026-01-01T00:05:31Z",
}


@pytest.mark.parametrize(
    ("events", "cause", "what"),
    [
        ([TAINT, KILLING, KILLED], "evicted", "its node got a taint that it does not tolerate"),
        ([KILLING, TAINT, KILLED], "evicted", "its node got a taint that it does not tolerate"),
        ([KILLING, KILLED], "pod-deleted", "its pod was deleted while it ran"),
    ],
)
def test_why_a_pod_left_its_node_is_reported_with_its_age(snapshot, make_pod, events, cause, what):
    pods = [make_pod("worker-0", running={})]
    for pod in (make_pod("worker-0", "Pending", waiting={"reason": "ContainerCreating"}), *pods):
        pod["metadata"] |= {"creationTimestamp": KILLED["lastTimestamp"], "uid": "new"}
        job = snapshot("Running", pods=[pod], events=events, replicas={"Worker": 1})
        (finding,) = diagnose(job, {}, now=NOW)
        assert finding.cause == cause
        again = "; it is running again" if pod is pods[0] else ""
        assert finding.message in {f"worker-0: {what}, {n} min ago{again}" for n in (4, 5)}
        assert "resources.memory" not in finding.next_step


def test_the_end_of_an_earlier_jobs_pod_is_not_this_jobs(snapshot):
    note = 'Error creating: object is being deleted: pods "job-worker-0" already exists'
    refused = about("PyTorchJob", "job", "FailedCreatePod", note)
    made = about("PyTorchJob", "job", "SuccessfulCreatePod", "Created pod: job-worker-0")
    job = snapshot("Created", events=[refused, KILLING], replicas={"Worker": 1})
    assert [one.cause for one in diagnose(job, {}, now=NOW)] == ["name-taken"]
    job = snapshot("Created", events=[made, refused, KILLING], replicas={"Worker": 1})
    assert "pod-deleted" in [one.cause for one in diagnose(job, {}, now=NOW)]


def test_a_past_problem_hides_no_newer_one(snapshot, make_pod):
    crash = ended(1, Reason(1, 0, "ValueError", "no").encode(), at="2026-01-01T00:08:00Z")
    pod = make_pod("worker-0", "Failed", terminated=crash)
    pod["metadata"] |= {"creationTimestamp": "2026-01-01T00:05:40Z", "uid": "new"}
    events = [TAINT, KILLING, KILLED]
    job = snapshot("Failed:x:y", pods=[pod], events=events, replicas={"Worker": 1})
    assert "crash" in [one.cause for one in diagnose(job, {}, now=NOW)]
    # It runs again, and another replica cannot be pulled.
    absent = {"reason": "ErrImagePull", "message": "x: not found"}
    pods = [make_pod("master-0", "Pending", waiting=absent), make_pod("worker-0", running={})]
    job = snapshot("Running", pods=pods, events=events, replicas={"Master": 1, "Worker": 1})
    assert [one.cause for one in diagnose(job, {}, now=NOW)] == ["image-missing", "evicted"]


def test_the_newest_displacement_comes_first(snapshot, make_pod):
    late = gone(
        "worker-1", "Evicted", "The node was low on resource: memory", KILLED["lastTimestamp"]
    )
    pods = [make_pod(name, "Pending", waiting={"reason": "x"}) for name in ("worker-0", "worker-1")]
    job = snapshot("Running", pods=pods, events=[TAINT, late], replicas={"Worker": 2})
    assert [one.replica for one in diagnose(job, {}, now=NOW)] == ["worker-1", "worker-0"]


def test_pods_that_the_operator_deletes_are_no_problem(snapshot, make_pod):
    pods = [make_pod("worker-0", running={})]
    events = [KILLING, KILLED]
    suspended = snapshot("Suspended", events=events, replicas={"Worker": 1})
    assert [one.cause for one in diagnose(suspended, {}, now=NOW)] == ["suspended"]
    resumed = {"startTime": "2026-01-01T00:07:00Z", "replicas": {"Worker": 1}}
    job = snapshot("Running", pods=pods, events=[KILLING], **resumed)
    job.job["spec"]["runPolicy"] = {}
    assert diagnose(job, {}, now=NOW) == []


def test_a_deleted_pods_exit_code_is_no_failure(snapshot, make_pod):
    pod = make_pod("worker-0", dying=True, terminated=ended(137))
    job = snapshot("Running", pods=[pod], replicas={"Worker": 1})
    (finding,) = diagnose(job, {}, now=NOW)
    assert finding.message.startswith("worker-0: its pod is being ended")


def test_refusals_that_differ_by_the_replica_s_name_are_one_finding(snapshot):
    note = 'Error creating: pods "job-worker-{}" is forbidden: no PriorityClass with name p'
    events = [about("PyTorchJob", "job", "FailedCreatePod", note.format(n)) for n in range(9)]
    (finding,) = diagnose(snapshot(events=events, replicas={"Worker": 9}), {}, now=NOW)
    assert finding.message.startswith("worker-0, worker-1 and 7 more: the apiserver refuses it")
    assert len(finding.replicas) == 9


def test_output_that_differs_by_rank_and_address_is_one_finding(snapshot, make_pod):
    names = ["master-0", "worker-0", "worker-1"]
    pods = [make_pod(name, running={}) for name in names]
    note = "pod:3:3 [4] x.c:1 NCCL WARN NET/IB : Got completion from peer 10.2.2.{}<5486{}> with"
    logs = {name: [f"{note.format(n, n)} status=12 opcode=0"] for n, name in enumerate(names)}
    (finding,) = diagnose(snapshot("Running", pods=pods), logs, now=NOW)
    assert finding.replicas == tuple(names)


@pytest.fixture
def awaiting(make_pod):
    """Workers whose init container looks for the Master's name."""

    def make(*names):
        workers = [make_pod(name, "Pending") for name in names]
        for worker in workers:
            worker["spec"]["initContainers"] = [{"name": "init-pytorch", "image": "alpine"}]
            status = {"name": "init-pytorch", "state": {"running": {}}}
            worker["status"]["initContainerStatuses"] = [status]
        return workers

    return make


def test_workers_that_wait_for_a_failing_master_are_left_out(snapshot, make_pod, awaiting):
    workers = awaiting("worker-0", "worker-1")
    for master in (
        pending(make_pod, "master-0", "Unschedulable", SHORT),
        make_pod("master-0", "Pending", waiting={"reason": "ErrImagePull", "message": "no"}),
        make_pod("master-0", waiting={"reason": "CrashLoopBackOff"}, last=ended(1, "no")),
    ):
        (finding,) = diagnose(snapshot("Created", pods=[master, *workers]), {}, now=NOW)
        assert finding.replica == "master-0"
        assert finding.cause in {"unschedulable", "image", "crash"}


def test_workers_wait_for_a_master_that_is_not_ready(snapshot, make_pod, awaiting):
    master = make_pod("master-0", running={})
    master["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    pods = [master, *awaiting("worker-0", "worker-1")]
    (finding,) = diagnose(snapshot("Created", pods=pods), {}, now=NOW)
    assert finding.cause == "master-awaited"
    assert finding.message == (
        "worker-0 and worker-1: its init container waits until the name job-master-0 can be found;"
        " the Master is not ready"
    )


def test_an_unresolved_name_is_reported_although_the_master_had_crashed(
    snapshot, make_pod, awaiting
):
    """It runs again: its crash does not explain that its name cannot be found now."""
    master = make_pod("master-0", restarts=1, last=ended(1, "no"), running={})
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:06:00Z"}
    master["status"]["conditions"] = [ready]
    pods = [master, *awaiting("worker-0", "worker-1")]
    found = diagnose(snapshot("Running", pods=pods), {}, now=NOW)
    assert [one.cause for one in found] == ["master-awaited", "crash"]
    assert "check the cluster's DNS" in found[0].next_step
    assert found[1].message == "master-0: exit code 1: no, 5 min ago; it is running again"


def test_what_a_slow_job_waits_for(snapshot, make_pod):
    pulling = make_pod("master-0", "Pending", waiting={"reason": "ContainerCreating"})
    pulling["metadata"]["uid"] = "m"
    event = about("Pod", "job-master-0", "Pulling", 'Pulling image "r/x:1"', uid="m")
    dying = make_pod("worker-0", dying=True, running={})
    state = snapshot("Created", pods=[pulling, dying, make_pod("worker-1")], events=[event])
    found = diagnose(state, {}, now=NOW)
    assert [finding.cause for finding in found] == ["waiting", "waiting"]
    assert found[0].message == "master-0: its node pulls the image r/x:1, for 5 min"
    assert found[1].message == "worker-0: its pod is being ended, for 10 min"


def test_a_lost_node_and_its_pods(snapshot, make_pod):
    pods = [make_pod(name, running={}) for name in ("master-0", "worker-0", "worker-1")]
    pods[2]["spec"]["nodeName"] = "node-2"
    gone = {"kind": "Status", "details": {"kind": "nodes", "name": "node-2"}, "reason": "NotFound"}
    (finding,) = diagnose(snapshot("Running", pods=pods), {}, [gone], now=NOW)
    assert finding.message == "worker-1: its node node-2 is gone from the cluster"

    target = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}
    pods[2] = make_pod("worker-1", "Failed", terminated=ended(137))
    pods[2]["status"]["conditions"] = [{**target, "message": "PodGC: node no longer exists"}]
    (finding,) = diagnose(snapshot("Restarting", pods=pods), {}, now=NOW)
    assert (finding.cause, finding.replica) == ("evicted", "worker-1")


def test_of_a_recreated_pod_only_the_exit_code_is_known(snapshot, make_pod):
    pods = [make_pod(name, running={}) for name in ("master-0", "worker-0", "worker-1")]
    events = [
        about("PyTorchJob", "job", "ExitedWithCode", f"Pod: ns.job-worker-1 exited with code {n}")
        for n in (0, 143, 137, 0)
    ]
    (finding,) = diagnose(snapshot("Running", pods=pods, events=events), {}, now=NOW)
    assert finding.message == "worker-1: ended by SIGKILL, 5 min ago; it is running again"
    sidecar = "Error pod job-worker-1 container proxy exitCode: 1 terminated message: x"
    events = [about("PyTorchJob", "job", "Error", sidecar)]
    assert diagnose(snapshot("Running", pods=pods, events=events), {}, now=NOW) == []


def test_the_log_of_an_init_container_is_that_of_an_existing_replica(snapshot, make_pod):
    pods = [make_pod(name, "Pending") for name in ("master-0", "worker-0")]
    for pod in pods:
        pod["spec"]["initContainers"] = [{"name": "mine"}]
        state = {"terminated": ended(6)}
        pod["status"]["initContainerStatuses"] = [{"name": "mine", "state": state}]
    sick = snapshot("Created", pods=pods, replicas={"Master": 1, "Worker": 1})
    (finding,) = diagnose(sick, {}, now=NOW)
    assert finding.replicas == ("master-0", "worker-0")
    assert finding.next_step == "see what it wrote: kubectl logs -n ns job-master-0 -c mine"


def test_a_pod_is_called_by_its_own_name(snapshot, make_pod):
    """Pods of an Indexed Job are not named like its replicas."""
    pod = make_pod("worker-0", "Pending")
    pod["metadata"]["name"] = "job-1-x7k2p"
    pod["spec"]["initContainers"] = [{"name": "mine"}]
    state = {"name": "mine", "state": {"terminated": ended(6)}}
    pod["status"]["initContainerStatuses"] = [state]
    state = snapshot("Running", pods=[pod], replicas={"Worker": 1})
    (finding,) = diagnose(state, {}, now=NOW)
    assert finding.next_step.endswith("kubectl logs -n ns job-1-x7k2p -c mine")


@pytest.mark.parametrize(
    ("phase", "keeps", "end", "step"),
    [
        ("Running", [], "09:10", "wait: it has until the end of its grace period"),
        ("Running", [], "05:00", "kubectl delete pod --force -n ns job-worker-0 gives it up"),
        ("Running", ["x/keep"], "05:00", "its node node-1 has not ended it"),
        ("Succeeded", ["x/keep"], "05:00", "whoever set x/keep must remove it"),
    ],
)
def test_what_keeps_a_pod_that_is_being_deleted(snapshot, make_pod, phase, keeps, end, step):  # noqa: PLR0917 - fixtures
    pod = make_pod("worker-0", phase, dying=True, running={})
    pod["metadata"] |= {"finalizers": keeps, "deletionTimestamp": f"2026-01-01T00:{end}Z"}
    pods = [make_pod("master-0", running={}), pod]
    (finding,) = diagnose(
        snapshot("Running", pods=pods, replicas={"Master": 1, "Worker": 1}), {}, now=NOW
    )
    assert finding.message.startswith("worker-0: its pod is being ended")
    assert step in finding.next_step


def test_a_sidecar_keeps_a_pod_from_ending(snapshot, make_pod):
    pod = make_pod("master-0", terminated=ended(0))
    proxy = {"name": "istio-proxy", "state": {"running": {}}}
    pod["status"]["containerStatuses"].append(proxy)
    state = snapshot("Running", pods=[pod], replicas={"Master": 1})
    (finding,) = diagnose(state, {}, now=NOW)
    assert finding.cause == "sidecar"
    assert finding.message.endswith("'istio-proxy' keeps the pod running, for 5 min")
    just_now = datetime(2026, 1, 1, 0, 5, 3, tzinfo=UTC)
    assert diagnose(state, {}, now=just_now) == []


@pytest.mark.parametrize("state", [{"waiting": {"reason": "CrashLoopBackOff"}}, {"running": {}}])
def test_a_training_that_succeeds_again_and_again(snapshot, make_pod, state):
    pods = [make_pod("master-0", restarts=3, last=ended(0, reason="Completed"), **state)]
    (finding,) = diagnose(snapshot("Running", pods=pods, replicas={"Master": 1}), {}, now=NOW)
    assert finding.cause == "started-again"
    assert "never succeeds" in finding.message
    pods[0]["spec"]["restartPolicy"] = "OnFailure"
    assert diagnose(snapshot("Running", pods=pods, replicas={"Master": 1}), {}, now=NOW) == []


def test_a_pod_that_its_node_rejected(snapshot, make_pod):
    pod = make_pod("worker-0", "Failed")
    pod["status"] = {
        "phase": "Failed",
        "reason": "UnexpectedAdmissionError",
        "message": "Allocate failed due to no healthy devices present",
    }
    (finding,) = diagnose(snapshot("Failed:x:y", pods=[pod]), {}, now=NOW)
    assert finding.cause == "node-refused"
    assert "no healthy devices" in finding.message


def doomed(job, *finalizers):
    job.job["metadata"] |= {"deletionTimestamp": "2026-01-01T00:09:14Z"}
    job.job["metadata"]["finalizers"] = list(finalizers)
    return job


def test_the_operator_is_not_silent_about_a_job_that_is_being_deleted(snapshot, make_pod):
    """The operator leaves such a job alone: that is not its silence."""
    (finding,) = diagnose(doomed(snapshot("Running"), "example.com/keep"), {}, now=NOW)
    assert finding.cause == "deleting"
    assert finding.message == (
        "the job is being deleted; it waits for its finalizers: example.com/keep, for 46 s"
    )
    assert "whoever set example.com/keep must remove it" in finding.next_step
    assert "kubectl get pytorchjob job -n ns -o yaml" in finding.next_step


def test_pods_of_a_job_that_is_being_deleted_are_what_it_waits_for(snapshot, make_pod):
    pods = [make_pod("master-0", dying=True, running={})]
    job = doomed(snapshot("Running", pods=pods), "foregroundDeletion")
    deletion, pod = diagnose(job, {}, now=NOW)
    assert "wait until its pods have ended (kubectl get pods -n ns -l" in deletion.next_step
    assert pod.message == "master-0: its pod is being ended, for 10 min"


def test_a_failed_job_kept_by_a_finalizer_has_both_causes(snapshot, make_pod):
    pods = [make_pod("master-0", "Failed", terminated=ended(1, "ValueError: no"))]
    found = diagnose(doomed(snapshot("Failed", pods=pods), "example.com/keep"), {}, now=NOW)
    assert [one.cause for one in found] == ["crash", "deleting"]


# --- training that is not what it seems


def left(rank, *culprits, step=9):
    """What the agent says of a rank that waited for ranks that were done."""
    return Reason(138, rank, "Left", "they had ended", "t.py:3", culprits=culprits, step=step)


def test_a_failed_replica_of_a_job_that_succeeded(snapshot, make_pod):
    master = make_pod("master-0", "Succeeded", terminated=ended(0, at="2026-01-01T00:08:50Z"))
    lost = Reason(138, 1, "PeerLost", "rank 0 is gone", time=1767226131.0).encode()  # 00:08:51
    for reason, words in (
        (lost, "master-0 (rank 0) had ended with exit code 0, and worker-0, rank 1 still waited"),
        (left(1, 0).encode(), "rank 0 had ended with exit code 0, and worker-0, rank 1 still"),
    ):
        end = ended(138, reason, at="2026-01-01T00:08:51Z")
        event = {
            "message": f"Error pod job-worker-0 container pytorch exitCode: 138 terminated message:"
            f" {reason}",
            "lastTimestamp": "2026-01-01T00:08:51Z",
        }
        worker = make_pod("worker-0", terminated=end)
        for pods, events in (([master, worker], []), ([master], [event]), ([], [event])):
            job = snapshot(
                "Succeeded", pods=pods, events=events, replicas={"Master": 1, "Worker": 1}
            )
            finding = diagnose(job, {}, now=NOW)[0]
            assert finding.message.startswith(f"the job succeeded, but {words}")
            assert (finding.cause, finding.replica) == ("left-early", "master-0")
            assert "same number of steps" in finding.next_step


def test_failures_before_a_success_are_not_reported(snapshot, make_pod):
    old = "Error pod job-worker-0 container pytorch exitCode: 1 terminated message: no"
    events = [{"message": old, "lastTimestamp": "2026-01-01T00:05:00Z"}, TAINT, KILLING]
    master = make_pod("master-0", "Succeeded", terminated=ended(0))
    well = make_pod("worker-0", "Succeeded", restarts=1, terminated=ended(0), last=ended(1))
    cleaned = make_pod("worker-0", dying=True, terminated=ended(143))
    for pods in ([master], [master, well], [master, cleaned]):
        job = snapshot("Succeeded", pods=pods, events=events, replicas={"Master": 1, "Worker": 1})
        assert diagnose(job, {}, now=NOW) == []


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_a_rank_that_ended_early_while_others_wait(snapshot, make_pod, nproc):
    done = make_pod("worker-0", "Succeeded", terminated=ended(0))
    pods = [make_pod("master-0", running={}), done]
    job = snapshot("Running", pods=pods, replicas={"Master": 1, "Worker": 1}, nproc=nproc)
    job.job["spec"]["runPolicy"] = {}
    (finding,) = diagnose(job, {}, now=NOW)
    ranks = "rank 1" if nproc == "1" else "ranks 2-3"
    assert finding.message.startswith(
        f"worker-0 ({ranks}) ended with exit code 0, 5 min ago, and master-0 still runs"
    )
    assert finding.cause == "left-early"
    assert "only evaluates or saves, wait" in finding.next_step
    assert diagnose(job, {}, now=datetime(2026, 1, 1, 0, 5, 20, tzinfo=UTC)) == []


def test_ranks_that_ended_early_are_one_finding(snapshot, make_pod):
    done = [make_pod(f"worker-{n}", "Succeeded", terminated=ended(0)) for n in range(5)]
    pods = [make_pod("master-0", running={}), *done]
    job = snapshot("Running", pods=pods, replicas={"Master": 1, "Worker": 5})
    job.job["spec"]["runPolicy"] = {}
    (finding,) = diagnose(job, {}, now=NOW)
    assert finding.message.startswith("worker-0 (rank 1), worker-1 (rank 2) and 3 more ended")
    assert len(finding.replicas) == 5


def test_all_replicas_that_ended_alike_are_concerned(snapshot, make_pod):
    """Also where the Master's agent tells of another replica's rank."""
    note = Reason(1, 2, "KeyError", "'x'").encode()
    pods = [make_pod("master-0", "Failed", terminated=ended(1, note))]
    (finding,) = diagnose(snapshot("Failed:x:y", pods=pods), {}, now=NOW)
    assert (finding.replica, finding.replicas) == ("worker-1", ("worker-1",))
    left = Reason(138, 1, "Left", "it waited for rank 0, which had ended with exit code 0: lost")
    left = replace(left, culprits=(0,), step=41).encode()
    pods = [make_pod(name, "Failed", terminated=ended(138, left)) for name in WORKERS]
    (finding,) = diagnose(snapshot("Succeeded", pods=pods), {}, now=NOW)
    assert finding.replicas == ("master-0", *WORKERS)
    assert finding.message == (
        "the job succeeded, but rank 0 had ended with exit code 0, and worker-0, rank 1 still"
        " waited for it after step 41: lost; 1 more ended with the same exit code"
    )
    twice = left.replace("it waited", "after rank 0 had ended with exit code 0: it waited")
    pods = [make_pod("master-0", "Failed", terminated=ended(138, twice))]
    (finding,) = diagnose(snapshot("Failed:x:y", pods=pods), {}, now=NOW)
    assert finding.message.endswith("still waited for it after step 41: lost")


@pytest.mark.parametrize(
    ("end", "tail"),
    [
        (ended(140, Reason(140, 0, "Hang", "all ranks wait in a collective").encode()), []),
        (
            ended(1),
            ["DistStoreError: Timed out after 6 seconds waiting for clients. 1/2 clients joined"],
        ),
        (
            ended(134),
            [
                (
                    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8,"
                    " OpType=ALLREDUCE, Numel=1) ran for 600020 milliseconds before"
                )
            ],
        ),
    ],
)
def test_an_early_end_explains_the_wait_of_other_ranks(snapshot, make_pod, end, tail):
    done = make_pod("worker-0", "Succeeded", terminated=ended(0, at="2026-01-01T00:04:00Z"))
    pods = [make_pod("master-0", "Failed", terminated=end), done]
    job = snapshot("Failed:x:y", pods=pods, replicas={"Master": 1, "Worker": 1})
    (finding,) = diagnose(job, {"master-0": tail}, now=NOW)
    assert (finding.cause, finding.replica) == ("left-early", "worker-0")
    late = make_pod("worker-0", "Succeeded", terminated=ended(0, at="2026-01-01T00:05:30Z"))
    job = snapshot("Failed:x:y", pods=[pods[0], late], replicas={"Master": 1, "Worker": 1})
    assert diagnose(job, {"master-0": tail}, now=NOW)[0].cause != "left-early"


@pytest.mark.parametrize("state", ["Succeeded", "Failed:x:y", "Running"])
def test_replicas_that_trained_alone(snapshot, make_pod, state):
    unmet = Reason(0, -1, "Unmet", "no process group").encode()
    master = make_pod("master-0", "Succeeded", terminated=ended(0, unmet))
    line = Event("unmet", {"world_size": 2, "replicas": 2}).encode()
    for pods, logs in (([master], {}), ([], {"master-0": [line]})):
        job = snapshot(state, pods=pods, replicas={"Master": 1, "Worker": 1})
        found = {one.cause: one for one in diagnose(job, logs, now=NOW)}
        assert "each of them trained alone" in found["no-group"].message


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_throughout(snapshot, make_pod, loss):
    def tail(*losses):
        events = (
            Event("progress", {"epoch": 1, "step": n, "loss": x}) for n, x in enumerate(losses)
        )
        return {"master-0": ["text", *(event.encode() for event in events)]}

    job = snapshot("Succeeded", replicas={"Master": 1})
    (finding,) = diagnose(job, tail(loss, loss), now=NOW)
    assert finding.cause == "nan-loss"
    assert finding.message.startswith(f"the loss has been {loss} since epoch 2, step 0")
    for fine in (tail(loss, 0.5), tail(loss, 1), tail(), tail("x"), tail(None), tail(0.5, loss)):
        assert diagnose(job, fine, now=NOW) == []
    (finding,) = diagnose(job, tail(loss, 0.5, loss, loss), now=NOW)  # it does not recover
    assert finding.message.startswith(f"the loss has been {loss} since epoch 2, step 2 or earlier")


def test_a_loss_that_a_loop_of_ones_own_logs_counts_too(snapshot):
    def tail(*losses):
        return {"master-0": [Event("metrics", {"epoch": 3, "loss": x}).encode() for x in losses]}

    job = snapshot("Succeeded", replicas={"Master": 1})
    (finding,) = diagnose(job, tail(0.5, float("nan"), float("nan")), now=NOW)
    assert finding.message.startswith("the loss has been nan since epoch 3 or earlier:")
    assert diagnose(job, tail(float("nan"), 0.5), now=NOW) == []


def claim(phase="Pending", **annotations):
    return {
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "data", "annotations": annotations},
        "status": {"phase": phase},
    }


def test_a_volume_without_a_provisioner_is_reported_although_the_scheduler_is_silent(
    snapshot, make_pod
):
    pod = make_pod("master-0", "Pending")
    del pod["spec"]["nodeName"]
    pod["spec"]["volumes"] = [{"name": "d", "persistentVolumeClaim": {"claimName": "data"}}]
    job = snapshot("Created", pods=[pod], replicas={"Master": 1})
    note = (
        "Waiting for a volume to be created either by the external provisioner 'csi.example' or"
        " manually by the system administrator."
    )
    event = about("PersistentVolumeClaim", "data", "ExternalProvisioning", note)
    (finding,) = diagnose(job, {}, [claim(), event], now=NOW)
    assert finding.cause == "volume-claim"
    assert finding.message.startswith("master-0: the claim 'data' has no volume: Waiting for a")
    assert "check whether the provisioner csi.example runs" in finding.next_step
    chosen = claim(**{"volume.kubernetes.io/selected-node": "node-3"})
    (finding,) = diagnose(job, {}, [chosen], now=NOW)
    assert "its volume is awaited on node node-3" in finding.message
    gave_up = 'running PreBind plugin "VolumeBinding": binding volumes: context deadline exceeded'
    later = pending(make_pod, "master-0", "SchedulerError", gave_up)
    later["spec"]["volumes"] = pod["spec"]["volumes"]
    retried = snapshot("Created", pods=[later], replicas={"Master": 1})
    (finding,) = diagnose(retried, {}, [claim(), event], now=NOW)
    assert finding.cause == "volume-claim"
    assert finding.message.startswith("master-0: the claim 'data' has no volume: Waiting for a")
    first = "waiting for first consumer to be created before binding"
    early = about("PersistentVolumeClaim", "data", "WaitForFirstConsumer", first)
    for related in ([claim("Bound"), event], [claim(), early], [claim()], []):
        (finding,) = diagnose(job, {}, related, now=NOW)
        assert finding.cause == "waiting"


@pytest.mark.parametrize(
    ("reasons", "cause"),
    [
        (["FailedMount"], "volume"),
        (["FailedMount", "FailedCreatePodSandBox"], "sandbox"),
        (["FailedCreatePodSandBox", "FailedMount"], "volume"),
        (["FailedMount", "Pulling"], "waiting"),
        (["FailedCreatePodSandBox", "Pulling"], "waiting"),
    ],
)
def test_a_step_of_the_kubelet_that_succeeded_later_is_no_cause(reasons, cause, snapshot, make_pod):
    pod = make_pod("master-0", "Pending", waiting={"reason": "ContainerCreating"})
    events = [
        about("Pod", "job-master-0", reason, "tried", at=f"2026-01-01T00:0{minute}:00Z")
        for minute, reason in enumerate(reasons)
    ]
    job = snapshot("Created", pods=[pod], events=events, replicas={"Master": 1})
    assert [finding.cause for finding in diagnose(job, {}, now=NOW)] == [cause]


@pytest.mark.parametrize(("count", "seconds"), [(1, 4), (2, 4), (1, 20)])
def test_a_mount_that_the_kubelet_has_not_retried_is_no_cause(count, seconds, snapshot, make_pod):
    pod = make_pod("master-0", "Pending", waiting={"reason": "ContainerCreating"})
    stamp = f"2026-01-01T00:09:{60 - seconds}Z"
    event = about("Pod", "job-master-0", "FailedMount", "no token", at=stamp) | {"count": count}
    job = snapshot("Created", pods=[pod], events=[event], replicas={"Master": 1})
    cause = "waiting" if (count, seconds) == (1, 4) else "volume"
    assert [finding.cause for finding in diagnose(job, {}, now=NOW)] == [cause]


def test_of_past_ends_the_newest_failure_is_reported(snapshot, make_pod):
    def again(name, code, message, at):
        reason = Reason(code, -1, "ValueError", message).encode()
        return make_pod(name, restarts=1, running={}, last=ended(code, reason, at=at))

    pods = [
        again("master-0", 1, "old", "2025-12-31T22:00:00Z"),
        again("worker-0", 1, "new", "2026-01-01T00:07:00Z"),
        again("worker-1", 138, "its peer", "2026-01-01T00:06:59Z"),
    ]
    (finding,) = diagnose(snapshot("Running", pods=pods), {}, now=NOW)
    assert (
        finding.message == "worker-0: exit code 1: ValueError: new, 3 min ago; it is running again"
    )


def test_a_lost_rank_is_the_cause_although_it_is_running_again(snapshot, make_pod):
    crash = Reason(1, 1, "ValueError", "the cause").encode()
    lost = Reason(138, 0, "PeerLost", "rank 1 is gone").encode()
    worker = make_pod("worker-0", restarts=1, running={}, last=ended(1, crash))
    waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
    master = make_pod("master-0", restarts=1, last=ended(138, lost), **waiting)
    counts = {"Master": 1, "Worker": 1}
    (finding,) = diagnose(snapshot("Running", pods=[master, worker], replicas=counts), {}, now=NOW)
    assert finding.message.startswith("worker-0, rank 1: exit code 1: ValueError: the cause")


@pytest.mark.parametrize("part", ["a.", "epoch ", "9%", "worker-", "Error ", "1.", "[a]: ", "a-"])
def test_lines_of_any_length_are_read_in_linear_time(part):
    """With a pattern that starts anew at each character this would take minutes."""
    text = part * 2**18
    assert without_replica(text)
    assert since_training([text, "last"])[-1] == "last"


@pytest.mark.parametrize("text", ["x" * 9000, "size mismatch\n" * 300])
@pytest.mark.parametrize("kind", ["ValueError", "OutOfMemoryError"])
def test_a_long_message_is_shortened(snapshot, make_pod, kind, text):
    end = ended(1, Reason(1, 0, kind, text, "main.py:3").encode())
    pods = [make_pod("master-0", "Failed", terminated=end)]
    (finding,) = diagnose(snapshot("Failed:x:y", pods=pods), {}, now=NOW)
    cut = "size" not in text or kind == "ValueError"  # a rule shows the line that it found
    assert ("..." in finding.message) == cut
    assert len(finding.message) < 600
    assert finding.message.count("\n") <= 5


@pytest.mark.parametrize("kind", ["Hang", "Hung"])
@pytest.mark.parametrize("culprits", [(), (1,)])
def test_no_timeout_helps_where_all_ranks_wait(snapshot, make_pod, kind, culprits):
    end = ended(140, Reason(140, 0, kind, "all ranks wait", culprits=culprits).encode())
    pods = [make_pod("master-0", "Failed", terminated=end)]
    (finding,) = diagnose(snapshot("Failed:x:y", pods=pods), {}, now=NOW)
    assert ("_timeout" in finding.next_step) == bool(culprits)
    assert ("the same order" in finding.next_step) != bool(culprits)


@pytest.mark.parametrize(
    ("reporter", "rank", "nproc", "replica"),
    [
        ("master-0", 1, "1", "worker-0"),
        ("worker-0", 0, "1", "master-0"),
        ("worker-0", 1, "1", "worker-0"),
        ("master-0", 1, "auto", "master-0"),
    ],
)
def test_a_failure_is_that_of_its_rank_whichever_replica_reports_it(  # noqa: PLR0917 - fixtures
    snapshot, make_pod, reporter, rank, nproc, replica
):
    """Where the number of processes is not known, nor are the ranks of a replica."""
    crash = Reason(1, rank, "ValueError", "the cause").encode()
    pod = make_pod(reporter, "Failed", terminated=ended(1, crash))
    counts = {"Master": 1, "Worker": 1}
    job = snapshot("Failed:x:y", pods=[pod], replicas=counts, nproc=nproc)
    assert diagnose(job, {}, now=NOW)[0].replica == replica
