"""What NCCL, gloo, CUDA and torch wrote on other people's machines."""

from pathlib import Path

import pytest
from observed import PAIR, ended, make_pod, reported, running, snapshot, unplaced

from k8sjob.contract import Event, Reason
from k8sjob.observe.diagnose import diagnose

WATCHDOG = (
    "[rank{0}]:[E626 06:24:44.903881913 ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught"
    " collective operation timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523,"
    " NumelOut=9801523, Timeout(ms)=600000) ran for 600020 milliseconds before timing out."
)


def failed(name, end=None):
    return make_pod(name, "Failed", terminated=end or ended(1))


def recorded():
    """(cause, what is said, lines) of each piece of output in recorded/output.txt."""
    text = Path(__file__).with_name("recorded").joinpath("output.txt").read_text()
    for piece in text.split("=== ")[1:]:
        title, *lines = piece.splitlines()
        cause, _, detail = title.partition(": ")
        yield pytest.param(cause, detail, lines, id=f"{cause}-{detail[:20]}")


@pytest.mark.parametrize(("cause", "detail", "lines"), list(recorded()))
def test_output_has_its_cause(lines, cause, detail):
    pods = [make_pod("master-0", "Succeeded"), failed("worker-0")]
    noise = ["epoch 1", "pod:88:88 [0] NCCL INFO NET/IB : No device found."]
    (finding,) = diagnose(snapshot("Failed:x:y", pods=pods), {"worker-0": [*noise, *lines]})
    assert (finding.id, finding.replica) == (cause, "worker-0")
    assert detail in finding.message
    assert finding.next_step


def test_ranks_that_did_not_reach_a_collective_are_named():
    names = ["master-0", "worker-0", "worker-1"]
    pods = [failed(name, ended(134)) for name in names]
    logs = {"master-0": [WATCHDOG.format(0)], "worker-0": [WATCHDOG.format(1)], "worker-1": []}
    (finding,) = diagnose(snapshot("Failed:x:y", pods=pods), logs)
    assert finding.id == "collective-timeout"
    assert "; rank 2 did not wait for it; 2 more ended with the same exit code" in finding.message
    del logs["worker-1"]  # whether it waited is not known then
    assert "did not wait" not in diagnose(snapshot("Failed:x:y", pods=pods), logs)[0].message


def test_problems_of_running_ranks_are_reported():
    names = ["master-0", "worker-0", "worker-1"]
    pods = running(*names)
    logs = {name: [WATCHDOG.format(0)] for name in names}
    (finding,) = diagnose(snapshot("Running", pods=pods), logs)
    assert finding.message.startswith("master-0, worker-0 and worker-1: it waited 600 s")
    logs = {name: ["RuntimeError: [gloo/pair.cc:534] Connection closed by peer"] for name in names}
    assert diagnose(snapshot("Running", pods=pods), logs) == []
    for later in (["text"] * 30, ["step 1 loss 0.5"], [Event("started").encode()]):
        logs = {name: [WATCHDOG.format(0), *later] for name in names}
        assert diagnose(snapshot("Running", pods=pods), logs) == []


@pytest.mark.parametrize(
    "lines",
    [
        ["UserWarning: CUDA initialization: Found no NVIDIA driver on your system.", "  return 0"],
        ["[W socket.cpp:6] [c10d] The client socket has failed to connect to [h]:2345", "ready"],
        [WATCHDOG.format(0), "에폭 1 손실 0.3"],
        ["requests: Temporary failure in name resolution, cached copy used"],
    ],
)
def test_a_rank_that_continues_to_write_has_no_problem(lines):
    pods = running("master-0", "worker-0", "worker-1")
    assert diagnose(snapshot("Running", pods=pods), {"master-0": lines}) == []


TRACEBACK = "Traceback (most recent call last):"
AT = '  File "train.py", line 3, in <module>'
HANDLED = [
    "ModuleNotFoundError: No module named 'flash_attn'; using torch's attention",
    "CUDA out of memory; retrying with a smaller batch",
    "OSError: [Errno 98] Address already in use, trying the next port",
    "[W socket.cpp:663] [c10d] The client socket has failed to connect to [job-master-0]:23456",
    (
        "pod:8:8 [0] ib_plugin.c:1615 NCCL WARN NET/IB : Got completion from peer 10.0.0.1<5> with"
        " status=12 opcode=0 len=0 vendor err 129 (Recv)"
    ),
    "RuntimeError: [gloo/pair.cc:534] Connection closed by peer",
    "requests.exceptions.ConnectionError: Temporary failure in name resolution, cached copy used",
    "RuntimeError: The NVIDIA driver on your system is too old (found version 11040); using CPU",
    "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. Restarted.",
    TRACEBACK,
    AT,
    "ImportError: No module named apex",
]
"""What a script may get over, each line on its own."""


