"""What the command line changes in a job.yaml, and scripts without one."""

import json
import time

import pytest

SCRIPT = """\
import os, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], *sys.argv[1:])
time.sleep(float(os.environ.get("SLEEP", 0)))
sys.exit("--fail" in sys.argv)
"""
# A command is started as it is: there is no agent, so that no torch is needed.
JOB = "name: x\nimage: r/x:1\nrun: {command: [python, main.py], args: [--epochs, '5']}\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "main.py").write_text(SCRIPT)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def test_fields_and_arguments_are_changed(k8sjob, folder):
    changes = ["--set", "priority_class=high", "--workers", 2, "--name", "yy"]
    done = k8sjob("render", *changes, "--", "--lr", 0.1)
    assert done.code == 0, done.err
    assert "name: yy" in done.out
    assert "replicas: 2" in done.out
    assert done.out.count("priorityClassName: high") == 2  # of the Master and of the Workers
    assert done.out.count("0.1") == 2
    assert k8sjob("validate", "--set", "replicas.workers=4").out.endswith(
        "x, 5 pods, 5 processes\n"
    )
    assert k8sjob("validate", "--set", "nme=y").code == 1
    assert "nme: no such field" in k8sjob("lint", "--set", "nme=y").out
    automatic = k8sjob("submit", "--set", "target=auto")
    assert (automatic.code, "use --target auto" in automatic.err) == (2, True)


def test_a_run_has_them_too(k8sjob, folder):
    done = k8sjob("run", "-o", "plain", "--workers", 1, "--", "--lr", "0.1")
    assert done.code == 0, done.err
    assert "rank 1 of 2 --epochs 5 --lr 0.1" in done.out


def test_quiet_tells_only_why_it_failed(k8sjob, folder):
    assert k8sjob("run", "-q") == (0, "", "")
    done = k8sjob("run", "-q", "--", "--fail")
    assert (done.code, done.out) == (100, "")
    assert done.err.startswith("error: local/x: Failed: ")


def test_a_detached_job_outlives_the_command(k8sjob, process, folder):
    assert "--detach shows nothing" in k8sjob("run", "--detach", "-o", "json").err
    begun = process("run", "--detach", "--set", "run.env.SLEEP=2")
    out, _ = begun.communicate(timeout=60)
    assert (begun.returncode, out) == (0, "local/x started\n")
    assert json.loads(k8sjob("status", "x", "-o", "json").out)["state"] in {"Created", "Running"}
    assert k8sjob("watch", "x", "-o", "plain").code == 0


def test_quiet_tells_that_it_was_deleted(k8sjob, process, folder):
    running = process("run", "-q", "--set", "run.env.SLEEP=60")
    while '"Running"' not in k8sjob("status", "x", "-o", "json").out:
        assert running.poll() is None
        time.sleep(0.2)
    assert k8sjob("delete", "x").code == 0
    assert running.communicate(timeout=60) == ("", "error: local/x was deleted while it ran\n")
    assert running.returncode == 103


@pytest.mark.dist
def test_a_script_runs_without_a_job_yaml(k8sjob, folder):
    done = k8sjob(
        "run", "main.py", "--workers", 1, "--nproc", 2, "-o", "plain", "--", "--lr", "0.1"
    )
    assert done.code == 0, done.err
    assert "rank 3 of 4 --lr 0.1" in done.out
    assert k8sjob("list", "-o", "name").out == "local/main\n"
