"""What Python, torch, NCCL, gloo and CUDA write when a rank cannot go on, and what it means.

The texts are those of NCCL 2.7 to 2.28 and torch 2.0 to 2.15, as users meet them in logs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from k8sjob.lifecycle.diagnose.finding import Cause, Told

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from k8sjob.lifecycle.diagnose.account import Account

__all__ = ["explained", "spoken_of", "timed_out_ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """One sort of trouble.

    Attributes:
        pattern: how it is written.
        cause: its Cause.
        what: what it means, with the groups of the pattern, and `text` for the whole line.
        step: the next step, with the same.
        here: the next step for a job on this machine, where it is another one.
        raised: whether it ends a container as an exception alone; a line that says so in passing
            (a warning, a fallback) is none.
    """

    pattern: re.Pattern[str]
    cause: Cause
    what: str
    step: str
    here: str = ""
    raised: bool = False


def _kind(
    pattern: str, cause: Cause, what: str, step: str, here: str = "", *, raised: bool = False
) -> _Kind:
    return _Kind(
        pattern=re.compile(pattern), cause=cause, what=what, step=step, here=here, raised=raised
    )


_SHARED_MEMORY: Final = (
    "raise resources.shm: without it a container has a /dev/shm of 64 MiB (in a manifest: an"
    " emptyDir of medium Memory on /dev/shm)"
)
_KINDS: Final = (
    _kind(
        r"No module named '?k8sjob\b",
        Cause.MISSING_MODULE,
        "its image does not contain k8sjob's runtime",
        "let k8sjob add it: `image: {{repository: ..., base: THIS IMAGE}}`, and submit again; or"
        " start the script by run.command",
        raised=True,
    ),
    _kind(
        r"No module named '?(?P<name>(?P<package>\w+)[\w.]*)'?",
        Cause.MISSING_MODULE,
        "no module named {name!r}",
        "if it is a package, add {package!r} (or the package that has it) to image.pip or the"
        " requirements; if it is a file of yours, see that .dockerignore does not leave it out",
        "if it is a package, install {package!r} (or the package that has it) in the environment"
        " that k8sjob runs in; if it is a file of yours, see that it lies in image.context",
        raised=True,
    ),
    _kind(
        r"(?i:CUDA(?: error:)? out of memory)|OutOfMemoryError|RESOURCE_EXHAUSTED: .*[Oo]ut of mem",
        Cause.GPU_MEMORY,
        "out of GPU memory: {text}",
        "make the batch smaller and raise strategy.accumulate by as much: the result is the same",
        raised=True,
    ),
    _kind(
        r"Duplicate GPU detected : rank (?P<a>\d+) and rank (?P<b>\d+) both on CUDA device \w+",
        Cause.SAME_GPU,
        "ranks {a} and {b} use the same GPU",
        "each process takes its own: torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), which"
        " session() does; nproc_per_node must not be more than resources.gpus",
    ),
    _kind(
        r"no (?:\w+ )?(?:socket )?interface found|is neither AF_INET"
        r"|Unable to find (?:address for|interface)",
        Cause.INTERFACE,
        "it found no network interface of the name that it was told: {text}",
        "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME must name an interface that the pod has, mostly"
        " eth0: correct them in run.env, or leave them out",
    ),
    _kind(
        r"Mismatched NCCL version detected : rank (?P<a>\d+) version (?P<x>\d+)"
        r" rank (?P<b>\d+) version (?P<y>\d+)",
        Cause.NCCL_VERSION,
        "rank {a} has NCCL {x}, rank {b} has {y}",
        "run the same image in every replica, by its digest; a tag that was moved, or a node with"
        " an older copy, gives two",
    ),
    _kind(
        r"Error while creating shared memory segment|posix_fallocate failed|failed to extend"
        r" /dev/shm|out of shared memory|unable to (?:write to|mmap \d+ bytes from) file </torch"
        r"|/dev/shm.*No space left",
        Cause.SHARED_MEMORY,
        "its shared memory (/dev/shm) is full: {text}",
        _SHARED_MEMORY,
    ),
    _kind(
        r"DataLoader worker .* is killed by signal: Killed",
        Cause.MEMORY,
        "the kernel killed a data loader's process: the container's memory was used up",
        "raise resources.memory, or use fewer data loader workers",
    ),
    _kind(
        r"driver version is insufficient|driver on your system is too old|Found no NVIDIA driver"
        r"|no CUDA-capable device|nvidia-container-cli: .*|CUDA driver initialization failed",
        Cause.GPU_DRIVER,
        "it cannot use the GPU driver: {text}",
        "take a base image whose CUDA its node's driver knows (the first line of nvidia-smi says"
        " which), and see that the job asks for GPUs (resources.gpus)",
        "see whether this machine has a GPU and a driver (nvidia-smi), and whether torch is built"
        " for that driver; without a GPU let the script use the CPU (torch.device('cpu'))",
        raised=True,
    ),
    _kind(
        r"uncorrectable (?:ECC|NVLink) error|fallen off the bus|hardware stack error",
        Cause.GPU_FAULT,
        "a GPU of its node fails: {text}",
        "have the node taken out (kubectl cordon NODE) and looked at; the job goes on elsewhere",
        "restart this machine, or have its GPU looked at: nvidia-smi -q",
    ),
    _kind(
        r"ibv_reg_(?:dmabuf_)?mr\w* failed.*|(?:nvidia_peermem|nv_peer_mem).*not loaded",
        Cause.INFINIBAND,
        "InfiniBand could not register memory: {text}",
        "the container needs the capability IPC_LOCK and its node an unlimited memlock; for memory"
        " of GPUs nvidia_peermem or DMA-BUF (NCCL_NET_GDR_LEVEL=LOC in run.env does without)",
    ),
    _kind(
        r"NET/IBP? ?: ?Got completion from peer (?P<peer>\S+) with (?:status=|error )(?P<n>\d+)",
        Cause.INFINIBAND,
        "InfiniBand lost the way to {peer} (completion error {n})",
        "have the fabric between these nodes looked at; with RoCE NCCL_IB_GID_INDEX must suit;"
        " NCCL_IB_DISABLE=1 in run.env shows whether it is InfiniBand at all",
    ),
    _kind(
        r"Call to ibv_\w+ failed.*",
        Cause.INFINIBAND,
        "InfiniBand fails: {text}",
        "see that the pod has the device (resources.extended: rdma/...), and that NCCL_IB_HCA and"
        " NCCL_IB_GID_INDEX suit it; NCCL_IB_DISABLE=1 in run.env does without",
    ),
    _kind(
        r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<seq>\d+),"
        r" OpType=(?P<op>\w+).*ran for (?P<ms>\d+) milliseconds",
        Cause.COLLECTIVE_TIMEOUT,
        "it waited {seconds} s in the collective {op}, number {seq}; not every rank came to it",
        "see what the ranks that did not come were doing: a data loader without end, another number"
        " of steps, a save by one rank alone; if it may take so long, raise run.collective_timeout",
    ),
    _kind(
        r"Timed out waiting (?P<ms>\d+)ms for (?P<op>send|recv) operation",
        Cause.COLLECTIVE_TIMEOUT,
        "it waited {seconds} s for another rank ({op})",
        "see what the other ranks were doing then; if it may take so long, raise"
        " run.collective_timeout",
    ),
    _kind(
        r"Timed out after (?P<s>\d+) seconds waiting for clients\. (?P<here>\d+)/(?P<all>\d+)"
        r" clients joined",
        Cause.RENDEZVOUS,
        "{here} of {all} processes came to the meeting in {s} s",
        "WORLD_SIZE must be the number of processes that really start (nproc_per_node in each"
        " replica); then see why the others did not come",
    ),
    _kind(
        r"client socket has (?:timed out|failed) .*?connect(?:ing)? to [\[(]?(?P<where>[^\s,\])]+)"
        r"[,\]):]+ ?(?P<port>\d+)",
        Cause.RENDEZVOUS,
        "it could not connect to {where}, port {port}",
        "see whether that replica runs and listens; a NetworkPolicy or a sidecar"
        ' (sidecar.istio.io/inject: "false" turns one off) may stand between them',
        "see whether that replica runs and listens",
    ),
    _kind(
        r"network addresses of \((?P<where>[^\s,)]+), ?\d+\) cannot be retrieved",
        Cause.RENDEZVOUS,
        "the name {where} could not be found",
        "a replica's name can be found while its pod is ready: see whether the Master runs, and the"
        " cluster's DNS",
        "see the name, and whether this machine can resolve it",
    ),
    _kind(
        r"(?:Name or service not known|Temporary failure in name resolution|nodename nor servname)",
        Cause.RENDEZVOUS,
        "a host's name could not be found: {text}",
        "a replica's name can be found while its pod is ready: see whether the Master runs, and the"
        " cluster's DNS; for a host outside the cluster, see whether pods may reach it",
        "see the name, and whether this machine can resolve it",
        raised=True,
    ),
    _kind(
        r"Address already in use|EADDRINUSE",
        Cause.ADDRESS_IN_USE,
        "a port that it wanted to listen on is taken: {text}",
        "take the port from MASTER_PORT, or 0 for a free one, instead of a fixed number",
        raised=True,
    ),
)
_BETWEEN_RANKS: Final = re.compile(r"NCCL|nccl|gloo|c10d|ProcessGroup|Dist\w*Error")
"""In an exception's text: what NCCL or gloo wrote before it may say more."""
_NCCL: Final = re.compile(
    r"NCCL error.*?(unhandled (?:system|cuda) error|internal error|invalid usage|remote .*error)"
)
_LAST_ERROR: Final = "Last error:"
_WATCHDOG: Final = re.compile(r"\[Rank (\d+)\] Watchdog caught collective operation timeout")