def why(end, lines, *, namespace="ns", **options):
    job = snapshot("Failed:x:y", pods=[failed("worker-0", end)], **options)
    job.job.raw["metadata"]["namespace"] = namespace
    (finding,) = diagnose(job, {"worker-0": lines})
    return finding


TORCHRUN = [
    "E1121 failed (exitcode: 1) local_rank: 0 (pid: 12) of binary: /usr/bin/python",
    TRACEBACK,
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    "train.py FAILED",
]
KEY_ERROR = [TRACEBACK, AT, "KeyError: 'lr'"]
OUT_OF_MEMORY = [TRACEBACK, AT, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"]
USAGE = ["usage: train.py [-h]", "train.py: error: unrecognized arguments: --x"]
BAR = "\r 30%|###       | 3/10 [00:00<00:01,  4.38it/s]"


def report(kind, message, where="train.py:3"):
    """How a container ends whose first rank reports an exception."""
    return reported(1, 1, kind, message, where)


def test_refused_arguments_are_those_of_the_job():
    assert why(ended(2), [*HANDLED[:1], *USAGE]).next_step.startswith("correct run.args")
    assert not why(ended(1), KEY_ERROR).next_step.startswith("correct run.args")


UNKNOWN_HOST = "[Errno -2] Name or service not known"


@pytest.mark.parametrize(
    ("kind", "detail", "text"),
    [
        (
            "RuntimeError",
            f"Error downloading a.gz:\nTried https://x, got:\n{UNKNOWN_HOST}",
            "a.gz:",
        ),
        ("URLError", f"<urlopen error {UNKNOWN_HOST}>", "<urlopen error"),
        ("ClientConnectorDNSError", "Cannot connect to host a.org:443 ssl:default", "host a.org"),
        ("OfflineModeIsEnabled", "Cannot reach https://a.org: offline mode is enabled", "a.org"),
        ("ConnectionError", "Couldn't reach 'imdb' on the Hub (OfflineModeIsEnabled)", "'imdb'"),
    ],
)
def test_a_download_that_failed(kind, detail, text):
    causes = (f"from gaierror: {UNKNOWN_HOST}",)
    found = why(reported(1, 1, kind, detail, causes=causes), [])
    assert "something on the network could not be reached: " in found.message
    assert text in found.message
    assert "mount that from a volume" in found.next_step


def test_a_file_that_is_missing():
    found = why(report("FileNotFoundError", "[Errno 2] No such file or directory: 'a.pt'"), [])
    assert found.next_step.startswith("put the file where the script looks for it")
    found = why(report("FileNotFoundError", "[Errno 2] No such file: '../sets/x.csv'"), [])
    assert "mount: /sets, pvc: CLAIM, local: ../sets}" in found.next_step


@pytest.mark.parametrize(
    ("causes", "cause", "note"),
    [
        (("from OutOfMemoryError: CUDA out of memory",), "gpu-memory", "CUDA out of memory (main"),
        (("from X: no", "from ModuleNotFoundError: No module named 'x'"), "missing-module", "'x'"),
        (("first OutOfMemoryError: CUDA out of memory",), "gpu-memory", "CUDA out of memory"),
        # A script may go on without the package, within the handler.
        (("while handling ImportError: No module named 'x'",), "crash", "no; while handling Imp"),
        (("from KeyError: 'lr'",), "crash", "MyError: no; from KeyError: 'lr' (main.py:3)"),
    ],
)
def test_what_an_exception_was_raised_from_is_its_cause(causes, cause, note):
    reason = Reason(1, 1, "MyError", "no", "main.py:3", causes=causes)
    finding = why(ended(1, reason.encode()), [])
    assert finding.id == cause
    assert note in finding.message


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (["RuntimeError: tokenizer server: Broken pipe"], "crash"),
        (["RuntimeError: [gloo/pair.cc:534] Connection closed by peer [10.0.0.1]:5"], "connection"),
        (["torch.distributed.DistNetworkError: Broken pipe"], "connection"),
        (
            ["RuntimeError: NCCL error", "Last error:", "socketProgress: Connection reset by peer"],
            "connection",
        ),
    ],
)
def test_a_connection_of_the_script_is_none_between_ranks(lines, cause):
    assert why(ended(1), [TRACEBACK, AT, *lines]).id == cause


