"""submit and diff on a real cluster, each as the command line that a user types."""

import random
import re
import threading
import time
from pathlib import Path

import pytest
import yaml
from cluster.desk import SLEEP

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("either", ["kubectl"], indirect=True)
def test_from_a_file_to_the_end_of_the_job_in_one_line(either):
    file = either.file("echo hello; sleep 2; echo bye")
    out, err = either.call("submit", file, "--watch")
    assert f"{either.namespace}/tiny created\n" in out
    for line in ("hello", "bye"):
        assert f"master-0 | {line}\n" in out
    assert "tiny Succeeded after " in out
    assert "has no digest" in err
    _, err = either.call("submit", file, code=1)
    assert "this job, ended (Succeeded); " in err
    assert either.call("diff", file) == ("", "")
    tiny = f"{either.namespace}/tiny"
    out, _ = either.call("rerun", tiny)
    assert "master-0 | hello\n" in out
    either.call("delete", tiny)
    out, err = either.call("rerun", tiny)
    assert "this is its record" in err
    assert re.search(r"tiny-.{5} Succeeded after ", out)


def test_code_gets_into_the_cluster_by_the_same_line(desk):
    """Without a builder and without --image: pushed, submitted, followed."""
    file = desk.code("import os\nprint('this is', os.environ['RANK'])\n")
    (desk.folder / ".dockerignore").write_text("*\n!main.py\n")
    out, err = desk.call("submit", file, "--watch")
    assert "code: 1 file" in err
    assert "master-0 | this is 0\n" in out
    assert "tiny Succeeded after " in out
    _, err = desk.call("diff", file)
    assert err == ""
    (desk.folder / "main.py").write_text("print('other')\n")
    out, err = desk.call("diff", file, code=1)
    assert "template.spec.containers[0].image" in err
    _, err = desk.call("submit", file, "--dry-run=server", "--replace")
    assert "would send " in err
    out, _ = desk.call("submit", file, "--replace", "--watch")
    assert "master-0 | other\n" in out


@pytest.mark.parametrize("either", ["python"], indirect=True)
def test_what_is_there_decides(either, eventually):
    file = either.file()
    either.call("submit", file)
    uid = either.uid()
    eventually(lambda: len(either.objects("pods")) == 2, "its pods")
    out, _ = either.call("submit", file)
    there = f"{either.namespace}/tiny already exists as the same job and has not ended"
    assert out.startswith(there)
    assert either.call("diff", file) == ("", "")

    other = either.file(f"echo other; {SLEEP}")
    out, err = either.call("submit", other, code=1)
    assert out == ""
    assert '-                - "echo hello; sleep 600 & wait"\n' in err
    assert '+                - "echo other; echo hello; sleep 600 & wait"\n' in err
    assert "a different job" in err.splitlines()[-1]
    out, err = either.call("diff", other, code=1)
    assert out.startswith(f"--- {either.namespace}/tiny in the cluster\n")
    assert "takes effect only in a new job" in err
    assert either.uid() == uid

    before = {pod["metadata"]["uid"] for pod in either.objects("pods").values()}
    out, _ = either.call("submit", other, "--replace")
    assert out == f"{either.namespace}/tiny replaced\n"
    assert either.uid() != uid
    now = {pod["metadata"]["uid"] for pod in either.objects("pods").values()}
    assert not before & now, "the old pods are gone before the new job is made"
    eventually(lambda: len(either.objects("pods")) == 2, "its pods")

    out, _ = either.call("submit", other, "--generate-name", "-o", "name")
    assert re.fullmatch(rf"{either.namespace}/tiny-[a-z0-9]{{5}}\n", out)
    assert len(either.objects("pytorchjobs")) == 2


def test_dry_runs_make_nothing(either):
    file = either.file()
    out, _ = either.call("submit", file, "--dry-run=server")
    assert out == f"{either.namespace}/tiny created (server dry run)\n"
    out, _ = either.call("submit", file, "--dry-run=server", "-o", "yaml")
    master = yaml.safe_load(out)["spec"]["pytorchReplicaSpecs"]["Master"]
    (container,) = master["template"]["spec"]["containers"]
    assert container["ports"][0]["protocol"] == "TCP", "the server's default"
    assert either.objects("pytorchjobs") == {}


