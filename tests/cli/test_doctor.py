"""The command line of the doctor, over a small HTTP server that speaks as an apiserver does."""

import json
import shutil
from functools import partial

import pytest
import yaml
from clusters import kubeconfig
from healthy import HealthyCluster

from k8sjob.kube.client.transport import ApiError

TOKEN = "marked-and-never-to-be-shown"
lab = partial(kubeconfig, context="lab", namespace="team", token=TOKEN)
NO_KUBECTL = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")
CLIENTS = ["python", pytest.param("kubectl", marks=NO_KUBECTL)]


@pytest.fixture
def cluster():
    return HealthyCluster()


@pytest.fixture
def doctor(k8sjob, cluster, tmp_path, monkeypatch):
    """Runs `k8sjob doctor` against the cluster."""
    with cluster.served() as server:
        monkeypatch.setenv("KUBECONFIG", str(lab(tmp_path, server.url)))
        yield lambda *args: k8sjob("doctor", *args)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_cluster_where_all_is_well(client, doctor):
    done = doctor("--client", client)
    assert done.code == 0, done.out + done.err
    assert done.out.splitlines()[-1] == "jobs can be submitted to team (context lab)"
    assert "eve can do all that k8sjob does in team" in done.out
    assert "problem" not in done.out


def test_the_roles_to_ask_for_can_be_applied_as_they_are(doctor, cluster):
    cluster.answers["selfsubjectaccessreviews"] = {"status": {"allowed": False}}
    done = doctor()
    assert done.code == 1
    assert "problem to solve before a job can be submitted" in done.out
    text = done.out
    role, binding = yaml.safe_load_all(text[text.index("\n# The roles") :])
    assert (role["kind"], role["metadata"]["namespace"]) == ("Role", "team")
    assert binding["subjects"][0]["name"] == "eve"


def test_json_has_what_the_reference_says(doctor, cluster):
    done = doctor("-o", "json")
    report = json.loads(done.out)
    assert list(report) == ["context", "namespace", "can_submit", "checks", "rbac"]
    assert (report["context"], report["namespace"], report["can_submit"]) == ("lab", "team", True)
    for check in report["checks"]:
        assert list(check) == ["topic", "verdict", "seen", "next_step", "details"]
        assert check["verdict"] in {"ok", "unknown", "warning", "problem"}
    told = yaml.safe_load(doctor("-o", "yaml").out)["checks"]
    assert [check["topic"] for check in told] == [check["topic"] for check in report["checks"]]


def test_this_machine_alone(doctor, cluster):
    done = doctor("--local")
    assert done.code == 0
    assert "no cluster was checked" in done.out
    assert cluster.asked == []


@pytest.mark.parametrize("lines", [(), ("namespace: theirs",)])
@pytest.mark.parametrize("option", [(), ("-n", "mine")])
def test_which_namespace_is_looked_at(option, lines, doctor, job_file, cluster):
    done = doctor(job_file(*lines), *option, "-o", "json")
    expected = "mine" if option else "theirs" if lines else "team"
    assert json.loads(done.out)["namespace"] == expected
    assert any(path.startswith(f"/api/v1/namespaces/{expected}/") for _, path, *_ in cluster.asked)


def test_a_job_that_would_not_fit(doctor, job_file):
    done = doctor(job_file("resources: {gpus: 8}", "volumes: [{name: d, mount: /d, pvc: data}]"))
    assert done.code == 1
    assert "a Master is too large for every node" in done.out
    assert "there is no claim data in team" in done.out


def test_a_job_that_no_namespace_of_openshift_admits(doctor, job_file, cluster):
    annotations = {"openshift.io/sa.scc.uid-range": "1000750000/10000"}
    metadata = {"name": "team", "annotations": annotations}
    cluster.answers["/api/v1/namespaces/team"] = {"metadata": metadata}
    done = doctor(job_file("host_network: true"))
    assert done.code == 1
    assert "job.yaml:4" in done.err


