"""The output of replicas on a real cluster: nothing that a node still has is lost or repeated."""

import itertools
import json
import random
import re
import threading
from pathlib import Path

import pytest

from k8sjob.backends.cluster import connect
from k8sjob.observe.status import JobState, job_status

pytestmark = pytest.mark.cluster

# Prints numbers, on both streams, as fast as it is told to.
COUNT = """
import sys, time
for i in range({count}):
    print(i, file=sys.stderr if i % 5 == 0 else sys.stdout, flush=True)
    time.sleep({apart})
"""


def python(code, **values):
    return ["python3", "-c", code.format(**values)]


def shell(script):
    return ["sh", "-c", script]


@pytest.fixture
def command(desk):
    """Runs `k8sjob ...` in the test's namespace; stdout and stderr."""
    return lambda *args, code=0: desk.call(*args, "-n", desk.namespace, code=code)


def texts(lines):
    return [line.text for line in lines]


def cutting(proxy, seed):
    """Cuts the proxy's connections every now and then, and keeps it down for a while; a switch."""
    over, chance = threading.Event(), random.Random(seed)

    def run():
        while not over.wait(chance.uniform(0.3, 1.5)):
            proxy.cut()
            if chance.random() < 0.3:
                proxy.up = False
                over.wait(1.5)
                proxy.cut()
                proxy.up = True

    threading.Thread(target=run, daemon=True).start()
    return over


@pytest.mark.parametrize("client", ["python", "kubectl"])
def test_connections_that_are_cut_lose_and_repeat_no_line(
    created, cluster, proxy, client, monkeypatch
):
    monkeypatch.setenv("PATH", cluster.env["PATH"])
    direct, ref = created("cut", python(COUNT, count=1500, apart=0.006))
    through = connect(kubeconfig=proxy.kubeconfig, namespace=ref.namespace, client=client)
    over = cutting(proxy, seed=client)
    lines = list(through.logs(ref, "master-0", follow=True))
    over.set()
    assert proxy.cuts > 1
    kept = list(direct.logs(ref, "master-0"))  # as the node's file has them
    assert sorted(map(int, texts(kept))) == list(range(1500))
    assert lines == kept


def test_containers_started_again_are_attempts_of_one_output(created):
    script = """
    echo x >> /scratch/starts; n=$(wc -l < /scratch/starts)
    for i in $(seq 200); do echo $n $i; done
    [ $n = 3 ] || exit 1
    """
    backend, ref = created("again", shell(script), policy="OnFailure")
    lines = list(backend.logs(ref, "master-0", follow=True))
    numbers = itertools.product((1, 2, 3), range(1, 201))
    written = [(start - 1, f"{start} {i}") for start, i in numbers]
    assert [(line.attempt, line.text) for line in lines] == written
    # Two starts are kept by the node; which of them it gives depends on how the last one stands.
    kept = texts(backend.logs(ref, "master-0"))
    assert [text for text in kept if text.startswith("3 ")] == [f"3 {i}" for i in range(1, 201)]
    assert kept[0] == (
        "k8sjob: master-0: output of attempt 0 is missing here: its node has not kept it"
    )


@pytest.mark.slow
def test_a_log_that_is_rotated_while_it_is_followed(created):
    code = """
import time
for i in range({count}):
    print(f"{{i:06}}", "x" * 1000, flush=True)
    if i % 500 == 0: time.sleep({apart})
"""
    count = 30_000  # three rotations
    backend, ref = created("rotated", python(code, count=count, apart=0.4))
    lines = texts(backend.logs(ref, "master-0", follow=True))
    numbers = [int(text[:6]) for text in lines if re.fullmatch(r"\d{6} x{1000}", text)]
    # What a runtime writes to the old file at the very moment may never be read by its kubelet.
    places = [(a, b) for a, b in itertools.pairwise([*numbers, count]) if b != a + 1]
    assert numbers[0] == 0
    assert all(0 < b - a < 100 for a, b in places), places
    assert len(places) <= 3, places


