"""The next step of an error fits its class; the texts are those that people reported."""

import json
import re
from pathlib import Path

import pytest
from observed import MASTER, NOW, OF_JOB_YAML, PAIR, about_job, ended, make_pod, reported, snapshot

from k8sjob.contract import Event, Reason
from k8sjob.findings import Finding
from k8sjob.observe.diagnose import diagnose, next_steps
from k8sjob.observe.diagnose.facts import Facts
from k8sjob.observe.diagnose.next_steps import in_manifest

REPORTS = json.loads(Path(__file__).with_name("next_steps.json").read_text())
TRACEBACK = ["Traceback (most recent call last):", '  File "/app/main.py", line 3, in <module>']
RULE_FILES = sorted(Path(next_steps.__file__).parent.glob("rules/[!m]*.toml"))


def first(end, lines, *, foreign=False, **job):
    labels = {"app.kubernetes.io/managed-by": "Helm"} if foreign else None
    pod = make_pod("master-0", "Failed", terminated=end)
    failed = snapshot("Failed:x:y", replicas=MASTER, pods=[pod], labels=labels, **job)
    return diagnose(failed, {"master-0": lines}, now=NOW)[0]


@pytest.mark.parametrize("report", REPORTS, ids=[report["source"] for report in REPORTS])
def test_a_reported_error(report):
    lines = report.get("output") or [*TRACEBACK, *report["error"]]
    findings = [first(ended(report.get("exit", 1)), lines, foreign=report.get("foreign", False))]
    if "error" in report:  # as k8sjob's runtime reports it
        kind, _, message = "\n".join(report["error"]).partition(": ")
        end = reported(1, 0, kind.rpartition(".")[2], message, "main.py:3")
        findings.append(first(end, lines, foreign=report.get("foreign", False)))
    for finding in findings:
        assert finding.id == report["cause"]
        assert report["says"] in finding.next_step
        assert report["never"] not in finding.next_step
        assert report.get("names", "") in finding.message


@pytest.mark.parametrize("file", RULE_FILES, ids=[file.stem for file in RULE_FILES])
def test_no_step_for_a_foreign_job_names_a_field_of_a_job_yaml(file):
    facts = Facts(snapshot("Running", replicas=MASTER), {}, [], NOW)
    texts = re.findall(r'^(?!pattern|types|local)\w+ = "(.*)"$', file.read_text(), re.MULTILINE)
    for step in texts:
        finding = in_manifest(facts, Finding("x", "", step))
        assert not OF_JOB_YAML.search(finding.next_step)


def in_templates(seen, **fields):
    """The same job with these fields in the spec of each of its Pods."""
    for template in seen.job.raw["spec"]["pytorchReplicaSpecs"].values():
        template["template"] = {"spec": fields}
    return seen


@pytest.mark.parametrize(
    ("volume", "restarts", "own"),
    [
        ({"emptyDir": {}}, 1, True),
        ({"emptyDir": {}}, 0, False),
        ({"persistentVolumeClaim": {"claimName": "c"}}, 1, False),
    ],
)
@pytest.mark.parametrize("over", [True, False])
def test_ranks_whose_checkpoints_are_on_their_own_disks(volume, restarts, own, over):
    left = Reason(138, 1, "Left", "rank 0 had ended with exit code 0: lost", culprits=(0,))
    done = make_pod("master-0", "Succeeded", terminated=ended(0, time="05:00"))
    end = {"terminated": ended(138, left.encode(), time="05:01")} if over else {"running": {}}
    pods = [done, make_pod("worker-0", restarts=0, **end)]
    state = "Succeeded" if over else "Running"
    seen = in_templates(
        snapshot(state, replicas=PAIR, pods=pods), volumes=[{"name": "v", **volume}]
    )
    restarted = Event("restarting", {"reason": {}}, 1.0).encode()
    finding = diagnose(seen, {"worker-0": [restarted] * restarts}, now=NOW)[0]
    assert finding.id == "left-early"
    both = ("ReadWriteMany" in finding.next_step, "k8sjob lint" in finding.next_step)
    assert both == (own, not own)


REFUSED = 'pods "job-worker-0" is forbidden: violates PodSecurity "restricted:latest": '
INIT = (
    'seccompProfile (pod or container "init-pytorch" must set securityContext.seccompProfile.type)'
)
PATH = 'restricted volume types (volume "d" uses restricted volume type "hostPath")'


@pytest.mark.parametrize(
    ("detail", "restricted", "says", "never"),
    [
        (INIT, True, "operator's own", "security: restricted"),
        (PATH, True, "hostPath", "security: restricted"),
        (INIT, False, "security: restricted", "hostPath"),
    ],
)
def test_what_pod_security_refuses_of_a_restricted_job(detail, restricted, says, never):
    asked = {"securityContext": {"allowPrivilegeEscalation": not restricted}}
    refused = about_job("FailedCreatePod", f"Error creating: {REFUSED}{detail}")
    seen = in_templates(snapshot("Created", events=[refused]), containers=[asked])
    finding = diagnose(seen, {}, now=NOW)[0]
    assert finding.id == "pod-security"
    assert says in finding.next_step
    assert never not in finding.next_step


def test_the_operators_init_container_that_would_be_root():
    waiting = {"reason": "CreateContainerConfigError", "message": "container has runAsNonRoot"}
    pods = [make_pod(name, "Pending", waiting={"reason": "x"}) for name in ("master-0", "worker-0")]
    pod = pods[1]
    pod.setdefault("spec", {})["initContainers"] = [{"name": "init-pytorch"}]
    status = {"name": "init-pytorch", "state": {"waiting": waiting}}
    pod["status"]["initContainerStatuses"] = [status]
    finding = diagnose(snapshot("Created", replicas=PAIR, pods=pods), {}, now=NOW)[0]
    assert finding.id == "container"
    assert "operator's init container" in finding.next_step
    assert "image" not in finding.next_step


@pytest.mark.parametrize("state", ["Running", "Failed:x:backoff limit"])
def test_only_a_job_that_has_not_ended_has_a_next_start(state):
    pod = make_pod("master-0", restarts=3, waiting={"reason": "CrashLoopBackOff"}, last=ended(1))
    finding = diagnose(snapshot(state, replicas=MASTER, pods=[pod]), {}, now=NOW)[0]
    assert "restarted 3 times" in finding.message
    assert ("next start" in finding.message) is (state == "Running")