@pytest.mark.parametrize(("kind", "step"), [("OSError", "port 0"), ("DistNetworkError", "use the")])
def test_a_server_of_the_script_does_not_take_the_port_of_the_rendezvous(kind, step):
    end = report(kind, "[Errno 98] Address already in use")
    assert step in why(end, []).next_step


@pytest.mark.parametrize("rank", [1, -1])
def test_a_script_that_leaves_with_a_code_had_handled_what_it_wrote(rank):
    end = ended(2, Reason(2, rank, "Exit", "exited with code 2").encode())
    lines = ["main.py:7: UserWarning: NCCL error: unhandled system error"]
    lines += ["  warnings.warn('NCCL error: unhandled system error')"]
    finding = why(end, [*lines, HANDLED[0]])
    assert finding.id == ("missing-module" if rank < 0 else "crash")
    assert HANDLED[0] in finding.message or rank < 0


@pytest.mark.parametrize("signal", ["Killed", "Segmentation fault"])
def test_a_loaders_process_that_was_killed_is_named_by_the_cause_of_the_report(signal):
    end = report("RuntimeError", "DataLoader worker (pid(s) 7, 8) exited unexpectedly")
    cause = f"RuntimeError: DataLoader worker (pid 7) is killed by signal: {signal}"
    finding = why(end, [TRACEBACK, AT, cause])
    assert finding.id == ("memory" if signal == "Killed" else "crash")


RESUMED = Event("resumed", {"path": "/checkpoints/step-4.pt", "step": 4}).encode()
REFUSED = "Error(s) in loading state_dict for Net:\n\tsize mismatch for fc.weight: copying"


@pytest.mark.parametrize(
    ("detail", "lines", "hint"),
    [
        (REFUSED, [RESUMED], True),
        ("loaded state dict has a different number of parameter groups", [RESUMED], True),
        (REFUSED, [], False),  # a pretrained model, for instance
        ("the size does not fit", [RESUMED], False),
    ],
)
def test_a_resumed_checkpoint_of_another_model(detail, lines, hint):
    finding = why(report("RuntimeError", detail), lines)
    assert finding.id == "crash"
    assert detail.splitlines()[0] in finding.message
    assert ("what it resumed from /checkpoints/step-4.pt" in finding.next_step) == hint
    assert ("start from scratch (an empty checkpoint.dir)" in finding.next_step) == hint


@pytest.mark.parametrize("code", [1, 134, 137])
@pytest.mark.parametrize(
    "progress",
    [
        Event("progress", {"epoch": 0, "step": 3}).encode(),
        "epoch 1, step 3: loss 0.5",
        "Train Epoch: 1 [640/60000 (1%)]  Loss: 1.2",
        " 50%|#####     | 5/10 [00:01<00:01,  4.9it/s]",
        "INFO:root:step=4",
    ],
)
def test_what_was_followed_by_training_is_no_cause(code, progress):
    finding = why(ended(code), [*HANDLED, progress, "saving"])
    detail = "exit code 1: saving" if code == 1 else "ended by SIG"
    assert detail in finding.message


@pytest.mark.parametrize("bars", [1, 3, 4])
def test_a_progress_bar_that_is_drawn_again_at_the_end_is_no_training(bars):
    lines = [BAR * 4 + TRACEBACK, *OUT_OF_MEMORY[1:], *[BAR] * bars]
    assert (why(ended(1), lines).id == "gpu-memory") is (bars < 4)


@pytest.mark.parametrize("several", [False, True])
def test_the_last_traceback_counts(several):
    nproc = "2" if several else "1"
    finding = why(ended(1), [*HANDLED, *KEY_ERROR], nproc=nproc)
    assert finding.message == "worker-0: exit code 1: KeyError: 'lr'"
    lost = [
        TRACEBACK,
        AT,
        "[rank0]: RuntimeError: [gloo/pair.cc:534] Connection closed by peer [10.0.0.1]:5",
    ]
    finding = why(ended(1), [*KEY_ERROR, *lost], nproc=nproc)
    assert finding.id == ("crash" if several else "connection")


