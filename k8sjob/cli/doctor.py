"""`k8sjob doctor`."""

from __future__ import annotations

import sys
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Final

import click
from rich.text import Text

from k8sjob.backends.local.machine import check_packages
from k8sjob.checks.doctor import Report, examine, gather
from k8sjob.checks.doctor.check import problem, verdict, warning
from k8sjob.checks.doctor.machine import here
from k8sjob.cli.find_job import Place, place_options
from k8sjob.cli.jobfile import AUTO, JobFile, job_command, target_option, with_target
from k8sjob.cli.options import format_option
from k8sjob.cli.output import document
from k8sjob.contract import counted
from k8sjob.errors import BackendError
from k8sjob.findings import Finding, Severity
from k8sjob.jobs.plan import plan_job
from k8sjob.jobs.submit import for_namespace
from k8sjob.kube.objects import Object
from k8sjob.sanitize import safe_line
from k8sjob.targets.jobs import DEFAULT, by_name
from k8sjob.view.views import console_for
from k8sjob.yamldoc import dump

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.checks.doctor.check import ClusterFacts
    from k8sjob.spec import JobSpec


_STYLES: Final = {
    Severity.OK: "green",
    Severity.UNKNOWN: "dim",
    Severity.WARNING: "yellow",
    Severity.ERROR: "bold red",
}
_RECORDS: Final = 20
"""Newest records that are searched for slow nodes."""
_SHOWN: Final = 5
_WIDTH: Final = max(len(verdict(severity)) for severity in Severity)


@job_command("doctor", required=False)
@target_option
@place_options()
@format_option("table", "json", "yaml")
def doctor_command(job: JobFile | None, target: str | None, place: Place, output: str) -> int:
    """Check that jobs can be submitted, and show how to fix what is missing.

    Checks the cluster, the controller of the jobs, your permissions, free GPUs and the namespace;
    with a job.yaml as FILE also whether that job would fit and be accepted. Nothing is created or
    changed. If no cluster is configured, this machine is checked. The exit code is 1 if there is a
    problem.
    """
    spec = job.load() if job else None
    if target == AUTO:
        if spec is None:
            raise click.UsageError("--target auto chooses for a job; name its file, or a target")
        if place.asks_cluster:
            spec = with_target(spec, target, place)
            target = spec.target
    elif spec and target:
        spec = spec.with_(target=target)
    if not place.asks_cluster:
        report = Report([*here(), *_for_local_jobs(spec, job), _no_cluster(place)])
    else:
        with job.located() if job else nullcontext():
            report = _cluster(place, spec, target)
    if output == "table":
        _show(report)
    else:
        document(report.as_dict(), output)
    return int(report.is_blocked)


def _cluster(place: Place, spec: JobSpec | None, target: str | None) -> Report:
    namespace = place.namespace or (spec.namespace if spec else None)
    try:
        backend = place.connect(namespace)
    except BackendError as error:
        # A kubeconfig that cannot be used is a result of doctor, as the packages that are missing
        # are.
        step = error.next_step or "correct the kubeconfig"
        refusal = problem("kubeconfig", error.message, step)
        return Report([refusal])
    transport = backend.transport
    plan = plan_job(spec) if spec else None
    with suppress(BackendError):  # a check says that the cluster cannot be reached
        plan = for_namespace(plan, backend) if plan else None
    job = plan.job if plan else None
    kind = by_name(target or DEFAULT.name)
    facts = gather(transport, transport.namespace, job, target=kind)
    report = examine(facts)
    checks = [*report.checks, *_slow_nodes(facts)]
    return Report(checks, report.context, report.namespace, report.rbac)


def _slow_nodes(facts: ClusterFacts) -> Iterator[Finding]:
    """Nodes of the cluster that were the slowest of several jobs, by the newest records."""
    from k8sjob.backends.record import RecordBackend, Records  # noqa: PLC0415 - only for clusters
    from k8sjob.observe.usage import read_usage, slow_nodes  # noqa: PLC0415 - the same

    node_names = {Object(node).name for node in facts.items("nodes") or ()}
    usages = []
    with suppress(BackendError):
        for path in Records().newest()[:_RECORDS] if node_names else ():
            with suppress(BackendError):
                record = RecordBackend(path)
                usages.append(read_usage(record, record.snapshot(record.find(""))))
    for node, jobs in slow_nodes(usages).items():
        # Records may be of another cluster.
        if node in node_names:
            share = f"{len(jobs)} of the last {counted(len(usages), 'job')}"
            yield warning(
                "slow node",
                f"node {node} was the slowest of {share}",
                f"have it checked; until then, keep jobs off it: kubectl cordon {node}",
                details=tuple(str(usage.ref) for usage in jobs[:_SHOWN]),
            )


def _for_local_jobs(spec: JobSpec | None, job: JobFile | None) -> Iterator[Finding]:
    """Whether the packages of a job's image are installed here."""
    if spec is None or job is None:
        return
    try:
        check_packages(spec, job.folder / spec.code_folder)
    except BackendError as error:
        yield warning("packages", error.message, error.next_step)


def _no_cluster(place: Place) -> Finding:
    if place.is_local:
        return warning("cluster", "no cluster was checked", "omit --local to check one")
    return warning(
        "cluster",
        "no cluster is configured: there is no kubeconfig",
        "set KUBECONFIG or write ~/.kube/config to submit jobs; k8sjob run needs none",
    )


def _show(report: Report) -> None:
    console = console_for(sys.stdout)
    margin = max(len(check.id) for check in report.checks)
    indent = " " * (_WIDTH + margin + 4)
    for check in report.checks:
        word = (f"{verdict(check.severity):{_WIDTH}}  ", _STYLES[check.severity])
        topic = (f"{check.id:{margin}}  ", "bold")
        lines = [Text.assemble(word, topic, safe_line(check.message))]
        lines += [Text(indent + safe_line(detail), "dim") for detail in check.details]
        if check.next_step:
            lines.append(Text.assemble(indent, ("next: ", "bold"), safe_line(check.next_step)))
        # Not wrapped by rich: the next steps contain commands to copy.
        console.print(Text("\n").join(lines), soft_wrap=True)
    console.print(Text(f"\n{_verdict(report)}"), soft_wrap=True)
    if report.rbac:
        click.echo("\n# The roles to ask for; a cluster administrator can kubectl apply -f them.")
        click.echo("---\n".join(dump(role) for role in report.rbac), nl=False)


def _verdict(report: Report) -> str:
    problems = sum(check.severity is Severity.ERROR for check in report.checks)
    if problems:
        return f"{counted(problems, 'problem')} to solve before a job can be submitted"
    if not report.context:
        warnings = {check.id for check in report.checks if check.severity is Severity.WARNING}
        if lacking := " and ".join(sorted(warnings & {"torch", "packages"})):
            return f"k8sjob run cannot run a job on this machine: see {lacking} above"
        return "k8sjob run can run jobs on this machine"
    return f"jobs can be submitted to {report.namespace} (context {report.context})"
