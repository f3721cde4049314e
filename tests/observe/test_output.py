"""What NCCL, gloo, CUDA and torch wrote on other people's machines."""

import json
from pathlib import Path

import pytest
from observed import PAIR, ended, make_pod, reported, running, snapshot, unplaced

from k8sjob.contract import Event
from k8sjob.observe.diagnose import diagnose
from k8sjob.observe.diagnose.finding import load_rules

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


def texts(example):
    """All texts of an example in JSON; an exception as it stands in a log."""
    if isinstance(example, str):
        yield example
    elif isinstance(example, dict):
        yield f"{example.get('kind')}: {example.get('message')}"
        yield from texts([*example.values()])
    elif isinstance(example, list):
        for part in example:
            yield from texts(part)


def test_each_rule_has_an_example():
    folder = Path(__file__).parent
    lines = (folder / "recorded/output.txt").read_text().splitlines()
    for file in (*folder.glob("*.json"), *folder.glob("recorded/*.json")):
        lines += texts(json.loads(file.read_text()))
    without = [rule.pattern for rule in load_rules("output") if not any(map(rule.search, lines))]
    assert without == [], f"add one to {folder}/recorded/output.txt"


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


@pytest.mark.parametrize(
    "text",
    [
        "NCCL WARN Failed to open libibverbs.so[.1]",
        "NCCL WARN NET/IB : mlx5_0:1 Got async event : port active",
        "NCCL WARN NET/OFI Could not disable CUDA API usage for HMEM, disabling GDR",
        "NCCL WARN Could not find a path for pattern 4, falling back to simple order",
        "Failed to initialize NVML: Unknown Error, so there are no GPU metrics",
        "all replicas of the database are busy or unavailable",
        "message truncated: received 4096 bytes",
    ],
)
def test_a_warning_of_what_something_does_without_is_no_cause(text):
    for code, cause in {3: "crash", 137: "killed", 143: "killed"}.items():
        assert why(ended(code), [f"pod:8:8 [0] {text}"]).id == cause


TRACEBACK = "Traceback (most recent call last):"
POOL = "HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url:"
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
BAR = "\r 30%|###       | 3/10 [00:00<00:01,  4.38it/s]"


@pytest.mark.parametrize(
    "error",
    [
        "ValueError: unknown loss 'infonce', gradient checkpointing must be one of nan, inf",
        "ValueError: gradient_clip_val must be a number or None, not inf",
        "ValueError: cannot use nan as loss weight",
        "FileNotFoundError: [Errno 2] No such file or directory: 'runs/loss inf/grad.csv'",
        'RuntimeError: Missing key(s) in state_dict: "loss.inf".',
        "ValueError: shipping address: Address already in use by another customer",
        "RuntimeError: Wait timeout for the feature store",
        "RuntimeError: Invalid device id in the registry: 8832",
        "replay.ReplayMemoryError: the replay memory has no transition 3",
        "ValueError: the 70B model requires 4 GPUs per replica, but tensor_parallel is 2",
        "ValueError: image resolution is not known for host name dataset-3",
        f"requests.exceptions.SSLError: {POOL} /gpt2/resolve/main/a.json (CERTIFICATE)",
        f"requests.exceptions.ConnectionError: {POOL} /gpt2/resolve/main/a.json (Errno 111)",
        "AssertionError: 连接超时: Name or service not known",
    ],
)
def test_words_of_another_error_are_no_cause(error):
    assert why(ended(1), [TRACEBACK, AT, error]).message == f"worker-0: exit code 1: {error}"


@pytest.mark.parametrize(
    "error",
    [
        "AssertionError: Rank 12: found NaN in local grad norm in backward pass",
        "FloatingPointError: Loss became infinite or NaN at iteration=3!",
        "ValueError: The loss returned in `training_step` is nan.",
        "ValueError: 손실(loss)이 NaN 입니다",
        "RuntimeError: The total norm of order 2.0 for gradients from `parameters` is non-finite",
        "RuntimeError: train_loss=nan",
    ],
)
def test_numbers_that_became_nan_have_their_cause(error):
    assert why(ended(1), [TRACEBACK, AT, error]).id == "nan-loss"


def test_a_connection_that_torch_tried_again_is_no_cause():
    retry = "[W socket.cpp:697] [c10d] The client socket has failed to connect to [job-0]:23456"
    assert why(ended(1), [retry, "loaded data", "no learning rate"]).id == "crash"
    assert why(ended(1), ["loaded data", retry]).id == "rendezvous"


def report(kind, message, where="train.py:3"):
    """How a container ends whose first rank reports an exception."""
    return reported(1, 1, kind, message, where)


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


@pytest.mark.parametrize("code", [1, 137])
def test_who_was_killed_is_the_cause_whatever_its_other_ranks_wrote(code):
    killed = ended(code, reason="OOMKilled", time="05:02")
    pods = [failed("master-0", ended(134)), failed("worker-0", killed)]
    logs = {"master-0": ["epoch 1", *NCCL_ABORT], "worker-0": ["epoch 1", *NCCL_ABORT, *SUMMARY]}
    (finding,) = diagnose(snapshot("Failed:x:y", pods=pods), logs)
    assert (finding.id, finding.replica) == ("memory", "worker-0")


def test_ranks_that_waited_for_one_that_does_not_start_are_the_consequence():
    pods = [make_pod("master-0", running={}), failed("worker-0", ended(1))]
    pods.append(
        unplaced("worker-1", "Unschedulable", "0/1 nodes are available: 1 Insufficient cpu.")
    )
    error = "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError"
    logs = {"worker-0": ["Traceback (most recent call last):", '  File "x"', error]}
    found = diagnose(snapshot("Running", pods=pods, deadline=None), logs)
    assert [one.id for one in found] == ["unschedulable", "rendezvous"]


def test_a_pod_with_gpus_that_sees_none_is_not_told_to_request_them():
    error = ["Traceback (most recent call last):", AT, "RuntimeError: No CUDA GPUs are available"]
    pod = failed("worker-0")
    assert why(ended(1), error).next_step.startswith("request GPUs")
    limits = {"limits": {"nvidia.com/gpu": "8"}}
    pod["spec"]["containers"] = [{"name": "pytorch", "resources": limits}]
    (finding,) = diagnose(snapshot("Failed:x:y", pods=[pod]), {"worker-0": error})
    assert finding.id == "gpu-driver"
    assert finding.next_step.startswith("its pod requests GPUs, but the container sees none")
