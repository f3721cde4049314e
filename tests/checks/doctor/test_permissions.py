"""One table: the doctor asks for it, manifests/rbac grants it, the reference shows it."""

import re
from itertools import chain, product
from pathlib import Path

import pytest
import yaml

from k8sjob.checks.doctor.check import Permission
from k8sjob.checks.doctor.permissions import (
    RULES,
    Grant,
    binding,
    role,
)

ROOT = Path(__file__).resolve().parents[3]
RBAC = ROOT / "manifests/rbac"


@pytest.mark.parametrize("grant", Grant)
def test_the_manifest_grants_the_table(grant):
    assert yaml.safe_load((RBAC / f"{grant}.yaml").read_text()) == role(grant)


def test_the_collector_has_the_rights_of_all_who_look():
    objects = yaml.safe_load_all((ROOT / "manifests/collector/collector.yaml").read_text())
    shipped = next(item for item in objects if item["kind"] == "ClusterRole")
    lookers = [role(grant) for grant in (Grant.VIEWER, Grant.CLUSTER_VIEWER, Grant.CAPACITY)]
    rights, expected = (
        {
            right
            for rule in chain.from_iterable(one["rules"] for one in roles)
            for right in product(rule["apiGroups"], rule["resources"], rule["verbs"])
        }
        for roles in ([shipped], lookers)
    )
    assert rights == expected


def test_the_binding_is_an_example_of_what_the_doctor_asks_for():
    shipped = yaml.safe_load((RBAC / "binding.yaml").read_text())
    assert shipped == binding(Grant.SUBMITTER, [{"kind": "Group", "name": "ml-team"}])


def test_there_is_no_other_manifest():
    names = {path.stem for path in RBAC.iterdir()}
    assert names == {*Grant, "binding", "kubeflow-user", "workload-viewer"}


def test_the_reference_shows_the_table():
    page = (ROOT / "docs/reference/rbac.md").read_text()
    shown = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)
    rows = [(r.name, ", ".join(r.verbs), r.used_by, str(r.grant)) for r in RULES]
    assert [tuple(cell.strip() for cell in row) for row in shown] == rows


def test_nothing_secret_and_nothing_in_pods_is_granted():
    granted = {(rule.group, rule.resource) for rule in RULES}
    assert not granted & {("", "secrets"), ("", "pods/exec"), ("", "pods/attach"), ("", "*")}
    changed = {r.name for r in RULES if not {"get", "list", "watch"}.issuperset(r.verbs)}
    jobs = {"pytorchjobs.kubeflow.org", "jobs.batch", "jobsets.jobset.x-k8s.io"}
    trainer = {f"train{kind}.trainer.kubeflow.org" for kind in ("jobs", "ingruntimes")}
    assert changed == {*jobs, *trainer, "services"}


def test_a_review_names_subresource_group_and_namespace():
    log = Permission("get", "pods/log").review("team")["spec"]["resourceAttributes"]
    assert log == {
        "verb": "get",
        "group": "",
        "resource": "pods",
        "subresource": "log",
        "namespace": "team",
    }
    nodes = Permission("list", "nodes", cluster_wide=True).review("team")
    assert nodes["spec"]["resourceAttributes"] == {"verb": "list", "group": "", "resource": "nodes"}


def test_a_service_account_is_bound_with_its_namespace():
    account = {"kind": "ServiceAccount", "name": "ci", "namespace": "team"}
    bound = binding(Grant.CAPACITY, [account])
    assert bound["kind"] == "ClusterRoleBinding"
    assert bound["roleRef"]["kind"] == "ClusterRole"
    assert bound["subjects"] == [account]
