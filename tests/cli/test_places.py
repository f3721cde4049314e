"""Jobs of this machine and of a cluster by the same commands: which one a name means."""

import json
import subprocess
import sys
import threading

import pytest
from apiserver import Apiserver
from clusters import kubeconfig, status

from k8sjob.cli.options import selector
from k8sjob.contract import CONTAINER_NAME
from k8sjob.kube.objects import IMAGE_ORIGIN
from k8sjob.provenance import ImageLayer, Provenance


@pytest.fixture
def here(job_file, k8sjob):
    """Makes a job on this machine, over in a second."""

    def make(name="tiny", *lines):
        file = job_file(*lines, name=name)
        file.write_text(file.read_text().replace("{script: main.py}", "{command: ['true']}"))
        assert k8sjob("run", file).code == 0

    return make


@pytest.fixture
def there(job_file, k8sjob, api):
    """Makes a job in the cluster."""

    def make(name="tiny", *lines, namespace="blue"):
        assert k8sjob("submit", job_file(*lines, name=name), "-n", namespace).code == 0
        return api.jobs[namespace, name]

    return make


def test_a_name_is_looked_for_in_both_places_once(here, there, k8sjob, api):
    here("mine")
    there("ours")
    assert k8sjob("status", "mine", "-o", "name").out == "local/mine\n"
    assert k8sjob("status", "ours", "-o", "name").out == "blue/ours\n"
    for command in ("status", "why"):
        api.words.clear()
        k8sjob(command, "ours")
        assert api.words == ["GET"]
    done = k8sjob("status", "nobodys")
    assert done.code == 102
    assert "no job 'nobodys' on this machine; in the cluster: no job 'nobodys' in" in done.err


def test_without_a_name_the_newest_job_of_the_place_is_read(here, there, k8sjob):
    done = k8sjob("why", "--local")
    assert (done.code, done.out) == (102, "")
    assert "no jobs on this machine; start one with k8sjob run" in done.err
    here("mine")
    there("old")["metadata"]["creationTimestamp"] = "2020-01-01T00:00:00Z"
    there("ours")["metadata"]["creationTimestamp"] = "2020-01-02T00:00:00Z"
    for options, name in (([], "local/mine"), (["-n", "blue"], "blue/ours")):
        done = k8sjob("status", *options, "-o", "json")
        assert json.loads(done.out)["name"] == name.partition("/")[2]
        assert done.err == f"the newest job: {name}\n"
    here("mine")
    newest = k8sjob("list", "--local").out.splitlines()[1].split()[0]
    assert newest.startswith("local/mine@")
    assert k8sjob("status").err == f"the newest job: {newest}\n"
    # A script's variable that is empty is no request for the newest.
    assert "'' is not a job's name" in k8sjob("logs", "").err


def test_a_job_of_billions_of_replicas_hides_no_other(there, k8sjob):
    there()
    huge = there("huge")
    huge["spec"]["pytorchReplicaSpecs"]["Worker"] = {"replicas": 2**31 - 1, "template": {}}
    huge["spec"]["runPolicy"]["suspend"] = True
    assert {row.split()[0] for row in k8sjob("list").out.splitlines()[1:]} == {
        "blue/tiny", "blue/huge"
    }  # fmt: skip
    for name in ("tiny", "huge"):
        assert f'k8sjob_job_state{{name="{name}",namespace="blue"' in k8sjob("metrics").out
    assert "error: blue/huge has 2,147,483,648 replicas" in k8sjob("usage", "-n", "blue").err
    for command in ("status", "why", "logs", "usage", "watch"):
        done = k8sjob(command, "blue/huge")
        assert (done.code, done.out) == (1, "")
        assert "2,147,483,648 replicas, more than 100,000" in done.err
        assert "Traceback" not in done.err
    assert k8sjob("delete", "blue/huge").out == "blue/huge deleted\n"


