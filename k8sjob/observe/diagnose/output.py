"""The error in a container's output, and the rules that explain it.

The texts are those of NCCL 2.7 to 2.28 and torch 2.0 to 2.15, as users meet them in logs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Final

from k8sjob.contract import Event, EventKind
from k8sjob.observe.diagnose.finding import Cause, Explanation, Rule, shortened

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from k8sjob.contract import Reason
    from k8sjob.observe.diagnose.facts import End

_NO_EXCEPTION: Final = frozenset({"", "Signal"})
"""Types of a Reason where the process reported no exception."""
_RANK: Final = re.compile(r"^\[\w+\]:\s?")
"""The rank that torch and torchrun put in front of a line."""
_TRACEBACK: Final = "Traceback (most recent call last)"
_ERROR: Final = re.compile(
    r"[\w.]*(?:[Ee]rror|Exception|Interrupt|Exit)\b|\S+\.py: error: |\S*python[\d.]*: "
)
ARGUMENTS_REFUSED: Final = re.compile(r"\S+\.py: error: ")
"""How argparse ends a script."""
_TORCHRUN_SUMMARY: Final = re.compile(r"torch\.distributed\.elastic\S*ChildFailedError")
"""torchrun's own error, which follows that of the rank that failed."""
_AT_EXIT: Final = re.compile(r"wandb:(?! ERROR)")
"""Lines that a library writes whenever a process ends; they name epochs and losses, too."""
_REDRAWN_BAR: Final = re.compile(r"\r?[^\r|]*\d%\|[^\r]*")
"""A progress bar drawn once: tqdm draws it again, below the traceback, when a process ends."""
_MAX_REDRAWN_BARS: Final = 3
"""More of them, one inside the other, are the progress of training."""
_LIBRARY_LINE: Final = re.compile(
    r"\s|k8sjob: |Traceback |(?:Last |[\w.]*)[Ee]rror\b|frame #\d|Exception raised from"
    r"|.*(?:NCCL|c10d|gloo|Warning:|\.(?:cpp|cc|cu):\d)"
)
"""A line of NCCL, gloo or torch, a warning, or part of an exception."""
_NO_REASON: Final = re.compile(
    r"k8sjob: (?:\d\S*, job |(?:rank \d+: )?(?:SystemExit: sys\.exit\(|Exit: it gave no reason"
    r"|(?:Exit: )?exited with code))"
)
"""The agent's first line, and its line about a process that left no exception. Older runtimes wrote
"it gave no reason"."""
_TRAINING: Final = re.compile(
    r"(?!.*(?:Error|NCCL))(?:\S.*\b(?:epoch|steps?|iter(?:ation)?s?|batch|loss)\b|epoch|step|iter"
    r"|loss)[^A-Za-z]{0,4}\d|.*\d%\|",
    re.IGNORECASE,
)
"""A line in which a script reports its progress, tqdm's progress bars among them."""
_NOT_TRAINING: Final = frozenset({EventKind.STARTING, EventKind.WARNING, EventKind.STOPPING})
"""Events that are no sign of training."""
_PEER_LOST: Final = re.compile(
    r"Connection closed by|Connection reset by peer|Broken pipe|remote process exit(?:ed|ing)"
    r"|ncclRemoteError|failed to recv, got 0 bytes|recvValue failed"
    r"|NCCL communicator was aborted",
    re.IGNORECASE,
)
_BETWEEN_RANKS: Final = re.compile(r"(?i:gloo|nccl|c10d)|Dist\w*Error|PeerLost")
"""In a text about a connection: it is one between ranks, and not one of the script's own."""
_TORCH_ERROR: Final = re.compile(r"^[\w.]*(?:RuntimeError|Dist\w*Error|PeerLost)\b")
"""Exceptions of torch and jax; a ConnectionResetError is that of another connection."""
_MAX_UNFRAMED: Final = 10
"""An error without a traceback is looked for in so many last lines."""

_KIND: Final = re.compile(r"(?:\w+\.)*(\w+)(?::|$)")
"""The class at the beginning of an exception's first line."""
_OF_TORCH: Final = r"\w*(?:Runtime|OutOfMemory|Accelerator|ResourceExhausted)Error|Dist\w*Error"