def test_the_command(created, eventually, command, tmp_path):
    """Of a job whose Master runs for the second time and goes on, and whose Worker has written."""
    script = """
    echo x >> /scratch/starts; n=$(wc -l < /scratch/starts)
    for i in 1 2 3; do echo $n.$i; done
    [ $n = 1 ] && exit 1
    sleep 600
    """
    backend, ref = created("two", shell(script), shell("echo w; sleep 600"), policy="OnFailure")
    eventually(lambda: "2.3" in texts(backend.logs(ref, "master-0")), "the second attempt")
    eventually(lambda: "w" in texts(backend.logs(ref, "worker-0")), "the worker")
    master = ("logs", "two", "-r", "master")
    out, _ = command("logs", "two")
    assert sorted(out.splitlines()) == sorted(
        [f"master-0 | {n}.{i}" for n in (1, 2) for i in (1, 2, 3)] + ["worker-0 | w"]
    )
    assert command("logs", "two", "--rank", "1")[0] == "w\n"
    assert command(*master, "--tail", "4")[0] == "1.3\n2.1\n2.2\n2.3\n"
    assert command(*master, "--previous")[0] == "1.1\n1.2\n1.3\n"
    assert command(*master, "--since", "1h")[0].count("\n") == 6
    _, err = command("logs", "two", "-r", "worker", "--previous", code=1)
    assert "worker-0 was started only once" in err
    timed = command(*master, "--timestamps")[0].splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT[\d:]+\.\d{9}Z \d\.\d$", line) for line in timed)
    saved = command("logs", "two", "--save", tmp_path / "saved")[0].splitlines()
    names = ("two-master-0.0.log", "two-master-0.1.log", "two-worker-0.0.log")
    assert sorted(saved) == [str(tmp_path / "saved" / name) for name in names]
    assert (tmp_path / "saved" / names[1]).read_text() == "2.1\n2.2\n2.3\n"
    record = json.loads(command(*master, "--tail", "1", "-o", "json")[0])
    assert (record["replica"], record["attempt"], record["text"]) == ("master-0", 1, "2.3")


def test_saved_output_outlives_its_pod(created, command, cluster, eventually, tmp_path):
    script = "trap 'exit 143' TERM; cat /proc/sys/kernel/random/uuid; sleep 600 & wait"
    _, ref = created("kept", shell("sleep 600"), shell(script), policy="ExitCode")
    worker = ("logs", "kept", "-r", "worker")
    before = eventually(lambda: command(*worker)[0], "the first pod's line")
    assert command(*worker, "--save", tmp_path)[0] == f"{tmp_path}/kept-worker-0.0.log\n"
    cluster.delete("pods", "kept-worker-0", ref.namespace)

    def anew():
        now = command(*worker)[0]
        return now if re.fullmatch(r"[-0-9a-f]{36}\n", now) and now != before else ""

    after = eventually(anew, "the second pod's line")
    assert command(*worker, "--save", tmp_path)[0] == f"{tmp_path}/kept-worker-0.0-2.log\n"
    assert (tmp_path / "kept-worker-0.0.log").read_text() == before
    assert (tmp_path / "kept-worker-0.0-2.log").read_text() == after


def test_saved_bytes_are_those_that_were_written(created, command, eventually, tmp_path):
    backend, ref = created("bytes", shell(r"printf 'a\rb\n\377\376\n\303\274 no newline'"))
    eventually(lambda: job_status(backend.snapshot(ref)).state is JobState.SUCCEEDED, "the end")
    (path,) = command("logs", "bytes", "--save", tmp_path)[0].splitlines()
    assert Path(path).read_bytes() == b"a\rb\n\xff\xfe\n\xc3\xbc no newline"
    last = json.loads(command("logs", "bytes", "--tail", "1", "-o", "json")[0])
    assert (last["text"], last["gap"]) == ("ü no newline", False)


# Colors, a title, the clipboard, a line that hides itself, and markup of terminals' libraries.
HOSTILE = r"\033[31mred \033]0;title\007 \033]52;c;aGk=\007 gone\rback [bold]x[/] \u202eabc"


def test_hostile_text_shows_as_text(created, command, cluster, eventually, get):
    script = f"""
    printf '{HOSTILE}\\n'
    printf '{HOSTILE}' > /dev/termination-log
    sleep 3; exit 1
    """
    _, ref = created("hostile", shell(script))
    pod = eventually(lambda: get("pods", "hostile-master-0"), "the pod")
    detail = "\x1b[2J\x1b]0;title\x07[red]wiped[/red]"
    event = {
        "kind": "Event",
        "metadata": {"name": "hostile", "namespace": ref.namespace},
        "involvedObject": {
            "kind": "Pod",
            "name": "hostile-master-0",
            "namespace": ref.namespace,
            "uid": pod["metadata"]["uid"],
        },
        "type": "Warning",
        "reason": "Odd",
        "message": detail,
    }
    cluster.create(event, ref.namespace)
    watched, _ = command("watch", "hostile", "-o", "plain", code=100)
    assert "warning: [red]wiped[/red]" in watched
    assert "master-0 | back [bold]x[/] " in watched
    for args in (("logs", "hostile"), ("why", "hostile"), ("status", "hostile")):
        shown, _ = command(*args)
        assert shown
        watched += shown
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", watched)
