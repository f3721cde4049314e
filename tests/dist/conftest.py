"""Real ranks: processes with torchrun's variables, meeting on loopback."""

import json
import os
import signal
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from k8sjob.contract import Event, RuntimeConfig
from k8sjob.runtime.agent.fork_server import ForkServer, adopt_orphans
from k8sjob.runtime.base.network import reserve
from k8sjob.runtime.base.termination import read_stacks

PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 120
FAST = {  # what JAX reads as it is imported: half of the time is its compiler's
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


@dataclass
class Outcome:
    codes: list[int]
    outputs: list[str]
    errors: list[str]
    reasons: list[dict]
    events: list[Event] = field(default_factory=list)

    @property
    def result(self):
        """What the program printed after RESULT, on the rank that speaks."""
        found = [text for text in self._lines if text.startswith("RESULT ")]
        assert found, self.errors or self.outputs
        return json.loads(found[-1].removeprefix("RESULT "))

    @property
    def _lines(self):
        return [text for output in self.outputs for text in output.splitlines()]

    def told(self, kind):
        return [event.data for event in self.events if event.kind == kind]

    def check_costs(self, alone):
        """What progress tells beside the loss, where `alone` is the same in one process."""
        first, single = (outcome.told("progress")[0] for outcome in (self, alone))
        assert first["grad_norm"] == pytest.approx(single["grad_norm"], rel=1e-4)
        assert "slowest" not in single
        for told in self.told("progress"):
            assert told["grad_norm"] > 0
            assert told["memory_bytes"] > 2**20
            assert told["samples_per_s"] > 0
            assert told["slowest"] in range(len(self.codes))
            assert 0 <= told["wait_s"] <= told["step_s"]


class Process:
    """One rank, forked from a process that has imported what it needs."""

    def __init__(self, forks, argv, env, folder, mark):
        self.paths = {end: folder / f"{end}-{mark}" for end in ("out", "err", "reason")}
        for end in ("out", "err"):
            self.paths[end].touch()
        adopt_orphans()
        env = {**env, "K8SJOB_ERROR_FILE": str(self.paths["reason"])}
        self.pid = forks.start([str(self.paths["out"]), str(self.paths["err"]), *argv], env)
        adopt_orphans(adopts=False)
        assert forks.ready, "no rank can be forked"
        self._code = None

    @property
    def code(self):
        """The exit code, -N for a signal; None while it runs."""
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code

    def read(self, end):
        """What it wrote there; to "err" belong the stacks of a fatal error."""
        text = self.paths[end].read_text() if self.paths[end].exists() else ""
        return text + read_stacks(self.paths["reason"]) if end == "err" else text

    def wait(self, timeout):
        until = time.monotonic() + timeout
        while self.code is None:
            if time.monotonic() > until:
                os.kill(self.pid, signal.SIGABRT)  # faulthandler writes the stacks
                time.sleep(1)
                raise TimeoutError(f"pid {self.pid} still ran: {self.read('err')}")
            time.sleep(0.01)


class Ranks:
    """A group of processes that runs; the port is held for it as the supervisor holds it."""

    def __init__(
        self, zygote, folder, asked=None, *, program="train.py", world=2, env=None, missing=(),
        restart=0, **config,
    ):  # fmt: skip
        self.folder, self._zygote, self._world, self._env = folder, zygote, world, env or {}
        self._argv = [str(PROGRAMS / program), json.dumps(asked or {})]
        self._config = {"rendezvous_timeout": 60.0, "collective_timeout": 60.0, **config}
        self._holder = reserve("127.0.0.1")
        self.port = self._holder.getsockname()[1]
        self.processes = {
            rank: self.start(rank, restart) for rank in range(world) if rank not in missing
        }

    def start(self, rank, restart=0):
        env = {
            **{key: value for key, value in os.environ.items() if not key.startswith("K8SJOB_")},
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._world),
            "LOCAL_WORLD_SIZE": str(self._world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "PYTHONHASHSEED": "0",
            "TORCHELASTIC_RESTART_COUNT": str(restart),
            "TF_CPP_MIN_LOG_LEVEL": "2",  # JAX's
            "K8SJOB_CONFIG": RuntimeConfig(**self._config).encode(),
            **{key: value.replace("{rank}", str(rank)) for key, value in self._env.items()},
        }
        mark = f"{rank}-{time.monotonic_ns()}"
        return Process(self._zygote(env), self._argv, env, self.folder, mark)

    def await_text(self, rank, text, timeout=LIMIT_S):
        """Wait until a rank has printed something."""
        process, until = self.processes[rank], time.monotonic() + timeout
        while text not in process.read("out"):
            assert process.code is None, process.read("err")
            assert time.monotonic() < until, f"rank {rank} never printed {text!r}"
            time.sleep(0.01)

    def await_event(self, kind, timeout=LIMIT_S):
        self.await_text(0, f'"kind":"{kind}"', timeout)

    def signal(self, rank, number=signal.SIGTERM):
        os.kill(self.processes[rank].pid, number)

    def finish(self, timeout=LIMIT_S):
        """Wait for all; fail if one still runs."""
        until = time.monotonic() + timeout
        ended = [self.processes[rank] for rank in sorted(self.processes)]
        for process in ended:
            process.wait(until - time.monotonic())
        self.close()
        outputs = [process.read("out") for process in ended]
        events = [Event.decode(line) for output in outputs for line in output.splitlines()]
        return Outcome(
            codes=[process.code for process in ended],
            outputs=outputs,
            errors=[process.read("err") for process in ended],
            reasons=[json.loads(process.read("reason") or "null") for process in ended],
            events=[event for event in events if event is not None],
        )

    def close(self):
        for process in self.processes.values():
            if process.code is None:
                os.kill(process.pid, signal.SIGKILL)
                process.wait(60)
        self._holder.close()


@pytest.fixture(scope="session")
def zygote(tmp_path_factory):
    """zygote(env) -> a process that forks ranks, and has imported what takes them seconds.

    One for each environment that Keras reads as it is imported. What JAX compiles is kept.
    """
    fast = {**FAST, "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled"))}
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    with ExitStack() as stack:

        @cache
        def server(*keras):
            modules = ["sklearn.datasets", "torch", "torch._dynamo", "torch.distributed.rpc"]
            environ = {**settings, **(fast if keras else {}), **dict(keras)}
            main = [str(PROGRAMS / "zygote.py")]
            forks = ForkServer([*modules, *["keras"][: len(keras)]], environ, main=main)
            stack.enter_context(forks).settle()
            return forks

        def forks(env):
            keras = sorted(each for each in env.items() if each[0].startswith("KERAS_"))
            return server(*keras) if "KERAS_BACKEND" in env else server()

        yield forks


@contextmanager
def starter(zygote, folder):
    """start(options, world=2, ...) -> Ranks; whatever is left is ended afterwards."""
    begun = []

    def start(*args, **options):
        begun.append(Ranks(zygote, folder, *args, **options))
        return begun[-1]

    yield start
    for ranks in begun:
        ranks.close()


def runner(start):
    """start, run to its end; every rank must succeed."""

    def run(*args, limit=LIMIT_S, **kwargs):
        outcome = start(*args, **kwargs).finish(limit)
        if any(outcome.codes):
            # Not an assertion, of which pytest would show a few words only.
            pytest.fail("\n".join([f"exit codes {outcome.codes}", *outcome.errors]), pytrace=False)
        return outcome

    return run


@pytest.fixture
def start_ranks(tmp_path, zygote):
    with starter(zygote, tmp_path) as start:
        yield start


@pytest.fixture
def run_ranks(start_ranks):
    return runner(start_ranks)


@pytest.fixture(scope="module")
def run_once(tmp_path_factory, zygote):
    """run_ranks, for a result that the tests of a module share."""
    with starter(zygote, tmp_path_factory.mktemp("ranks")) as start:
        yield runner(start)