_DOWNLOAD: Final = Rule(
    r"Error downloading |urlopen error |HTTPS?ConnectionPool\(host=|Cannot connect to host "
    r"|Couldn't reach |offline mode is enabled|requested files in the local cache"
    r"|on the Hugging Face Hub",
    Cause.CRASH,
    "something on the network could not be reached: {text}",
    "if it downloads data or a model: mount that from a volume, or add it to the image, where the"
    " script looks for it; or let pods reach the host (egress, a proxy)",
    "if it downloads data or a model: put that where the script looks for it (its folder, or the"
    " cache of its library), or let this machine reach the host",
    types=r"URLError|HTTPError|\w*Connect\w*Error|MaxRetryError|LocalEntryNotFoundError"
    r"|OfflineModeIsEnabled|FileNotFoundError|OSError|RuntimeError",
)
"""A failed download; what the error was raised from says less."""
_RULES: Final = (
    Rule(
        r"No module named '?k8sjob\b",
        Cause.MISSING_MODULE,
        "its image does not contain k8sjob's runtime",
        "let k8sjob add it: `image: {{repository: ..., base: THIS IMAGE}}`, and submit again; or"
        " start the script by run.command",
        exception_only=True,
    ),
    Rule(
        r"No module named '?(?P<name>(?P<package>\w+)\.[\w.]+)'?",
        Cause.MISSING_MODULE,
        "no module named {name!r}",
        "{package!r} was found, but not that module in it: if it is yours, check that the file is"
        " in image.context and that .dockerignore does not exclude it; if it is a package, install"
        " a version that has the module, and rename a file {package}.py of yours, which would hide"
        " it",
        exception_only=True,
        types="ModuleNotFoundError|ImportError",
    ),
    Rule(
        r"No module named '?(?P<name>(?P<package>\w+)[\w.]*)'?",
        Cause.MISSING_MODULE,
        "no module named {name!r}",
        "if it is a package, add {package!r} (or the package that has it) to image.pip or the"
        " requirements; if it is a file of yours, check that .dockerignore does not exclude it",
        "if it is a package, install {package!r} (or the package that has it) in the environment"
        " that k8sjob runs in; if it is a file of yours, check that it is in image.context and that"
        " .dockerignore does not exclude it",
        exception_only=True,
        types="ModuleNotFoundError|ImportError",
    ),
    Rule(
        r"cannot import name '(?P<name>\w+)' from '(?P<module>(?P<package>\w+)[\w.]*)'"
        r" \([^)]*/(?:site|dist)-packages/",
        Cause.MISSING_MODULE,
        "{module!r} has no {name!r}",
        "the image's {package!r} is another version than the script was written for: pin one that"
        " has it, in image.pip or the requirements",
        "the {package!r} that is installed is another version than the script was written for:"
        " install one that has it",
        exception_only=True,
        types="ImportError",
    ),
    Rule(
        r"(?i:CUDA(?: error:)? out of memory)|^[\w.]*OutOfMemoryError\b"
        r"|(?:CUBLAS|CUDNN|CUSOLVER|CUFFT)_STATUS_ALLOC_FAILED"
        r"|Failed to CUDA \w+(?: async)? \d+ bytes|Cuda failure \d+ 'out of memory'"
        r"|RESOURCE_EXHAUSTED: .*[Oo]ut of mem",
        Cause.GPU_MEMORY,
        "out of GPU memory: {text}",
        "make the batch smaller and raise strategy.accumulate by as much: the result is the same",
        exception_only=True,
        types=_OF_TORCH,
    ),
    Rule(
        r"Duplicate GPU detected : rank (?P<a>\d+) and rank (?P<b>\d+) both on CUDA device \w+",
        Cause.SAME_GPU,
        "ranks {a} and {b} use the same GPU",
        "each process takes its own: torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), which"
        " session() does; nproc_per_node must not be more than resources.gpus",
    ),
    Rule(
        r"no (?:\w+ )?(?:socket )?interface found|is neither AF_INET"
        r"|Unable to find (?:address for|interface)",
        Cause.INTERFACE,
        "it found no network interface of the given name: {text}",
        "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME must name an interface that the pod has, usually"
        " eth0: correct them in run.env, or leave them out",
    ),
    Rule(
        r"Mismatched NCCL version detected : rank (?P<a>\d+) version (?P<x>\d+)"
        r" rank (?P<b>\d+) version (?P<y>\d+)",
        Cause.NCCL_VERSION,
        "rank {a} has NCCL {x}, rank {b} has {y}",
        "run the same image in every replica, by its digest: a tag that was moved, or a node with"
        " an older copy, gives two versions",
    ),
    Rule(
        r"Error while creating shared memory segment|posix_fallocate failed|failed to extend"
        r" /dev/shm|out of shared memory|unable to (?:write to|mmap \d+ bytes from) file </torch"
        r"|/dev/shm.*No space left|No space left on device: '/dev/shm",
        Cause.SHARED_MEMORY,
        "its shared memory (/dev/shm) is full: {text}",
        "raise resources.shm: without it a container has a /dev/shm of 64 MiB (in a manifest: an"
        " emptyDir of medium Memory on /dev/shm)",
    ),
    Rule(
        r"DataLoader worker .* is killed by signal: Killed",
        Cause.MEMORY,
        "the kernel killed a data loader's process: the container's memory was used up",
        "raise resources.memory, or use fewer data loader workers",
    ),
    Rule(
        r"driver version is insufficient|driver on your system is too old|Found no NVIDIA driver"
        r"|no CUDA-capable device|nvidia-container-cli: .*|CUDA driver initialization failed",
        Cause.GPU_DRIVER,
        "it cannot use the GPU driver: {text}",
        "use a base image whose CUDA the node's driver supports (the first line of nvidia-smi says"
        " which), and check that the job asks for GPUs (resources.gpus)",
        "check whether this machine has a GPU and a driver (nvidia-smi), and whether torch is built"
        " for that driver; without a GPU let the script use the CPU (torch.device('cpu'))",
        exception_only=True,
        types=_OF_TORCH,
    ),
    Rule(
        r"No CUDA GPUs are available|Torch not compiled with CUDA enabled"
        r"|No supported gpu backend found"
        r"|\b[Rr]equires? (?:at least )?(?:one|an?|\d+) (?:\w+ )?GPUs?\b",
        Cause.GPU_DRIVER,
        "it needs a GPU, and has none: {text}",
        "ask for GPUs (resources.gpus) and use a base image with CUDA, or let the script use the"
        " CPU: its arguments may allow that",
        "run it on a machine with a GPU, with a torch that is built for it, or let the script use"
        " the CPU: its arguments may allow that",
        exception_only=True,
        types="RuntimeError|AssertionError|ValueError|MisconfigurationException|AcceleratorError",
    ),
    Rule(
        r"Assertion `(?P<check>t >= 0 && t < n_classes)` failed",
        Cause.CRASH,
        "a label is not one of the model's classes: on the GPU the assertion {check} failed",
        "labels count from 0: check that the model has an output for each, and that padding has"
        " the loss's ignore_index; on a CPU (resources.gpus: 0) the error names the label",
    ),
    Rule(
        r"\.cuh?:\d+: .*Assertion `(?P<check>[^`]*)` failed",
        Cause.CRASH,
        "an assertion failed on the GPU: {check}",
        "most often an index is outside its tensor, as a token that the embedding does not have:"
        " the line where the error appears may be a later one; with CUDA_LAUNCH_BLOCKING: '1' in"
        " run.env, or on a CPU (resources.gpus: 0), it is the right one",
    ),
    Rule(
        r"CUDA error: (?P<error>an illegal memory access was encountered|misaligned address"
        r"|an illegal instruction was encountered|unspecified launch failure)",
        Cause.CRASH,
        "a kernel failed on the GPU: {error}",
        "most often a kernel of one's own or of an extension, or a tensor of another GPU (call"
        " torch.cuda.set_device with LOCAL_RANK first): the line where the error appears may be a"
        " later one; with CUDA_LAUNCH_BLOCKING: '1' in run.env it is the right one",
        types=_OF_TORCH,
    ),
    Rule(
        r"CUDA error: invalid device ordinal",
        Cause.CRASH,
        "it uses a GPU that it does not have: {text}",
        "the index of a GPU is LOCAL_RANK, not RANK, and a replica sees as many as resources.gpus"
        " has",
        exception_only=True,
        types=_OF_TORCH,
    ),
    Rule(
        r"no kernel image is available for execution on the device",
        Cause.GPU_DRIVER,
        "its torch, or an extension, was not compiled for this GPU: {text}",
        "use a base image whose torch supports the GPU (torch.cuda.get_arch_list() has it), and"
        " compile extensions for it (TORCH_CUDA_ARCH_LIST)",
        "install a torch that supports the GPU (torch.cuda.get_arch_list() has it), and compile"
        " extensions for it (TORCH_CUDA_ARCH_LIST)",
        exception_only=True,
        types=_OF_TORCH,
    ),
    Rule(
        r"uncorrectable (?:ECC|NVLink) error|fallen off the bus|hardware stack error",
        Cause.GPU_FAULT,
        "a GPU of its node fails: {text}",
        "have the node cordoned (kubectl cordon NODE) and checked; the job continues on others",
        "restart this machine, or check its GPU: nvidia-smi -q",
    ),
    Rule(
        r"ibv_reg_(?:dmabuf_)?mr\w* failed.*|(?:nvidia_peermem|nv_peer_mem).*not loaded",
        Cause.INFINIBAND,
        "InfiniBand could not register memory: {text}",
        "the container needs the capability IPC_LOCK and its node an unlimited memlock; for memory"
        " of GPUs nvidia_peermem or DMA-BUF (NCCL_NET_GDR_LEVEL=LOC in run.env needs neither)",
    ),
    Rule(
        r"NET/IBP? ?: ?Got completion from peer (?P<peer>\S+) with (?:status=|error )(?P<n>\d+)",
        Cause.INFINIBAND,
        "InfiniBand lost the connection to {peer} (completion error {n})",
        "have the fabric between these nodes checked; with RoCE NCCL_IB_GID_INDEX must fit;"
        " NCCL_IB_DISABLE=1 in run.env shows whether it is InfiniBand at all",
    ),
    Rule(
        r"Call to ibv_\w+ failed.*",
        Cause.INFINIBAND,
        "InfiniBand fails: {text}",
        "check that the pod has the device (resources.extended: rdma/...), and that NCCL_IB_HCA and"
        " NCCL_IB_GID_INDEX fit it; NCCL_IB_DISABLE=1 in run.env avoids InfiniBand",
    ),
    Rule(
        r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<seq>\d+),"
        r" OpType=(?P<op>\w+).*ran for (?P<ms>\d+) milliseconds",
        Cause.COLLECTIVE_TIMEOUT,
        "it waited {seconds} s in the collective {op}, number {seq}; not every rank reached it",
        "see what the ranks that did not reach it were doing: an endless data loader, another"
        " number of steps, a save by only one rank; if it may take so long, raise"
        " run.collective_timeout",
    ),
    Rule(
        r"Ranks? (?P<ranks>\d+(?:, ?\d+)*) (?:failed to pass|timed out in) monitoredBarrier",
        Cause.COLLECTIVE_TIMEOUT,
        "rank {ranks} did not come to a monitored_barrier in time: {text}",
        "see what that rank was doing then; if it may take so long, raise the timeout of the"
        " monitored_barrier",
    ),
    Rule(
        r"op\.preamble\.length <= op\.nbytes\. (?P<sent>\d+) vs (?P<fits>\d+)",
        Cause.COLLECTIVE_MISMATCH,
        "another rank sent {sent} bytes where a collective of this one takes {fits}: the ranks made"
        " different calls, or passed tensors of different shapes or dtypes",
        "let all ranks make the same calls in the same order, with tensors of the same shape and"
        " dtype; TORCH_DISTRIBUTED_DEBUG=DETAIL in run.env lets torch name the calls",
    ),
    Rule(
        r"Timed out waiting (?P<ms>\d+)ms for (?P<op>send|recv) operation",
        Cause.COLLECTIVE_TIMEOUT,
        "it waited {seconds} s for another rank ({op})",
        "see what the other ranks were doing then; if it may take so long, raise"
        " run.collective_timeout",
    ),
    Rule(
        r"Timed out after (?P<s>\d+) seconds waiting for clients\. (?P<here>\d+)/(?P<all>\d+)"
        r" clients joined",
        Cause.RENDEZVOUS,
        "{here} of {all} processes joined the rendezvous within {s} s",
        "WORLD_SIZE must be the number of processes that actually start (nproc_per_node in each"
        " replica); then check why the others did not join",
    ),
    Rule(
        r"[Tt]he client socket has (?:timed out|failed) .*?connect(?:ing)? to [\[(]?"
        r"(?P<where>[^\s,\])]+)[,\]):]+ ?(?P<port>\d+)",
        Cause.RENDEZVOUS,
        "it could not connect to {where}, port {port}",
        "check whether that replica runs and listens; a NetworkPolicy or a sidecar"
        ' (sidecar.istio.io/inject: "false" turns one off) may block the connection',
        "check whether that replica runs and listens",
    ),
    Rule(
        r"network addresses of \((?P<where>[^\s,)]+), ?\d+\) cannot be retrieved",
        Cause.RENDEZVOUS,
        "the name {where} could not be resolved",
        "a replica's name resolves while its pod is ready: check whether the Master runs, and the"
        " cluster's DNS",
        "check the name, and whether this machine can resolve it",
    ),
    Rule(
        r"(?:Name or service not known|Temporary failure in name resolution|nodename nor servname)",
        Cause.RENDEZVOUS,
        "a host's name could not be resolved: {text}",
        "a replica's name resolves while its pod is ready: check whether the Master runs, and the"
        " cluster's DNS; for a host outside the cluster, check whether pods may reach it",
        "check the name, and whether this machine can resolve it",
        exception_only=True,
    ),
    Rule(
        r"Address already in use|EADDRINUSE",
        Cause.ADDRESS_IN_USE,
        "a port that it wanted to listen on is taken: {text}",
        "use the port in MASTER_PORT, or 0 for a free one, instead of a fixed number",
        exception_only=True,
        types=_OF_TORCH,
    ),
    Rule(
        r"Address already in use|EADDRINUSE",
        Cause.ADDRESS_IN_USE,
        "a port that it wanted to listen on is taken: {text}",
        "let that server listen on port 0, which gives it a free one; of several processes on one"
        " machine each needs its own, and MASTER_PORT is the rendezvous' own",
        exception_only=True,
    ),
    Rule(
        r"^[\w.]*MemoryError\b|DefaultCPUAllocator: |\[Errno 12\] Cannot allocate memory",
        Cause.MEMORY,
        "its memory was used up, or was not enough for one allocation: {text}",
        "raise resources.memory, or use less: fewer data loader workers, smaller batches",
        "use less, or lift the limit of this shell (ulimit -v): fewer data loader workers, smaller"
        " batches",
        exception_only=True,
    ),
    Rule(
        r"No space left on device|Disk quota exceeded|\[Errno 27\] File too large"
        r"|inline_container\.cc:\d+\] ?\. (?:unexpected pos \d+ vs \d+|PytorchStreamWriter failed)",
        Cause.DISK,
        "it could not write: a disk is full, or a quota or file size limit was reached: {text}",
        "write to a larger volume (volumes, checkpoint.dir), or keep less there (checkpoint.keep)",
        "free space on that disk (df -h), or write elsewhere; a limit of this shell (ulimit -f)"
        " does this, too",
        exception_only=True,
        types="OSError|RuntimeError|SafetensorError",
    ),
    Rule(
        r"requires at least one CUDA device|only supported with GPUs, no GPUs found",
        Cause.GPU_DRIVER,
        "the backend of its process group needs a GPU, and the process has none: {text}",
        "ask for GPUs (resources.gpus), or let the script choose gloo if there is none:"
        " init_process_group('nccl' if torch.cuda.is_available() else 'gloo')",
        "let the script choose gloo where there is no GPU:"
        " init_process_group('nccl' if torch.cuda.is_available() else 'gloo')",
        exception_only=True,
    ),
)
_UNSPECIFIC: Final = re.compile(
    r"NCCL|nccl|gloo|c10d|ProcessGroup|Dist\w*Error|DataLoader worker \(\S+ [\d, ]+\) exited"
    r"|device-side assert"
)
"""In an exception's text: what NCCL, gloo, a GPU or its cause wrote before it may say more."""
_NCCL: Final = re.compile(
    r"NCCL error.*?(unhandled (?:system|cuda) error|internal error|invalid usage|remote .*error)"
)
_LAST_ERROR: Final = "Last error:"
_WATCHDOG: Final = re.compile(r"\[Rank (\d+)\] Watchdog caught collective operation timeout")
_LOG_PREFIXES: Final = (
    r"^(?:\[\w+\]:\s*)?(?:\S+:\d+:\d+ \[\d+\] )?(?:\S+\.\w+:\d+ )?NCCL WARN ",
    r"^(?:\[\w+\]:\s*)?(?:[\w.]+Error: )?",
)