def explained(account: Account, *, local: bool) -> Told | None:
    """What a container's own words say about its end; None where they say nothing that is known.

    Args:
        account: the words.
        local: whether it ran on this machine.
    """
    if not account.error:
        return spoken_of(account.context, local=local) or _other_nccl_error(account.context)
    if told := _first(_KINDS, account.error, local=local):
        return told
    if not any(_BETWEEN_RANKS.search(line) for line in account.error):
        return None
    lines = [*account.error, *account.context]
    return spoken_of(lines, local=local) or _other_nccl_error(lines)


def spoken_of(lines: Sequence[str], *, local: bool) -> Told | None:
    """The trouble between ranks that some lines tell, the most telling first; None for none."""
    return _first([kind for kind in _KINDS if not kind.raised], lines, local=local)


def _first(kinds: Iterable[_Kind], lines: Sequence[str], *, local: bool) -> Told | None:
    for kind in kinds:
        for line in lines:
            if found := kind.pattern.search(line):
                groups = {**found.groupdict(), "text": _plain(line)}
                if "ms" in groups:
                    groups["seconds"] = str(round(int(groups["ms"]) / 1000))
                step = (local and kind.here) or kind.step
                return Told(kind.cause, _filled(kind.what, groups), _filled(step, groups))
    return None


