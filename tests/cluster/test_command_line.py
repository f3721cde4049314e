"""The commands on jobs that are there, with a real cluster and this machine side by side."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from k8sjob.observe.status import JobState


def state(desk, name="tiny"):
    return json.loads(desk.call("status", f"{desk.namespace}/{name}", "-o", "json")[0])


def running(desk, eventually, name="tiny"):
    """Waits until all replicas of a job run; its status."""

    def all_run():
        seen = desk.status(name)
        return seen.counts == {"Running": 2} and seen.state is JobState.RUNNING

    eventually(all_run, "its replicas")
    return state(desk, name)


@pytest.mark.parametrize("either", ["kubectl"], indirect=True)
def test_a_job_through_its_life(either, eventually):
    here = ("-n", either.namespace)
    either.call("submit", either.file())
    seen = running(either, eventually)
    assert [replica["name"] for replica in seen["replicas"]] == ["master-0", "worker-0"]
    assert seen["image"] == either.cluster.base_image
    for replica in seen["replicas"]:
        assert re.fullmatch(r"sha256:[0-9a-f]{64}", replica["digest"])
        assert replica["node"]
        assert replica["restarts"] == 0
    shown, _ = either.call("status", "tiny", *here)
    assert f"runs as {seen['replicas'][0]['digest']}" in shown
    assert seen["replicas"][0]["node"] in shown
    either.call("status", "tiny", *here, "--exit-code", code=101)
    assert either.call("logs", "tiny", *here, "-r", "master-0") == ("hello\n", "")

    out, _ = either.call("suspend", "tiny", *here)
    assert out == f"{either.namespace}/tiny is being suspended\n"
    eventually(lambda: either.status().state is JobState.SUSPENDED, "the suspension")
    eventually(lambda: not either.objects("pods"), "the end of its pods")
    either.call("status", "tiny", *here, "--exit-code", code=103)
    assert "spec.runPolicy.suspend" in either.call("diff", either.file(), code=1)[1]
    either.call("resume", f"{either.namespace}/tiny")
    running(either, eventually)

    out, _ = either.call("delete", "tiny", *here)
    assert out == f"{either.namespace}/tiny deleted\n"
    _, err = either.call("status", "tiny", *here, code=102)
    assert f"no job 'tiny' in namespace {either.namespace}" in err
    eventually(lambda: not either.objects("pods"), "the end of its pods")


@pytest.mark.parametrize("either", ["python"], indirect=True)
def test_a_job_that_has_ended(either, eventually):
    here = ("-n", either.namespace)
    either.call("submit", either.file("echo done"))
    eventually(lambda: either.status().state is JobState.SUCCEEDED, "its end")
    assert either.call("status", "tiny", *here, "--exit-code")[0].startswith("NAME")
    _, err = either.call("suspend", "tiny", *here, code=1)
    assert "has ended and cannot be suspended" in err
    (listed,) = json.loads(either.call("list", *here, "-o", "json")[0])
    assert (listed["state"], set(listed["counts"])) == ("Succeeded", {"Succeeded"})
    either.call("watch", "tiny", *here)
    either.call("delete", "tiny", *here)
    eventually(lambda: not either.objects("pytorchjobs"), "its end")
    out, err = either.call("logs", "tiny", *here, "-r", "master-0")
    assert (out, err.startswith("warning: ")) == ("done\n", True)
    assert "tiny succeeded" in either.call("why", "tiny", *here)[0]


@pytest.mark.parametrize("either", ["kubectl"], indirect=True)
def test_lists_of_one_namespace_of_all_and_by_label(either):
    for name, team in (("one", "a"), ("two", "b")):
        either.call("submit", either.file("true", name=name, labels={"team": team}))
    ours = {f"{either.namespace}/{name}" for name in ("one", "two")}
    out, err = either.call("list", "-n", either.namespace, "-o", "name")
    assert set(out.split()) == ours
    assert err == ""
    assert ours <= set(either.call("list", "-A", "-o", "name")[0].split())
    out, _ = either.call("list", "-n", either.namespace, "-l", "team in (a, c)", "-o", "name")
    assert out.split() == [f"{either.namespace}/one"]
    out, _ = either.call("delete", "-l", "team=a", "-n", either.namespace)
    assert out == f"{either.namespace}/one deleted\n"
    either.call("delete", "--all", code=2)
    out, _ = either.call("delete", "--all", "-n", either.namespace)
    assert out == f"{either.namespace}/two deleted\n"
    assert either.objects("pytorchjobs") == {}


def test_this_machine_and_the_cluster_side_by_side(desk):
    file = desk.file("echo here", name="tiny")
    desk.call("run", file)
    desk.call("submit", file)
    names = set(desk.call("list", "-A", "-o", "name")[0].split())
    assert {"local/tiny", f"{desk.namespace}/tiny"} <= names
    assert desk.call("status", "local/tiny", "-o", "name")[0] == "local/tiny\n"
    for name in names & {"local/tiny", f"{desk.namespace}/tiny"}:
        desk.call("status", name)
        desk.call("delete", name)
    assert desk.objects("pytorchjobs") == {}


def test_kubectl_finds_it_as_a_plugin(desk):
    desk.call("submit", desk.file("true"))
    folder = Path(sys.executable).parent
    if not (folder / "kubectl-k8sjob").exists():
        pytest.skip("k8sjob is not installed beside this Python")
    done = subprocess.run(
        [desk.cluster.kubectl_path, "k8sjob", "list", "-n", desk.namespace, "-o", "name"],
        env=desk.cluster.env | {"PATH": f"{folder}:{desk.cluster.env['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{desk.namespace}/tiny\n"


def test_a_shell_completes_the_names_of_its_jobs(desk, eventually):
    desk.call("submit", desk.file("true", name="somewhat-long"))

    def offered(words):
        argv = [sys.executable, "-c", "from k8sjob.cli import main; main()"]
        asked = {"K8SJOB_COMPLETE": "bash", "K8SJOB_LINE": words}
        env = desk.cluster.env | asked | {"K8SJOB_STATE": str(desk.folder / "state")}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return [line.split("\t")[1] for line in done.stdout.splitlines()]

    # A cluster that does not respond at once has no names, so a busy machine may need another try.
    for words, name in (
        (f"k8sjob status {desk.namespace}/some", f"{desk.namespace}/somewhat-long"),
        (f"k8sjob status -n {desk.namespace} some", "somewhat-long"),
    ):
        eventually(lambda words=words, name=name: offered(words) == [name], words)
    assert offered(f"k8sjob status -n {desk.namespace} other") == []