@pytest.mark.parametrize(
    ("detail", "step", "in_a_cluster"),
    [
        ("ModuleNotFoundError: No module named 'pandas'", "install 'pandas'", "image.pip"),
        ("RuntimeError: Found no NVIDIA driver", "this machine has a GPU", "base image"),
        (
            "RuntimeError: [gloo/pair.cc:534] Connection closed by peer",
            "check what is between them",
            "NetworkPolicy",
        ),
        ("sh: python4: not found", "install the program on this machine", "in the image"),
    ],
)
def test_a_next_step_on_this_machine_speaks_of_this_machine(detail, step, in_a_cluster):
    kind, _, message = detail.partition(": ")
    end = ended(127) if kind == "sh" else reported(1, 0, kind, message)
    end = ended(1) if "peer" in message else end  # no traceback of the agent's
    here, there = (why(end, [detail], namespace=place).next_step for place in ("local", "blue"))
    assert step in here
    assert in_a_cluster in there
    for word in ("image.pip", "base image", "pod", "NetworkPolicy", "nodes"):
        assert word not in here


ABORTS = (
    "[rank0]:[E1 ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID 0 Rank 0] Process group watchdog"
    " thread terminated with exception: NCCL error: remote process exited or there was a network"
    " error, NCCL version 2.21.5"
)
REMOTE = (
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting"
)
FRAMES = [f"frame #{n}: c10d::ProcessGroupNCCL::ncclCommWatchdog() + 0x{n}0" for n in range(9)]
NCCL_ABORT = [
    ABORTS,
    f"{REMOTE} prematurely.",
    "Last error:",
    "socketProgress: Connection closed by remote peer job-worker-0.job.ns.svc<4711>",
    "Exception raised from checkForNCCLErrorsInternal at ../ProcessGroupNCCL.cpp:2027",
    *FRAMES,
    "terminate called after throwing an instance of 'c10::DistBackendError'",
    "  what():  [PG ID 0 PG GUID 0 Rank 0] Process group watchdog thread terminated",
    *FRAMES,
]
BY_AGENT = "W1127 10:00:00.000000 7 torch/distributed/elastic/multiprocessing/api.py:900] Sending"
SUMMARY = [
    f"{BY_AGENT} process 9 closing signal SIGTERM",
    *TORCHRUN[1:],
    "-" * 60,
    "Failures:",
    "  <NO_OTHER_FAILURES>",
    "-" * 60,
    "Root Cause (first observed failure):",
    "[0]:",
    "  time      : 2026-01-01_00:05:00",
    "  traceback : Signal 6 (SIGABRT) received by PID 9",
    "=" * 60,
]


@pytest.mark.parametrize("time", ["04:58", "05:00", "05:03"])
@pytest.mark.parametrize(("code", "more"), [(134, []), (1, SUMMARY)])
def test_a_rank_that_nccl_aborts_after_its_peer_was_killed_is_not_the_cause(code, more, time):
    killed = ended(137, reason="OOMKilled", time=time)
    pods = [failed("master-0", ended(code)), failed("worker-0", killed)]
    logs = {"master-0": ["epoch 1 step 7", *NCCL_ABORT, *more], "worker-0": ["epoch 1 step 7"]}
    (finding,) = diagnose(snapshot("Failed:x:y", pods=pods), logs)
    assert (finding.id, finding.replica) == ("memory", "worker-0")


def test_the_failure_that_a_rank_waited_for_in_vain_comes_first():
    again = make_pod("worker-0", running={}, last=ended(137, reason="OOMKilled", time="00:10"))
    waits = make_pod(
        "master-0", waiting={"reason": "CrashLoopBackOff"}, last=ended(134, time="09:00")
    )
    logs = {"master-0": [WATCHDOG.format(0)], "worker-0": ["epoch 1"]}
    seen = snapshot("Running", pods=[waits, again], deadline=None, replicas=PAIR)
    (finding,) = diagnose(seen, logs)
    assert (finding.id, finding.replica) == ("memory", "worker-0")