def test_a_name_in_both_places_is_ambiguous(here, there, k8sjob):
    here()
    there()
    for command in ("status", "why", "suspend", "delete", "logs", "watch"):
        done = k8sjob(command, "tiny")
        assert done.code == 2
        assert done.err.startswith("error: 'tiny' is ambiguous: use local/tiny or blue/tiny\n")
    for place in (["local/tiny"], ["tiny", "--local"], ["tiny", "-n", "local"]):
        assert k8sjob("status", *place, "-o", "name").out == "local/tiny\n"
    for place in (["blue/tiny"], ["tiny", "-n", "blue"], ["blue/tiny", "-n", "blue"],
                  ["tiny", "--context", "fake"]):  # fmt: skip
        assert k8sjob("status", *place, "-o", "name").out == "blue/tiny\n"
    assert k8sjob("status", "tiny", "-n", "red").code == 102


def test_what_an_image_was_made_of_is_shown_as_long_as_it_runs(there, k8sjob):
    job = there()
    assert json.loads(k8sjob("status", "tiny", "-o", "json").out)["origin"] is None
    pods = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    image = pods["containers"][0]["image"]
    layers = [("dependencies", "sha256:d", 68_000_000), ("code", "sha256:c", 118_028)]
    layers = tuple(ImageLayer(*layer) for layer in layers)
    origin = Provenance(
        image, "base@sha256:b", "on@sha256:o", "linux/amd64", layers, "pip: tqdm", 3
    )
    annotations = job["metadata"]["annotations"]
    annotations[IMAGE_ORIGIN] = origin.encode()
    shown = k8sjob("status", "tiny").out.split("\n\n")
    assert next(part for part in shown if part.startswith("IMAGE")).splitlines() == [
        "IMAGE",
        image,
        "  code          sha256:c  118 kB, 3 files",
        "  dependencies  sha256:d  68 MB",
        "  installed     pip: tqdm",
        "  on            on@sha256:o",
        "  base          base@sha256:b",
    ]
    assert json.loads(k8sjob("status", "tiny", "-o", "json").out)["origin"] == origin.as_dict()
    annotations[IMAGE_ORIGIN] = origin._replace(image="another@sha256:a").encode()
    assert "sha256:c" not in k8sjob("status", "tiny").out


@pytest.fixture
def away(tmp_path, monkeypatch):
    """The cluster that is configured cannot be reached; its URL."""
    with Apiserver().served() as server:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, server.url)))
    return server.url


def test_a_cluster_that_is_away_hides_nothing_that_is_here(here, away, k8sjob):
    here()
    done = k8sjob("status", "tiny", "-o", "name")
    assert (done.code, done.out) == (0, "local/tiny\n")
    assert done.err.startswith("warning: this is local/tiny; the cluster, which may have one too,")
    done = k8sjob("status", "other")
    assert done.code == 1
    assert "no job 'other' on this machine, and the cluster cannot be reached" in done.err
    done = k8sjob("list", "-o", "name")
    assert (done.code, done.out) == (1, "local/tiny\n")
    assert done.err.startswith(f"error: {away} (context fake) cannot be reached")
    assert k8sjob("list", "--local", "-o", "name") == (0, "local/tiny\n", "")
    done = k8sjob("list", "-n", "blue", "-o", "json")
    assert (done.code, done.out) == (1, "")


def test_a_cluster_that_does_not_answer_is_not_waited_for(here, api, k8sjob):
    here()
    over = threading.Event()
    api.before = lambda _word: over.wait(60) and None
    done = k8sjob("status", "tiny", "-o", "name")
    over.set()
    assert (done.code, done.out) == (0, "local/tiny\n")
    assert "the cluster did not respond within 3 s" in done.err


def test_the_list_has_both_places_the_newest_first(here, there, api, k8sjob):
    here("old")
    there("mid")["metadata"]["creationTimestamp"] = "2020-01-01T00:00:00Z"
    there("new")["metadata"]["creationTimestamp"] = "2099-01-01T00:00:00Z"
    there("far", namespace="red")["metadata"]["creationTimestamp"] = "2019-01-01T00:00:00Z"
    names = k8sjob("list", "-o", "name").out.split()
    assert names == ["blue/new", "local/old", "blue/mid"]
    assert k8sjob("list", "-A", "-o", "name").out.split() == [*names, "red/far"]
    assert k8sjob("list", "-n", "red", "-o", "name").out.split() == ["red/far"]
    assert k8sjob("list", "--local", "-o", "name").out.split() == ["local/old"]
    for name in names:
        assert k8sjob("status", name).code == 0
    header, *rows = k8sjob("list", "-o", "wide").out.splitlines()
    assert header.split() == [
        "NAME", "STATE", "REPLICAS", "AGE", "TIME", "RESTARTS", "IMAGE", "UID",
    ]  # fmt: skip
    assert rows[0].split()[:3] == ["blue/new", "Created", "1"]
    assert "team/tiny:1" in rows[0]
    (record, *_) = json.loads(k8sjob("list", "-o", "json").out)
    assert (record["image"], record["counts"]) == ("team/tiny:1", {"Pending": 1})