@dataclass(frozen=True, slots=True)
class LastOutput:
    """The last output of a container, about its end.

    An exception that the runtime has reported is the error, whatever else is in the output. Without
    a report the last traceback counts; a script got over what it wrote before its last sign of
    training.

    Attributes:
        error: the lines of the exception that ended it; empty if none is known.
        context: the last lines of its output, since training last advanced.
        last: the last line of all; empty if there is none.
        reported: whether the runtime has reported the error; its exit code says what it means.
        causes: what the error was raised from, each as a line; the last one, its root, first.
    """

    error: tuple[str, ...]
    context: tuple[str, ...]
    last: str = ""
    reported: bool = False
    causes: tuple[str, ...] = ()

    @property
    def lost_a_peer(self) -> bool:
        """Whether the output says that it ended because another rank went away."""
        if self.error:
            return not self.reported and _is_lost_peer(self.error)
        return any(_broke(line) for line in self.context[-8:])


def is_bare_exit(reason: Reason) -> bool:
    """Whether a process only left with an exit code; its output has the reason, if there is one."""
    by_number = reason.type == "SystemExit" and reason.message.startswith("sys.exit(")
    return by_number or reason.type == "Exit"


def last_output(end: End, lines: Sequence[str], *, ranks: int) -> LastOutput:
    """Read the report and the last output of a container."""
    bars = sum(1 for _ in takewhile(_REDRAWN_BAR.fullmatch, reversed(lines)))
    lines = lines[: len(lines) - bars] if bars <= _MAX_REDRAWN_BARS else lines
    context = tuple(since_training(lines))
    if end.reason and end.reason.type not in _NO_EXCEPTION and not is_bare_exit(end.reason):
        text = ": ".join(filter(None, (end.reason.type, end.reason.message)))
        error = tuple(text.splitlines())
        return LastOutput(error, context, reported=True, causes=_roots(end.reason))
    written = [_RANK.sub("", line) for line in lines if _is_text(line)]
    if end.message and not end.reason:  # from the script, or taken from the log by the kubelet
        left = [_RANK.sub("", line) for line in end.message.splitlines() if line.strip()]
        context, written = (*context, *left), left or written
    last = written[-1] if written else ""
    if end.exit_code > 128:  # a signal ended it, and no exception
        return LastOutput((), context, last)
    unframed = ARGUMENTS_REFUSED if end.chosen_by_script else _ERROR
    return LastOutput(_exception(context, unframed, several=ranks > 1), context, last)