def _filled(text: str, groups: Mapping[str, str]) -> str:
    return text.format_map(groups) if "{" in text else text


def _other_nccl_error(lines: Sequence[str]) -> Told | None:
    """An NCCL error of no known sort, with what NCCL itself calls the last error."""
    found = next((found for line in lines if (found := _NCCL.search(line))), None)
    if found is None:
        return None
    after = next((n + 1 for n, line in enumerate(lines) if line.endswith(_LAST_ERROR)), len(lines))
    last = f": {_plain(lines[after])}" if after < len(lines) else ""
    return Told(
        Cause.NCCL,
        f"NCCL failed: {found[1]}{last}",
        "NCCL_DEBUG=WARN in run.env makes NCCL say what it was",
    )


def timed_out_ranks(lines: Iterable[str]) -> set[int]:
    """The ranks whose watchdog saw a collective time out."""
    return {int(found[1]) for line in lines if (found := _WATCHDOG.search(line))}


def _plain(line: str) -> str:
    """A log line without what stands in front of NCCL's and torch's own words."""
    line = re.sub(
        r"^(?:\[\w+\]:\s*)?(?:\S+:\d+:\d+ \[\d+\] )?(?:\S+\.\w+:\d+ )?NCCL WARN ", "", line
    )
    return re.sub(r"^(?:\[\w+\]:\s*)?(?:[\w.]+Error: )?", "", line).strip()
