"""Completion: the words that are offered, and what real shells make of them."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from clusters import kubeconfig

READY = {
    "bash": 'source <("$PYTHON" -m k8sjob completion bash)',
    "zsh": "autoload -U compinit && compinit -u -D; source <($PYTHON -m k8sjob completion zsh)",
}
START = {"bash": ["--norc", "--noprofile", "-i"], "zsh": ["-f", "-i"]}
TYPED = {
    "k8sjob rend": "k8sjob render ",
    "k8sjob run --set replicas.wor": "k8sjob run --set replicas.workers=",
    "k8sjob diff --set strategy.bf16=t": "k8sjob diff --set strategy.bf16=true ",
    "k8sjob run --set=target=trai": "k8sjob run --set=target=trainjob ",
}
"""What is typed before the tab, and what is there after it."""


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("k8sjob rer", [["word", "rerun"]]),
        ("k8sjob res", [["word", "resume"]]),
        ("k8sjob run --set replicas.w", [["part", "replicas.workers="]]),
        ("k8sjob run --set=replicas.w", [["part", "--set=replicas.workers="]]),
        ("k8sjob run --set target=job", [["word", "target=job"], ["word", "target=jobset"]]),
        ("k8sjob diff --set strategy.sync_batchnorm=t", [["word", "strategy.sync_batchnorm=true"]]),
        ("k8sjob submit --target train", [["word", "trainjob"]]),
        ("k8sjob submit --set nothing=", []),
        ("k8sjob validate ", [["file", ""]]),
        ("k8sjob validate ~/jo", [["file", "~/jo"]]),
        ("k8sjob validate $HOME/my\\ jobs/", [["file", "$HOME/my jobs/"]]),
        ("k8sjob run --set 'unfinished", []),
        ("k8sjob --vers", [["word", "--version"]]),
    ],
)
def test_what_is_offered(complete, line, offered):
    assert complete(line) == offered


def test_namespaces_of_the_kubeconfig_and_of_the_cluster(api, complete, tmp_path):
    api.namespaces = ("green", "red")
    file = str(tmp_path / "fake.kubeconfig")
    for _ in range(20):  # a cluster that does not respond at once has none
        candidates = complete("k8sjob list -n ", KUBECONFIG=file)
        if len(candidates) > 1:
            break
    assert candidates == [["word", "blue"], ["word", "green"], ["word", "red"]]


@pytest.mark.parametrize("line", ["list -n", "status"])
@pytest.mark.parametrize(
    "how",
    [
        {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never"}},
        {"auth-provider": {"name": "gcp", "config": {"cmd-args": "now", "expiry": "2020-01-01"}}},
    ],
    ids=lambda how: next(iter(how)),
)
def test_a_tab_runs_no_program_of_a_kubeconfig(tmp_path, complete, line, how):
    plugin = tmp_path / "plugin"
    plugin.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\necho {{}}\n")
    plugin.chmod(0o755)
    for part in (how.get("exec"), how.get("auth-provider", {}).get("config")):
        if part is not None:
            part["command" if "exec" in how else "cmd-path"] = str(plugin)
    file = kubeconfig(tmp_path, "http://127.0.0.1:9")
    config = yaml.safe_load(file.read_text())
    config["users"][0]["user"] = how
    file.write_text(yaml.safe_dump(config))
    offered = complete(f"k8sjob {line} ", KUBECONFIG=str(file))
    assert not (tmp_path / "ran").exists()
    assert offered == ([["word", "blue"]] if line.endswith("-n") else [])


def test_a_word_that_a_shell_would_expand_is_not_offered(tmp_path, complete):
    names = ["plain", "arn:aws:eks:eu-1:12:cluster/one", "a@b.c", "한글"]
    odd = ["$(touch x)", "`x`", "a;b", "a b", "a\tb", "a\nb", "!!", "~root", "*", "'q", "a|b", ">f"]
    contexts = [{"name": name, "context": {"namespace": name}} for name in (*names, *odd)]
    file = tmp_path / "config"
    file.write_text(yaml.safe_dump({"contexts": contexts}, allow_unicode=True))
    assert complete("k8sjob list --context ", KUBECONFIG=str(file)) == [
        ["word", name] for name in sorted(names)
    ]
    assert complete("k8sjob list -n ", KUBECONFIG=str(file)) == [
        ["word", name] for name in sorted(names)
    ]


def test_kubectl_is_answered_in_its_own_form(tmp_path):
    def asked(*args):
        done = subprocess.run(
            [sys.executable, "-c", "from k8sjob.cli.completion import main; main()", *args],
            env={**os.environ, "K8SJOB_STATE": str(tmp_path), "KUBECONFIG": "/no/such"},
            check=True,
            capture_output=True,
            text=True,
        )
        assert done.stderr == ""
        return done.stdout.split()

    assert asked("rend") == ["render", ":4"]
    assert asked("run", "--set", "replicas.w") == ["replicas.workers=", ":6"]
    assert asked("validate", "") == [":0"]
    assert asked("validate", "./jo") == [":0"]


@pytest.fixture
def shell(tmp_path):
    """Starts a shell in whose environment k8sjob is this one: its path and the environment."""

    def found(name):
        program = shutil.which(name) or pytest.skip(f"{name} is not installed")
        (tmp_path / "bin").mkdir()
        script = tmp_path / "bin/k8sjob"
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m k8sjob "$@"\n')
        script.chmod(0o755)
        return program, {
            "PATH": f"{script.parent}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "PYTHON": sys.executable,
            "K8SJOB_STATE": str(tmp_path / "state"),
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "TERM": "dumb",
            "PS1": "$ ",
        }

    return found


@pytest.mark.parametrize("name", READY)
def test_in_a_terminal(name, shell, tmp_path):
    program, env = shell(name)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [program, *START[name]],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=env,
        cwd=tmp_path,
        start_new_session=True,
    )
    try:
        send(ours, f"{READY[name]}; touch ready\r")
        wait(ours, lambda _: (tmp_path / "ready").exists())
        for number, (typed, becomes) in enumerate(TYPED.items()):
            result = tmp_path / f"result{number}"
            send(ours, f"{typed}\t")
            rest = becomes.removeprefix(typed).strip()
            seen = wait(ours, lambda seen, rest=rest: rest in seen.rpartition("set")[2])
            time.sleep(0.3)  # the space after it
            send(ours, f"X\x01echo '\x05' > {result.name}\r")  # all that is typed, as one word
            seen += wait(ours, lambda _, result=result: result.exists() and result.stat().st_size)
            assert result.read_text().rstrip("\n") == f"{becomes}X", seen
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def test_in_fish(shell):
    program, env = shell("fish")
    asks = "".join(f"complete -C '{line}';" for line in TYPED)
    script = f"$PYTHON -m k8sjob completion fish | source; {asks}"
    done = subprocess.run(
        [program, "--no-config", "-c", script],
        env=env,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    offered = [line.partition("\t")[0] for line in done.stdout.splitlines()]
    assert offered[:3] == ["render", "replicas.workers=", "strategy.bf16=true"]
    assert offered[3:] == ["--set=target=trainjob"]


def send(terminal, text):
    os.write(terminal, text.encode())


def wait(terminal, done, seconds=30):
    """Reads what the terminal shows until it is done; what was read."""
    seen, end = "", time.monotonic() + seconds
    while not done(seen) and time.monotonic() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            seen += os.read(terminal, 4096).decode(errors="replace")
    return seen