def test_hostile_text_is_shown_as_text(doctor, cluster):
    evil = "\x1b]0;owned\x07\x1b[2Jname\u202e[bold red]\r\n"
    taints = [{"key": evil, "effect": "NoSchedule"}]
    cluster.answers["/api/v1/nodes"]["items"][0]["spec"] = {"taints": taints}
    cluster.answers["/api/v1/nodes"]["items"][0]["status"]["allocatable"]["amd.com/gpu"] = "1"
    cluster.answers["pytorchjobs"] = ApiError(f"no {evil}", code=422, reason="Invalid")
    done = doctor()
    assert "name[bold red]" in done.out
    for character in ("\x1b", "\x07", "\u202e", "\r"):
        assert character not in done.out + done.err


@pytest.mark.parametrize("name", ["../../nodes", "..", "a/b?c=d", "%2e%2e", "a b"])
def test_a_hostile_namespace_of_the_kubeconfig_leads_nowhere_else(name, doctor, cluster, tmp_path):
    file = tmp_path / "lab.kubeconfig"
    config = json.loads(file.read_text())
    config["contexts"][0]["context"]["namespace"] = name
    file.write_text(json.dumps(config))
    done = doctor()
    assert done.code == 1
    assert f"the context's namespace {name!r} is not a valid namespace" in done.out
    assert cluster.asked == []


def test_a_node_that_was_slow_in_several_jobs(doctor, cluster, records, tmp_path):
    kept = tmp_path / "state/records/team"
    kept.mkdir(parents=True)
    for path in records:
        path.rename(kept / f"{path.stem}@{path.stem}.k8sjob")
    (kept / "none@x.k8sjob").write_text("no record")
    assert "slow node" not in doctor().out, "they were on nodes of another cluster"
    cluster.answers["/api/v1/nodes"]["items"][0]["metadata"]["name"] = "b"
    out = doctor().out
    assert "node b was the slowest of 2 of the last 2 jobs\n" in out
    assert "kubectl cordon b" in out


def test_the_context_that_is_not_there(doctor):
    done = doctor("--context", "lba")
    assert done.code == 1
    assert "no context 'lba'" in done.out
    assert "next: did you mean 'lab'?" in done.out


@pytest.mark.parametrize("names_a_job", [False, True])
def test_a_server_that_is_not_there(doctor, tmp_path, job_file, names_a_job):
    lab(tmp_path, "https://127.0.0.1:1")
    done = doctor(*[job_file()] * names_a_job)
    assert done.code == 1
    assert "problem  server" in done.out
    assert "check that the cluster and the network are up" in done.out


@pytest.mark.parametrize("client", CLIENTS)
def test_the_token_is_never_shown(client, doctor, cluster, k8sjob):
    detail = f"refused the header Authorization: Bearer {TOKEN}"
    cluster.answers["/apis/kubeflow.org/v1/namespaces/team/pytorchjobs"] = ApiError(
        detail, code=403
    )
    shown = k8sjob("list", "--client", client)
    assert "refused the header" in shown.out + shown.err
    cluster.answers["/version"] = ApiError(detail, code=401)
    refused = doctor("--client", client)
    assert TOKEN not in shown.out + shown.err + refused.out + refused.err


# --- no cluster -----------------------------------------------------------------------------------


def test_without_a_cluster_this_machine_is_looked_at(k8sjob):
    done = k8sjob("doctor")
    assert done.code == 0
    assert "no cluster is configured" in done.out
    assert "Python 3." in done.out
    report = json.loads(k8sjob("doctor", "-o", "json").out)
    assert (report["context"], report["can_submit"]) == ("", False)


@pytest.mark.parametrize("asked", [("-n", "team"), ("--context", "lab"), ("--client", "python")])
def test_a_cluster_that_was_requested_and_is_not_configured(asked, k8sjob):
    done = k8sjob("doctor", *asked)
    assert done.code == 1
    assert "no cluster is configured: there is no kubeconfig at" in done.out


def test_packages_that_a_job_would_miss_here(k8sjob, job_file):
    file = job_file()
    image = "image: {repository: team/tiny, base: x:1, pip: [not-a-package-at-all]}"
    file.write_text(file.read_text().replace("image: team/tiny:1", image))
    done = k8sjob("doctor", file)
    assert done.code == 0
    assert "requirements: not-a-package-at-all" in done.out
    assert "k8sjob run cannot run a job on this machine: see packages above" in done.out
