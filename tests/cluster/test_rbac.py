"""Users with the roles of manifests/rbac: all that the documentation says works, and no more."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from cluster import commands

from k8sjob.checks.doctor.permissions import Grant, binding
from k8sjob.targets.jobs import by_name

ROOT = Path(__file__).resolve().parents[2]
RBAC = ROOT / "manifests/rbac"
CLIENTS = ("python", "kubectl")
KINDS = ("pytorchjob", "trainjob", "jobset", "job")
IN_TURN = [*zip(CLIENTS[::-1] * 2, KINDS, strict=True)]
JOB = """\
name: {name}
image: {image}
run: {{command: [sh, -c, "echo I am $RANK; sleep {seconds}"]}}
replicas: {{workers: 1}}
resources: {{cpu: 50m, memory: 32Mi}}
policy: {{termination_grace: 2s}}
target: {kind}
"""


class User:
    """A service account, and the command line as it sees the cluster."""

    def __init__(self, cluster, kubeconfig, token, namespace):
        self.cluster, self.kubeconfig = cluster, kubeconfig
        self.token, self.namespace = token, namespace

    def k8sjob(self, *args, code=0):
        """Run a command that must end with the code; what it printed, stdout before stderr."""
        done = commands.run(*args, env=self.cluster.env | {"KUBECONFIG": str(self.kubeconfig)})
        text = done.stdout + done.stderr
        assert done.returncode == code, f"k8sjob {args} ended with {done.returncode}:\n{text}"
        assert self.token not in text
        return text

    def kubectl(self, *args):
        """Run kubectl as this user; its stderr, empty where it may."""
        argv = [self.cluster.kubectl_path, f"--kubeconfig={self.kubeconfig}", *args]
        return subprocess.run(argv, capture_output=True, text=True, check=False).stderr


@pytest.fixture
def user(cluster, namespace, kubeconfig_of):
    """Makes a user with these roles in the test's namespace."""

    def make(*grants, name="eve"):
        cluster.kubectl("create", "serviceaccount", name, "-n", namespace)
        subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
        for grant in grants:
            place = () if grant.cluster_wide else ("-n", namespace)
            cluster.kubectl("apply", *place, "-f", str(RBAC / f"{grant}.yaml"))
            bound = binding(grant, [subject], "" if grant.cluster_wide else namespace)
            bound["metadata"]["name"] += f"-{namespace}"
            cluster.kubectl("apply", "-f", "-", stdin=json.dumps(bound))
            if grant.cluster_wide:
                made.append((bound["kind"], bound["metadata"]["name"]))
        return User(cluster, *kubeconfig_of(name), namespace)

    made = []
    yield make
    for kind, name in made:
        cluster.kubectl("delete", kind, name)


@pytest.fixture
def kind(request):
    """The kind of the test's jobs; its controller runs."""
    name = getattr(request, "param", "pytorchjob")
    if name != "pytorchjob":
        request.getfixturevalue("controllers")
    return name


@pytest.fixture
def job_file(cluster, kind, tmp_path):
    """Writes a job of two replicas that sleep."""

    def write(name="digits", seconds=600):
        file, image = tmp_path / f"{name}.yaml", cluster.base_image
        file.write_text(JOB.format(name=name, image=image, seconds=seconds, kind=kind))
        return file

    return write


@pytest.fixture
def running(cluster, namespace, job_file, eventually, get):
    """A job of somebody else's in the namespace, whose two pods run."""
    commands.run("submit", job_file("theirs"), "-n", namespace, env=cluster.env).check_returncode()
    eventually(
        lambda: [pod["status"]["phase"] for pod in get("pods")] == ["Running"] * 2, "two pods"
    )
    return "theirs"