def pod_of(job, role="master", **status):
    """A pod of a job in the cluster."""
    meta = job["metadata"]
    return {
        "metadata": {
            "name": f"{meta['name']}-{role}-0",
            "uid": f"pod-of-{meta['uid']}",
            "namespace": meta["namespace"],
            "labels": {
                "training.kubeflow.org/job-name": meta["name"],
                "training.kubeflow.org/replica-type": role,
                "training.kubeflow.org/replica-index": "0",
            },
            "ownerReferences": [{"uid": meta["uid"], "controller": True}],
        },
        "spec": {},
        "status": status,
    }


def test_what_the_pods_do_is_shown(there, api, k8sjob):
    sick, well = there("sick"), there("well")
    digest = "sha256:" + "b" * 64
    waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
    crashed = {"name": CONTAINER_NAME, "restartCount": 2, "state": waiting}
    pod = pod_of(sick, phase="Running", containerStatuses=[crashed | {"imageID": f"r/t@{digest}"}])
    pod["spec"]["nodeName"] = "node-7"
    earlier = pod_of({"metadata": well["metadata"] | {"uid": "before"}}, phase="Failed")
    api.pods = [pod, pod_of(well, phase="Running"), earlier]
    listed = {line.split()[0]: line for line in k8sjob("list", "-n", "blue").out.splitlines()}
    assert "1 CrashLoopBackOff" in listed["blue/sick"]
    assert "1 Running" in listed["blue/well"]
    assert "Failed" not in listed["blue/well"]
    record = json.loads(k8sjob("status", "sick", "-o", "json").out)
    assert record["image"] == "team/tiny:1"
    (replica,) = record["replicas"]
    assert (replica["node"], replica["restarts"], replica["digest"]) == ("node-7", 2, digest)
    assert f"runs as {digest}" in k8sjob("status", "sick").out