@pytest.mark.parametrize("example", ["digits-ddp", "fashion-ddp", "own-script"])
def test_the_cluster_takes_every_example(example, desk):
    spec = yaml.safe_load((ROOT / "manifests" / example / "job.yaml").read_text())
    file = desk.folder / "job.yaml"
    file.write_text(yaml.safe_dump(spec | {"namespace": desk.namespace}))
    desk.call("submit", file, "--image", desk.cluster.base_image, "--dry-run=server")


def test_what_kubectl_has_applied_is_the_same_job(desk):
    file = desk.file()
    manifest, _ = desk.call("render", file)
    desk.cluster.kubectl("apply", "-f", "-", stdin=manifest)
    assert desk.call("diff", file) == ("", "")
    out, _ = desk.call("submit", file)
    assert "nothing was changed" in out


def finish(children):
    """Waits for all; exit codes and what each said."""
    detail = [child.communicate(timeout=180) for child in children]
    return [child.returncode for child in children], [out + err for out, err in detail]


def test_of_many_who_submit_the_same_at_once_one_makes_it(desk):
    file = desk.file()
    clients = ["python", "kubectl"] * 3
    codes, detail = finish([desk.start("submit", file, "--client", client) for client in clients])
    assert codes == [0] * len(clients), detail
    assert sum("/tiny created" in text for text in detail) == 1
    assert sum("nothing was changed" in text for text in detail) == len(clients) - 1
    assert list(desk.objects("pytorchjobs")) == ["tiny"]


def test_two_who_replace_at_once_leave_one_whole_job(desk):
    desk.call("submit", desk.file("sleep 599"))
    file = desk.file()
    codes, detail = finish([desk.start("submit", file, "--replace") for _ in range(2)])
    assert codes == [0, 0], detail
    assert desk.call("diff", file) == ("", "")
    assert list(desk.objects("pytorchjobs")) == ["tiny"]


def test_a_client_that_is_killed_leaves_a_whole_job_or_none(desk):
    """Killed at moments spread over its life: what it did is done whole, or not at all."""
    desk.call("version")  # the first command of all takes longer
    begun = time.monotonic()
    desk.call("submit", desk.file(name="first"))
    life = time.monotonic() - begun
    for number in range(8):
        name = f"killed-{number}"
        file = desk.file(name=name)
        child = desk.start("submit", file)
        time.sleep(life * random.uniform(0.5, 1.05))
        child.kill()
        child.communicate()
        is_there = name in desk.objects("pytorchjobs")
        if is_there:
            assert desk.call("diff", file) == ("", "")
        out, _ = desk.call("submit", file)
        # What was under way when its client was killed may be done a moment after the look.
        assert "nothing was changed" in out or not is_there
        assert desk.call("diff", file) == ("", "")


def test_an_apiserver_that_is_started_again_costs_no_job(desk, bed, eventually):
    """Submissions one after the other while it is killed: each is told as it is."""
    stop, results = threading.Event(), []

    def submit_one_after_the_other():
        while not stop.is_set():
            name = f"job-{len(results)}"
            child = desk.start("submit", desk.file(name=name))
            _, err = child.communicate(timeout=180)
            results.append((name, child.returncode, err))

    thread = threading.Thread(target=submit_one_after_the_other)
    thread.start()
    try:
        eventually(lambda: results, "the first submission")
        bed.kill("apiserver")
        time.sleep(2)
        bed.start("apiserver")
        met = len(results) + 1  # and one that may have met it as it was away
        eventually(lambda: len(results) > met, "one more")
    finally:
        stop.set()
    thread.join(200)
    assert not thread.is_alive()
    there = desk.objects("pytorchjobs")
    for name, code, err in results:
        assert (code == 0) is (name in there), (name, err)
        assert code == 0 or re.search(r"cannot be reached|is not ready|does not respond", err), err
    assert results[0][1] == results[-1][1] == 0, results


def test_refusals_are_lines_with_the_next_step(either):
    typo = either.file(overlay={"spec": {"runPolicy": {"cleanPodPolcy": "All"}}})
    _, err = either.call("submit", typo, code=1)
    assert 'unknown field "spec.runPolicy.cleanPodPolcy"' in err
    assert "overlay" in err
    _, err = either.call("diff", typo, code=2)
    assert "unknown field" in err
    file = either.file(namespace="no-such-namespace")
    _, err = either.call("submit", file, code=1)
    assert "there is no namespace 'no-such-namespace'" in err
    assert "kubectl create namespace no-such-namespace" in err
    _, err = either.call("submit", file, "--context", "nowhere", code=1)
    assert "no context 'nowhere'" in err