@pytest.mark.parametrize(("client", "kind"), IN_TURN, indirect=["kind"])
def test_a_submitter_can_do_all_that_the_documentation_says(
    client, kind, user, job_file, eventually
):
    eve = user(Grant.SUBMITTER)
    by = ("--client", client)
    file, job = job_file(), f"{eve.namespace}/digits"
    assert "can do all that k8sjob does" in eve.k8sjob("doctor", file, *by)
    shown = eve.k8sjob("submit", "--dry-run=server", "-o", "yaml", file, *by)
    assert f"kind: {by_name(kind).kind}\n" in shown
    assert "digits" in eve.k8sjob("submit", file, *by)
    eve.k8sjob("submit", file, *by)  # the same and unfinished: attached to
    eve.k8sjob("diff", file, *by)
    eventually(lambda: "I am 1" in eve.k8sjob("logs", job, *by), "the worker's output")
    eventually(lambda: "Running" in eve.k8sjob("status", job, *by), "the job to run")
    assert "digits" in eve.k8sjob("list", *by)
    eve.k8sjob("why", job, *by)
    assert "first line" in eve.k8sjob("why", job, "--timing", *by)
    eve.k8sjob("suspend", job, *by)
    eventually(lambda: "Suspended" in eve.k8sjob("status", job, *by), "the suspension")
    eve.k8sjob("resume", job, *by)
    eve.k8sjob("submit", "--replace", job_file(seconds=1), *by)
    assert "Succeeded" in eve.k8sjob("watch", job, *by)
    eve.k8sjob("delete", job, *by)
    assert "digits" not in eve.k8sjob("list", *by)


def test_a_submitter_reads_no_secret_no_other_namespace_and_runs_nothing_in_pods(
    user, running, cluster
):
    eve = user(Grant.SUBMITTER)
    refused = [
        ("get", "secrets"),
        ("get", "secret", "x"),
        ("get", "pods", "-n", "kube-system"),
        ("get", "pods", "-A"),
        ("get", "pytorchjobs", "-n", "default"),
        ("get", "namespaces"),
        ("get", "namespace", "default"),
        ("get", "nodes"),
        ("exec", f"{running}-master-0", "--", "id"),
        ("delete", "pod", f"{running}-master-0"),
        ("run", "x", f"--image={cluster.base_image}"),
        ("create", "rolebinding", "x", "--role=k8sjob-submitter", "--user=mallory"),
        ("create", "configmap", "x"),
        ("create", "token", "default"),
    ]
    for words in refused:
        assert "forbidden" in eve.kubectl(*words).lower(), words
    assert "cannot list pytorchjobs in namespace default" in eve.k8sjob(
        "list", "-n", "default", code=1
    )
    assert "cannot list pytorchjobs in all namespaces" in eve.k8sjob("list", "-A", code=1)
    assert eve.kubectl("get", "pods") == ""  # the refusals above were not for want of a login


@pytest.mark.parametrize(("client", "kind"), IN_TURN, indirect=["kind"])
def test_a_viewer_looks_and_changes_nothing(client, kind, user, *, running, job_file, get):
    eve = user(Grant.VIEWER)
    by = ("--client", client)
    job = f"{eve.namespace}/{running}"
    assert running in eve.k8sjob("list", *by)
    assert "Running" in eve.k8sjob("status", job, *by)
    assert "I am 0" in eve.k8sjob("logs", job, *by)
    eve.k8sjob("why", job, *by)
    plural = by_name(kind).resource
    before = get(plural, running)["spec"]
    for words in (
        ("submit", job_file()),
        ("submit", "--replace", job_file(running, 1)),
        ("suspend", job),
        ("delete", job),
    ):
        assert "cannot" in eve.k8sjob(*words, *by, code=1)
    assert get(plural, running)["spec"] == before
    assert get(plural, "digits") is None