def test_a_namespace_of_a_cluster_may_be_called_local(there, api, k8sjob, tmp_path):
    job = there()
    job["metadata"]["namespace"] = "local"
    failed = {"type": "Failed", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    job["status"] = {"conditions": [failed]}
    api.jobs["local", "tiny"] = api.jobs.pop(("blue", "tiny"))
    file = tmp_path / "fake.kubeconfig"
    file.write_text(file.read_text().replace('"blue"', '"local"'))
    assert "Failed" in k8sjob("status", "tiny").out
    assert k8sjob("delete", "tiny").out == "local/tiny deleted\n"
    assert list((tmp_path / "state/records/local").glob("tiny@*"))


def test_a_job_that_a_finalizer_keeps_is_not_deleted(there, api, k8sjob):
    there("kept")["metadata"] |= {
        "deletionTimestamp": "2026-01-01T00:00:00Z",
        "finalizers": ["example.com/hold"],
    }
    api.lingers = 100
    assert k8sjob("delete", "kept").out == (
        "blue/kept: the job is being deleted; it is waiting for its finalizers: example.com/hold\n"
    )


def test_status_and_why_say_the_same(there, api, k8sjob):
    """Nodes are looked at by both: none offers a GPU."""
    job = there("short", "resources: {gpus: 1}")
    waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    waits["message"] = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
    pod = pod_of(job, phase="Pending", conditions=[waits])
    limits = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    pod["spec"]["containers"] = [{"name": "pytorch", **limits}]
    api.pods = [pod]
    api.nodes = [{"kind": "Node", "metadata": {"name": "n"}, "status": {"allocatable": {"cpu": 4}}}]
    for command in ("status", "why"):
        assert "no node offers any nvidia.com/gpu" in k8sjob(command, "short").out


@pytest.mark.parametrize(
    ("text", "fits"),
    [("", True), ("team=a", True), ("team==a,stage = dev", True), ("team!=b", True),
     ("other!=x", True), ("other", False), ("!other", True), ("!team", False),
     ("team in (a, b), stage", True), ("team in (b,c)", False), ("other in (a)", False),
     ("team notin (b)", True), ("other notin (b)", True), ("example.io/x=", True)],
)  # fmt: skip
def test_a_selector(text, fits):
    assert selector(text)({"team": "a", "stage": "dev", "example.io/x": ""}) is fits


def test_the_places_without_the_job_are_reported(api, k8sjob):
    assert k8sjob("list", "-n", "red").err == (
        "no jobs in namespace red of the cluster; -A looks in all namespaces; create one with"
        " k8sjob submit\n"
    )
    assert k8sjob("list", "-l", "team=c").err == (
        "no jobs with team=c on this machine or in namespace blue of the cluster; -A looks in all"
        " namespaces; create one with k8sjob run or k8sjob submit\n"
    )
    assert k8sjob("list", "-A").err == (
        "no jobs on this machine or in the cluster; create one with k8sjob run or k8sjob submit\n"
    )
    api.missing.add("rde")
    done = k8sjob("list", "-n", "rde")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: there is no namespace 'rde' (context fake); create it with")


def test_suspend_resume_and_delete_by_name(there, api, k8sjob):
    for name in ("one", "two"):
        there(name)
    done = k8sjob("suspend", "one", "blue/two")
    assert done.out == "blue/one is being suspended\nblue/two is being suspended\n"
    assert done.err.count("the job has no `checkpoint`: if its script writes none, `resume`") == 2
    assert api.jobs["blue", "one"]["spec"]["runPolicy"]["suspend"] is True
    assert k8sjob("suspend", "one").out == "blue/one is already suspended: nothing was changed\n"
    assert k8sjob("resume", "one") == (0, "blue/one is being resumed\n", "")
    assert api.jobs["blue", "one"]["spec"]["runPolicy"]["suspend"] is False
    api.jobs["blue", "two"]["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "research"}
    again = k8sjob("suspend", "two")
    assert again.out == "blue/two is already suspended: nothing was changed\n"
    assert "as long as the job has its quota; to stop it, set spec.active" in again.err
    assert "stops it again until the queue has room for it" in k8sjob("resume", "two").err
    there("saves", "checkpoint: {dir: /c}", "volumes: [{name: c, mount: /c, pvc: c}]")
    assert k8sjob("suspend", "saves").err == ""
    assert k8sjob("delete", "saves").code == 0
    unasked = api.words.count("PATCH")
    again = k8sjob("resume", "one").out
    assert again == "blue/one is not suspended (Created): nothing was changed\n"
    assert api.words.count("PATCH") == unasked
    api.end("blue", "one")
    assert "blue/one has ended and cannot be suspended" in k8sjob("suspend", "one").err
    done = k8sjob("delete", "one", "two", "three")
    assert done.code == 102
    assert len(api.jobs) == 2, "a name that is wrong stops the whole"
    assert k8sjob("delete", "one", "two", "one").out == "blue/one deleted\nblue/two deleted\n"
    assert api.jobs == {}


def test_a_job_is_not_resumed_in_silence_while_its_old_pods_go(there, api, k8sjob):
    job = there("one")
    job["spec"]["runPolicy"]["suspend"] = True
    owner = {"uid": job["metadata"]["uid"], "controller": True}
    api.pods = [{"metadata": {"name": "one-master-0", "uid": "p", "ownerReferences": [owner]}}]
    api.lingers = 3
    done = k8sjob("resume", "one")
    assert (done.code, done.out) == (0, "blue/one is being resumed\n")
    assert done.err == "waiting until the old pods of blue/one are gone, at most 120 s\n"
    assert api.pods == []


def test_no_more_is_listed_or_deleted_than_was_requested(here, there, api, k8sjob):
    here("mine", "labels: {team: a}")
    there("ours", "labels: {team: a}")
    there("theirs", "labels: {team: b}")
    there("far", "labels: {team: a}", namespace="red")
    listed = k8sjob("list", "-l", "team=a", "-o", "name").out
    assert set(listed.split()) == {"local/mine", "blue/ours"}
    for asked in (["--all"], ["-l", "team=a"], ["--all", "--context", "fake"]):
        done = k8sjob("delete", *asked)
        assert done.code == 2
        assert "specify the place: --local for this machine, or -n NAMESPACE" in done.err
    assert k8sjob("delete", "-l", "team=a", "-n", "blue").out == "blue/ours deleted\n"
    assert k8sjob("delete", "--all", "-n", "blue").out == "blue/theirs deleted\n"
    assert list(api.jobs) == [("red", "far")]
    assert k8sjob("delete", "--all", "--local").out == "local/mine deleted\n"
    assert k8sjob("delete", "--all", "--local") == (0, "", "nothing to delete\n")


def test_a_job_that_goes_by_itself_is_no_error_of_delete_all(there, api, k8sjob):
    there()
    gone = status(404, "NotFound", 'pytorchjobs.kubeflow.org "tiny" not found')
    api.before = lambda word: gone if word == "DELETE" else None
    assert k8sjob("delete", "--all", "-n", "blue") == (0, "", "")


def test_a_shell_completes_names_of_both_places(here, there, complete, tmp_path):
    here("mine")
    here("both")
    there("both")
    there("ours")
    there("far", namespace="red")

    def offers(words, *names):
        """A cluster that does not respond at once has no names: a busy machine gets more tries."""
        for _ in range(20):
            offered = complete(words, KUBECONFIG=str(tmp_path / "fake.kubeconfig"))
            if {word for _, word in offered} == set(names):
                return True
        return False

    assert offers("k8sjob status ", "mine", "ours", "local/both", "blue/both")
    assert offers("k8sjob status o", "ours")
    assert offers("k8sjob status red/", "red/far")
    assert offers("k8sjob status local/", "local/mine", "local/both")
    assert offers("k8sjob status -n red ", "far")
    assert offers("k8sjob status --local ", "mine", "both")
    assert offers("k8sjob status --context ", "fake")


@pytest.mark.parametrize("config", ["", "{"])
def test_a_shell_is_not_kept_waiting_nor_shown_errors(config, here, away, complete, tmp_path):
    here("mine")
    file = tmp_path / "fake.kubeconfig"
    file.write_text(config or file.read_text())
    assert complete("k8sjob status ", KUBECONFIG=str(file)) == [["word", "mine"]]


@pytest.mark.parametrize("arguments", [["list", "--local"], ["status", "local/x"], ["list"]])
def test_what_is_only_local_loads_no_client_and_uses_no_network(arguments, api, tmp_path):
    code = """
import sys
from k8sjob.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    print({"kubernetes", "urllib3", "http.client"} & set(sys.modules))
"""
    config = "nothing" if arguments == ["list"] else "fake.kubeconfig"  # it asks where there is one
    env = {"K8SJOB_STATE": str(tmp_path / "state"), "KUBECONFIG": str(tmp_path / config)}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
    assert api.words == []


def test_a_job_that_has_ended_is_explained_after_its_deletion(there, api, k8sjob, tmp_path):
    ended = {"type": "Failed", "status": "True", "reason": "R", "message": "no more restarts"}
    there("ended")["status"] = {"conditions": [ended]}
    there("runs")
    assert k8sjob("delete", "ended", "runs").out == "blue/ended deleted\nblue/runs deleted\n"
    record = tmp_path / "state/records/blue"
    assert [path.name.partition("@")[0] for path in record.iterdir()] == ["ended"]
    for name in ("ended", "blue/ended"):
        done = k8sjob("status", name, "--exit-code")
        assert done.code == 100
        assert "no more restarts" in done.out
        note = f"blue/ended is not in the cluster, or cannot be read; this is its record: {record}"
        assert note in done.err
    assert "no more restarts" in k8sjob("why", "ended", "-n", "blue").out
    for gone in (["ended", "-n", "green"], ["ended", "--local"], ["local/ended"], ["runs"]):
        assert k8sjob("status", *gone).code == 102
    for command in ("delete", "suspend"):  # these mean jobs that are there
        assert k8sjob(command, "ended").code == 102


def test_a_record_that_cannot_be_kept_does_not_keep_the_job(there, api, k8sjob, tmp_path):
    ended = {"type": "Succeeded", "status": "True"}
    there("ended")["status"] = {"conditions": [ended]}
    (tmp_path / "state").mkdir(exist_ok=True)
    (tmp_path / "state/records").write_text("a file")
    done = k8sjob("delete", "ended")
    assert done.out == "blue/ended deleted\n"
    assert "no record is kept of blue/ended: " in done.err
