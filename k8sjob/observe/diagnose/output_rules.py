"""Rules that recognize a cause in a container's output, the most telling one first.

The texts are those of NCCL 2.7 to 2.28 and torch 2.0 to 2.15, as they appear in logs.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k8sjob.observe.diagnose.finding import Cause, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

_OF_TORCH: Final = r"\w*(?:Runtime|OutOfMemory|Accelerator|ResourceExhausted)Error|Dist\w*Error"
"""The classes of exceptions that torch, or jax, raises for what fails below it."""

DOWNLOAD: Final = Rule(
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


def _of_scripts() -> Iterator[Rule]:
    text = Path(__file__).with_name("script_errors.toml").read_text(encoding="utf-8")
    for fields in tomllib.loads(text)["rule"]:
        cause = Cause(fields.pop("cause", Cause.CRASH))
        yield Rule(cause=cause, **{"exception_only": True, **fields})


RULES: Final = (
    Rule(
        r"No module named '?k8sjob\b",
        Cause.MISSING_MODULE,
        "its image does not contain k8sjob's runtime",
        "let k8sjob add it: `image: {{repository: ..., base: THIS IMAGE}}`, and submit again; or"
        " start the script with run.command",
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
        r"lib(?:cuda|nvidia-ml)\.so\.1: cannot open shared object file",
        Cause.GPU_DRIVER,
        "it needs the GPU driver, and the container has none: {text}",
        "request GPUs (resources.gpus), or use packages that are built for CPUs",
        "run it on a machine with a GPU and its driver, or use packages that are built for CPUs",
        exception_only=True,
        types="ImportError|OSError",
    ),
    Rule(
        r"(?<![\w.+-])(?P<library>lib(?:cu|nccl|nvrtc|nvToolsExt|torch|c10)[\w.+-]*): cannot open"
        " shared object file",
        Cause.MISSING_MODULE,
        "there is no library {library}: a package was built for another CUDA or torch",
        "install the package's build for the torch of the image, and import torch before it",
        "install the package's build for the torch that is installed, and import torch before it",
        exception_only=True,
        types="ImportError|OSError",
    ),
    Rule(
        r"(?<![\w.+-])(?P<library>lib[\w.+-]+): cannot open shared object file",
        Cause.MISSING_MODULE,
        "there is no library {library}",
        "add Debian's package that has it to image.apt (libGL.so.1: libgl1), or use a base image"
        " with it",
        "install the package that has it on this machine",
        exception_only=True,
        types="ImportError|OSError",
    ),
    Rule(
        r"undefined symbol: _ZNK?(?:2at|3c10|5torch)\w*",
        Cause.MISSING_MODULE,
        "an extension was built for another version of torch: {text}",
        "install the extension's build for the torch of the image, or build it in the image",
        "install the extension's build for the torch that is installed here, or build it again",
        exception_only=True,
        types="ImportError|OSError",
    ),
    Rule(
        r"Failed to find C compiler",
        Cause.MISSING_MODULE,
        "there is no C compiler, which torch.compile and Triton need",
        "add gcc to image.apt, or use a base image with it",
        "install gcc on this machine",
        exception_only=True,
    ),
    Rule(
        r"(?i:CUDA(?: error:)? out of memory)|^[\w.]*OutOfMemoryError\b"
        r"|(?:CUBLAS|CUDNN|CUSOLVER|CUFFT)_STATUS_ALLOC_FAILED"
        r"|Failed to CUDA \w+(?: async)? \d+ bytes|Cuda failure \d+ 'out of memory'"
        r"|RESOURCE_EXHAUSTED: .*[Oo]ut of mem",
        Cause.GPU_MEMORY,
        "out of GPU memory: {text}",
        "make the batch smaller and raise strategy.accumulate by the same factor: the result is the"
        " same",
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
        " eth0: correct them in run.env, or remove them",
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
        r"|/dev/shm.*No space left|No space left on device: '/dev/shm"
        r"|unable to allocate shared memory\(shm\) for file"
        r"|unable to open shared memory object <[^>]*>.*No space left",
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
        r"Error 802: system not yet initialized|device\(s\) is/are busy or unavailable",
        Cause.GPU_FAULT,
        "a GPU of its node cannot be used: {text}",
        "have the node checked: another process may hold the GPU, and with NVSwitch its fabric"
        " manager must run; if it is cordoned (kubectl cordon NODE), the job continues on others",
        "check which processes use this machine's GPU, and with NVSwitch its fabric manager:"
        " nvidia-smi",
        exception_only=True,
        types=_OF_TORCH,
    ),
    Rule(
        r"driver version is insufficient|driver on your system is too old|Found no NVIDIA driver"
        r"|no CUDA-capable device|nvidia-container-cli: .*|CUDA driver initialization failed",
        Cause.GPU_DRIVER,
        "it cannot use the GPU driver: {text}",
        "use a base image whose CUDA the node's driver supports (see the first line of"
        " nvidia-smi), and check that the job requests GPUs (resources.gpus)",
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
        "request GPUs (resources.gpus) and use a base image with CUDA, or let the script use the"
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
        "most often an index is outside its tensor, such as a token that the embedding does not"
        " have: the line where the error appears may be a later one; with CUDA_LAUNCH_BLOCKING: '1'"
        " in run.env, or on a CPU (resources.gpus: 0), it is the right one",
    ),
    Rule(
        r"CUDA error: (?P<error>an illegal memory access was encountered|misaligned address"
        r"|an illegal instruction was encountered|unspecified launch failure)",
        Cause.CRASH,
        "a kernel failed on the GPU: {error}",
        "usually a custom kernel or an extension, or a tensor of another GPU (call"
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
        "a GPU of its node has failed: {text}",
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
        "have the fabric between these nodes checked; with RoCE NCCL_IB_GID_INDEX must match;"
        " NCCL_IB_DISABLE=1 in run.env shows whether it is InfiniBand at all",
    ),
    Rule(
        r"Call to ibv_\w+ failed.*",
        Cause.INFINIBAND,
        "InfiniBand fails: {text}",
        "check that the pod has the device (resources.extended: rdma/...), and that NCCL_IB_HCA and"
        " NCCL_IB_GID_INDEX match it; NCCL_IB_DISABLE=1 in run.env avoids InfiniBand",
    ),
    Rule(
        r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<seq>\d+),"
        r" OpType=(?P<op>\w+).*ran for (?P<ms>\d+) milliseconds",
        Cause.COLLECTIVE_TIMEOUT,
        "it waited {seconds} s in the collective {op}, number {seq}; not every rank reached it",
        "see what the ranks that did not reach it were doing: an endless data loader, another"
        " number of steps, a save by only one rank; if it may take that long, raise"
        " run.collective_timeout",
    ),
    Rule(
        r"retrieving ncclUniqueId from \[(?P<rank>\d+)\].*[Tt]ime(?:out|d out)",
        Cause.COLLECTIVE_TIMEOUT,
        "rank {rank} did not reach the first collective in time",
        "see what rank {rank} was doing then: preparing data, or a collective of fewer ranks; if it"
        " may take that long, raise run.collective_timeout",
    ),
    Rule(
        r"Application timeout caused pair closure",
        Cause.COLLECTIVE_TIMEOUT,
        "it waited for another rank in a collective until its timeout: {text}",
        "see what the other ranks were doing then; if it may take that long, raise"
        " run.collective_timeout",
    ),
    Rule(
        r"Ranks? (?P<ranks>\d+(?:, ?\d+)*) (?:failed to pass|timed out in) monitoredBarrier",
        Cause.COLLECTIVE_TIMEOUT,
        "rank {ranks} did not reach a monitored_barrier in time: {text}",
        "see what that rank was doing then; if it may take that long, raise the timeout of the"
        " monitored_barrier",
    ),
    Rule(
        r"op\.preamble\.length <= op\.nbytes\. (?P<sent>\d+) vs (?P<fits>\d+)",
        Cause.COLLECTIVE_MISMATCH,
        "another rank sent {sent} bytes where a collective of this one expects {fits}: the ranks"
        " made different calls, or passed tensors of different shapes or dtypes",
        "all ranks must make the same calls in the same order, with tensors of the same shape and"
        " dtype; TORCH_DISTRIBUTED_DEBUG=DETAIL in run.env lets torch name the calls",
    ),
    Rule(
        r"Timed out waiting (?P<ms>\d+)ms for (?P<op>send|recv) operation",
        Cause.COLLECTIVE_TIMEOUT,
        "it waited {seconds} s for another rank ({op})",
        "see what the other ranks were doing then; if it may take that long, raise"
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
        r"use_libuv was requested but PyTorch was buil[dt] without libuv",
        Cause.CONFIGURATION,
        "its torch is built without libuv, which the store of a process group uses by default",
        "use a base image whose torch has libuv; USE_LIBUV=0 in run.env is enough for a script, but"
        " torchrun's own store ignores it",
        exception_only=True,
    ),
    Rule(
        r"^[\w.]*Rendezvous(?:Timeout|Connection|Closed)Error\b",
        Cause.RENDEZVOUS,
        "its rendezvous did not complete: {text}",
        "check whether all replicas run, with the same number of nodes, id and endpoint for"
        " torchrun; a NetworkPolicy or a sidecar may block the connection",
        "check whether all of them run, with the same number of nodes, id and endpoint",
        exception_only=True,
    ),
    Rule(
        r"connectFullMesh failed|pair\.cc:\d+\] connect \[",
        Cause.RENDEZVOUS,
        "gloo could not connect the ranks to each other: {text}",
        "the ranks connect to the address of each one's host name: a NetworkPolicy may block it, or"
        " the name may resolve to 127.0.x.x (then set GLOO_SOCKET_IFNAME in run.env)",
        "this machine's name may resolve to 127.0.x.x: set GLOO_SOCKET_IFNAME in run.env",
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
        r"Address already in use|EADDRINUSE",
        Cause.ADDRESS_IN_USE,
        "a port that it tried to listen on is in use: {text}",
        "use the port in MASTER_PORT, or 0 for a free one, instead of a fixed number",
        exception_only=True,
        types=_OF_TORCH,
    ),
    Rule(
        r"Address already in use|EADDRINUSE",
        Cause.ADDRESS_IN_USE,
        "a port that it tried to listen on is in use: {text}",
        "let that server listen on port 0, which selects a free one; of several processes on one"
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
        "request GPUs (resources.gpus), or let the script choose gloo if there is none:"
        " init_process_group('nccl' if torch.cuda.is_available() else 'gloo')",
        "let the script choose gloo where there is no GPU:"
        " init_process_group('nccl' if torch.cuda.is_available() else 'gloo')",
        exception_only=True,
    ),
    *_of_scripts(),
)