def _roots(reason: Reason) -> tuple[str, ...]:
    """The exceptions that one was raised from; one that was being handled may not matter."""
    causes = takewhile(lambda one: not one.startswith("while "), reason.causes)
    return tuple(one.partition(" ")[2] for one in causes)[::-1]


def since_training(lines: Sequence[str]) -> list[str]:
    """The lines after the last sign of training."""
    after: list[str] = []
    for line in reversed(lines):
        if _is_text(line):
            text = _RANK.sub("", line)
            if _TRAINING.match(text):
                break
            after.append(text)
        elif (event := Event.decode(line)) and event.kind not in _NOT_TRAINING:
            break
    return after[::-1]


def library_lines(lines: Sequence[str]) -> list[str]:
    """The last lines, back to the last one that a script wrote, as a rank does that continues."""
    return list(takewhile(_LIBRARY_LINE.match, reversed(lines)))[::-1]


def _is_text(line: str) -> bool:
    """Whether a line is neither an event nor one that is written at the end of any process."""
    return not (_NO_REASON.match(line) or _AT_EXIT.match(line) or Event.decode(line))


def _exception(
    lines: Sequence[str], unframed: re.Pattern[str], *, several: bool
) -> tuple[str, ...]:
    """The last exception; of several ranks' the last one that is not the loss of another rank.

    `unframed` is how an error may begin that no traceback comes before: a script that leaves by
    itself has handled whatever it wrote before.
    """
    starts = [n for n, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    blocks = (lines[begin:end] for begin, end in pairwise([*starts, len(lines)]))
    raised = [error for block in blocks if (error := _raised(block))]
    raised = [error for error in raised if not _TORCHRUN_SUMMARY.match(error[0])]
    firsthand = [error for error in raised if not _is_lost_peer(error)] if several else []
    if raised:
        return (firsthand or raised)[-1]
    return _unframed(lines, unframed)


def _unframed(lines: Sequence[str], start: re.Pattern[str]) -> tuple[str, ...]:
    """An error without the beginning of its traceback: the last line, or one below a frame.

    Another line that reads like an error was written by a script that handled it.
    """
    last = lines[-_MAX_UNFRAMED:]
    found = [
        line
        for above, line, below in zip(["", *last], last, [*last[1:], ""], strict=False)
        if start.match(line)
        and not _TORCHRUN_SUMMARY.match(line)
        and (above[:1].isspace() or not below)
    ]
    return tuple(found[-1:])


def _raised(block: Sequence[str]) -> tuple[str, ...]:
    """The exception at the end of a traceback, and what follows it."""
    at = next((n for n, line in enumerate(block) if n and line and not line[0].isspace()), None)
    return () if at is None else tuple(block[at:])


def _is_lost_peer(error: Sequence[str]) -> bool:
    return bool(_TORCH_ERROR.match(error[0])) and _broke("\n".join(error))


def _broke(text: str) -> bool:
    """Whether a text says that a connection between ranks broke."""
    return bool(_PEER_LOST.search(text) and _BETWEEN_RANKS.search(text))


def explain_output(output: LastOutput, *, local: bool) -> Explanation | None:
    """The explanation of a container's end by its output; None if nothing in it is known."""
    if not output.error:
        return explain_lines(output.context, local=local) or _nccl_error(output.context)
    causes = [(cause,) for cause in output.causes]
    if output.reported:
        tried = [_first([_DOWNLOAD], error, local=local) for error in (output.error, *causes)]
        if failed := [one for one in tried if one]:
            return next((one for one in failed if "://" in one.what), failed[0])
    for error in (*causes, output.error):
        if found := _first(_RULES, error, local=local):
            return found
    if not any(_UNSPECIFIC.search(line) for line in output.error):
        return None
    lines = [*output.error, *output.context]
    return explain_lines(lines, local=local) or _nccl_error(lines)


def explain_lines(lines: Sequence[str], *, local: bool) -> Explanation | None:
    """The problem between ranks that lines tell, the most telling rule first; None for none."""
    return _first([rule for rule in _RULES if not rule.exception_only], lines, local=local)


def _first(rules: Iterable[Rule], lines: Sequence[str], *, local: bool) -> Explanation | None:
    """The explanation of the first rule that fits a line; the first one may be an exception's."""
    kind = found[1] if lines and (found := _KIND.match(lines[0])) else ""
    for rule in rules:
        if kind and rule.types and not re.fullmatch(rule.types, kind):
            continue
        for line in lines:
            if found := rule.search(line):
                seconds = str(round(int(found.groupdict().get("ms") or 0) / 1000))
                facts = {"text": _plain(line), "seconds": seconds}
                return rule.explain(found, facts, local=local)
    return None


def _nccl_error(lines: Sequence[str]) -> Explanation | None:
    """An NCCL error that no rule knows, with what NCCL itself calls the last error."""
    # A warning is followed by the line of code that gave it.
    errors = (line for line in lines if "Warning: " not in line and not line[:1].isspace())
    found = next((found for line in errors if (found := _NCCL.search(line))), None)
    if found is None:
        return None
    after = next((n + 1 for n, line in enumerate(lines) if line.endswith(_LAST_ERROR)), len(lines))
    last = f": {_plain(lines[after])}" if after < len(lines) else ""
    return Explanation(
        Cause.NCCL,
        f"NCCL failed: {found[1]}{last}",
        "NCCL_DEBUG=WARN in run.env makes NCCL say what it was",
    )


def timed_out_ranks(lines: Iterable[str]) -> set[int]:
    """The ranks whose watchdog saw a collective time out."""
    return {int(found[1]) for line in lines if (found := _WATCHDOG.search(line))}


def _plain(line: str) -> str:
    """A log line without the prefixes of torch and NCCL."""
    for prefix in _LOG_PREFIXES:
        line = re.sub(prefix, "", line)
    return shortened(line)