def test_who_may_read_what_runs_pods_lacks_nothing(user, cluster, namespace, eventually):
    """Also of objects that have objects between themselves and their pods."""
    eve = user()
    cluster.kubectl("apply", "-n", namespace, "-f", str(RBAC / "workload-viewer.yaml"))
    to = ("--role=k8sjob-workload-viewer", f"--serviceaccount={namespace}:eve")
    cluster.kubectl("create", "rolebinding", "eve", "-n", namespace, *to)
    make = ("create", "-n", namespace)
    image, crash = f"--image={cluster.base_image}", ("--", "sh", "-c", "echo lost; exit 9")
    cluster.kubectl(*make, "deployment", "web", image, *crash)
    cluster.kubectl(*make, "cronjob", "nightly", image, "--schedule=0 0 1 1 *", *crash)
    cluster.kubectl(*make, "job", "nightly-1", "--from=cronjob/nightly")

    def shown(command, name, client):
        # Nodes and quotas are for other roles, and are left out in silence.
        text = eve.k8sjob(command, f"{namespace}/{name}", "--client", client)
        assert "cannot" not in text
        return text

    names = ("deploy/web", "cronjob/nightly", "job/nightly-1", "pods/app=web")
    for client in CLIENTS:
        for name in names:
            eventually(lambda n=name, c=client: "exit code 9" in shown("why", n, c), name)
            assert "lost" in shown("logs", name, client)
    assert "takes" not in eve.k8sjob("status", f"{namespace}/deploy/web", "--exit-code", code=101)
    assert "takes jobs alone" in eve.k8sjob("delete", f"{namespace}/deploy/web", code=1)


def test_auto_takes_the_first_kind_that_the_user_may_create(user, trainer, cluster, job_file):
    eve = user(Grant.SUBMITTER)
    file = job_file()
    plain = file.with_name("plain.yaml")
    plain.write_text(file.read_text().replace("target: pytorchjob\n", ""))
    assert "target pytorchjob: the first in the order" in eve.k8sjob(
        "submit", plain, "--target", "auto", "--dry-run=server"
    )
    submitter = yaml.safe_load((RBAC / f"{Grant.SUBMITTER}.yaml").read_text())
    submitter["rules"] = [
        rule
        for rule in submitter["rules"]
        if not {"pytorchjobs", "trainjobs"} & {*rule["resources"]}
    ]
    cluster.kubectl("apply", "-n", eve.namespace, "-f", "-", stdin=yaml.safe_dump(submitter))
    chosen = eve.k8sjob("submit", plain, "--target", "auto")
    assert "target jobset: " in chosen
    assert "you cannot create pytorchjobs" in chosen, chosen
    assert eve.k8sjob("diff", plain, "--target", "auto").startswith("target jobset: ")


def test_a_user_without_rights_is_shown_the_roles_and_they_are_enough(user, cluster, job_file):
    eve = user()
    asked = eve.k8sjob("doctor", code=1)
    assert "cannot submit and follow jobs" in asked
    roles = asked[asked.index("\n# The roles") :]
    assert [one["kind"] for one in yaml.safe_load_all(roles)] == ["Role", "RoleBinding"]
    cluster.kubectl("apply", "-f", "-", stdin=roles)
    assert "can do all that k8sjob does" in eve.k8sjob("doctor")
    eve.k8sjob("submit", job_file())


def test_the_cluster_roles_let_the_doctor_see_more(user):
    eve = user(Grant.SUBMITTER, Grant.CLUSTER_VIEWER, Grant.CAPACITY)
    report = json.loads(eve.k8sjob("doctor", "-o", "json"))
    verdicts = {check["topic"]: check["verdict"] for check in report["checks"]}
    assert "cluster-wide" not in verdicts
    assert verdicts["nodes"] == "ok"
    assert "unknown" not in verdicts.values()


def test_without_them_it_says_what_it_cannot_see(user):
    eve = user(Grant.SUBMITTER)
    report = json.loads(eve.k8sjob("doctor", "-o", "json"))
    unknown = {check["topic"] for check in report["checks"] if check["verdict"] == "unknown"}
    assert unknown == {"cluster-wide", "nodes", "storage"}
    assert report["can_submit"] is True