def test_a_hang_is_no_consequence_of_what_another_replica_survived():
    again = make_pod("worker-0", running={}, last=ended(1, time="00:10"))
    hung = make_pod(
        "master-0",
        waiting={"reason": "CrashLoopBackOff"},
        last=reported(140, 0, "Hung", "rank 0 is in load", time="09:00", culprits=(0,)),
    )
    logs = {"worker-0": ["Traceback (most recent call last):", AT, "KeyError: 'lr'"]}
    seen = snapshot("Running", pods=[hung, again], deadline=None, replicas=PAIR)
    assert [one.id for one in diagnose(seen, logs)] == ["hung"]


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (ended(137, reason="OOMKilled", time="05:02"), "memory"),
        (ended(1, reason="OOMKilled", time="05:02"), "memory"),
    ],
)
def test_who_was_killed_is_the_cause_whatever_its_other_ranks_wrote(end, cause):
    pods = [failed("master-0", ended(134)), failed("worker-0", end)]
    logs = {"master-0": ["epoch 1", *NCCL_ABORT], "worker-0": ["epoch 1", *NCCL_ABORT, *SUMMARY]}
    (finding,) = diagnose(snapshot("Failed:x:y", pods=pods), logs)
    assert (finding.id, finding.replica) == (cause, "worker-0")


def test_a_signal_is_no_loss_of_a_peer_that_was_survived_before():
    lost = "RuntimeError: [gloo/pair.cc:534] Connection closed by peer [10.0.0.1]:9"
    finding = why(ended(139), ["epoch 1", lost, "Fatal Python error: Segmentation fault"])
    assert finding.id == "killed"
    assert "SIGSEGV" in finding.message


def test_ranks_that_waited_for_one_that_does_not_start_are_the_consequence():
    pods = [make_pod("master-0", running={}), failed("worker-0", ended(1))]
    pods.append(
        unplaced("worker-1", "Unschedulable", "0/1 nodes are available: 1 Insufficient cpu.")
    )
    error = "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError"
    logs = {"worker-0": ["Traceback (most recent call last):", '  File "x"', error]}
    found = diagnose(snapshot("Running", pods=pods, deadline=None), logs)
    assert [one.id for one in found] == ["unschedulable", "rendezvous"]


@pytest.mark.parametrize(
    "end", [ended(255, reason="Unknown"), ended(137, reason="ContainerStatusUnknown")]
)
def test_a_container_that_its_node_lost_is_no_fault_of_the_script(end):
    finding = why(end, ["epoch 1 loss 0.5"])
    assert finding.id == "node-lost"
    assert finding.message == "worker-0: its node node-1 restarted, or lost its container"
    assert finding.next_step.startswith("submit the job again: with checkpoints")


def test_a_pod_with_gpus_that_sees_none_is_not_told_to_request_them():
    error = ["Traceback (most recent call last):", AT, "RuntimeError: No CUDA GPUs are available"]
    pod = failed("worker-0")
    assert why(ended(1), error).next_step.startswith("request GPUs")
    limits = {"limits": {"nvidia.com/gpu": "8"}}
    pod["spec"]["containers"] = [{"name": "pytorch", "resources": limits}]
    (finding,) = diagnose(snapshot("Failed:x:y", pods=[pod]), {"worker-0": error})
    assert finding.id == "gpu-driver"
    assert finding.next_step.startswith("its pod requests GPUs, but the container sees none")


FROM = "The above exception was the direct cause of the following exception:"
WHILE = "During handling of the above exception, another exception occurred:"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
RDZV = "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: See inner exception."


def chain(*parts):
    """A traceback of exceptions, with the line that stands between each two."""
    for part in parts:
        yield from (["", part, ""] if part in {FROM, WHILE} else [TRACEBACK, AT, part])


@pytest.mark.parametrize(
    ("parts", "cause", "words"),
    [
        ((OOM, FROM, "RuntimeError: epoch 3 failed"), "gpu-memory", "out of memory"),
        ((OOM, FROM, "ValueError: a", FROM, "RuntimeError: b"), "gpu-memory", "out of memory"),
        ((OOM, WHILE, "ValueError: no file"), "crash", "ValueError: no file"),
        (("OSError: [Errno 9] Bad", FROM, RDZV), "crash", "OSError: [Errno 9] Bad"),
        ((OOM, FROM, "KeyError: 'x'", FROM, RDZV), "gpu-memory", "out of memory"),
        ((RDZV,), "rendezvous", "did not complete"),
        ((OOM, "ValueError: another rank's"), "crash", "another rank's"),
    ],
)
def test_an_exception_has_its_cause_where_it_was_raised_from(parts, cause, words):
    pods = [make_pod("master-0", "Failed", terminated=ended(1))]
    finding = diagnose(snapshot("Failed", pods=pods), {"master-0": [*chain(*parts)]})[0]
    assert finding.id == cause
    assert words in finding.message
