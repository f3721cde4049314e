"""The facts of a diagnosis: the job, its Pods, their containers, and how these ended."""

from __future__ import annotations

import json
import re
import shlex
import signal
from bisect import bisect
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from k8sjob.backends.api import LOCAL, OUTPUT
from k8sjob.contract import Event, EventKind, ExitCode, Reason
from k8sjob.kube import objects
from k8sjob.kube.objects import Object, event_time, moment
from k8sjob.observe.diagnose.finding import shortened
from k8sjob.observe.status import job_status, processes, training_fields
from k8sjob.targets.api import JobState
from k8sjob.targets.jobs import replica_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from k8sjob.backends.api import Snapshot
    from k8sjob.kube.objects import Json
    from k8sjob.observe.diagnose.finding import Explanation
    from k8sjob.observe.status import JobStatus
    from k8sjob.targets.api import Job, Target

SIGKILLED: Final = 128 + signal.SIGKILL
"""The exit code of a container that the kubelet, the kernel or a person killed."""
GRACE_SECONDS: Final = 120.0
"""Maximum seconds until a container that the kubelet stops has ended, for most grace periods."""
_ONE_FAILURE_SECONDS: Final = 60.0
"""The agents of all nodes answer a failure within this time."""
_INIT_LINES: Final = 3
"""Last lines of an init container that are shown."""
_SECOND: Final = 1.0
"""The kubelet rounds the time of an end down to a second."""
_STOPPED_SECONDS: Final = 900.0
"""A job that is stopped so soon after a restart in place may have been stopped because of it."""
_MOST_NAMED: Final = 8
"""How many Pods a command names that no label selects."""
_PROBED: Final = re.compile("(?:Liveness|Startup) probe")
_DEADLINE: Final = ("longer than specified dead", "exceeded its active deadline")
_CUT_REASON: Final = re.compile(
    r'\{"exit_code": (?P<code>[0-9]{1,3}), "rank": (?P<rank>-?[0-9]{1,6}),'
    r' "type": "(?P<type>[^"\\]*)", "message": "(?P<message>(?:[^"\\]|\\.)*)'
)
"""A Reason in an Event, which keeps 1024 characters."""


class PodContainer:
    """One container of a Pod.

    Attributes:
        name: its name in the Pod.
        spec: as the Pod asks for it.
        status: as the kubelet reports it; empty before it does.
        init: whether it is an init container.
        state: one of waiting, running, terminated.
        waiting: why it waits; empty if it does not.
        ended: how it ended; empty if it has not, or was started again.
    """

    def __init__(self, spec: Json, status: Json, *, init: bool) -> None:
        self.name = str(spec.get("name", ""))
        self.spec, self.status, self.init = spec, status, init
        self.state: Json = status.get("state") or {}
        self.waiting: Json = self.state.get("waiting") or {}
        self.ended: Json = self.state.get("terminated") or {}

    @property
    def initializing(self) -> bool:
        """Whether it runs and the training starts only when it has ended."""
        is_sidecar = self.spec.get("restartPolicy") == "Always"
        return self.init and not is_sidecar and "running" in self.state


@dataclass(frozen=True)
class ReplicaPod(objects.Pod):
    """One Pod of the job.

    Attributes:
        raw: as the apiserver has it.
        replica: "worker-2".
        events: the Events about it, oldest first.
    """

    replica: str
    events: tuple[Json, ...] = ()

    @property
    def created_at(self) -> datetime | None:
        """When it was created."""
        return moment(self.created)

    @property
    def training(self) -> bool:
        """Whether its training container runs, and is not being ended."""
        return "running" in self.container.part("state") and not self.deleting

    @property
    def trained_until(self) -> datetime | None:
        """When its training container ended; None where not known."""
        return moment(self.terminated.get("finishedAt"))

    @cached_property
    def containers(self) -> tuple[PodContainer, ...]:
        """Its containers, the init ones first."""
        return (
            *self._containers("initContainers", "initContainerStatuses", init=True),
            *self._containers("containers", "containerStatuses", init=False),
        )

    @property
    def asked(self) -> Object:
        """The container that trains, as the Pod asks for it."""
        return Object(self.main)

    @property
    def memory_limit(self) -> str:
        """What the container that trains may use at most; empty without a limit."""
        return str(self.asked.part("resources", "limits").get("memory", ""))

    def last_event(self, *reasons: str) -> Json:
        """The newest Event about it with one of these reasons; empty if there is none."""
        return next((e for e in reversed(self.events) if e.get("reason") in reasons), {})

    def _containers(self, key: str, status_key: str, *, init: bool) -> Iterator[PodContainer]:
        statuses = {s.get("name"): s for s in self.status.get(status_key) or ()}
        for spec in self.spec.get(key) or [{"name": name} for name in statuses]:
            yield PodContainer(spec, statuses.get(spec.get("name"), {}), init=init)


class Failure(NamedTuple):
    """One training container that failed.

    Attributes:
        replica: "worker-2".
        exit_code: of the failure; the container's own where nothing more is known.
        why: the kubelet's reason: "Error", "OOMKilled", "StartError".
        message: the termination message, unchanged.
        reason: the same, decoded; None if it is not from k8sjob's runtime.
        time: seconds since the epoch at which it failed.
    """

    replica: str
    exit_code: int
    why: str
    message: str
    reason: Reason | None
    time: float

    @property
    def source(self) -> str:
        """The replica, and its rank where that is known."""
        rank = self.reason.rank if self.reason else -1
        return f"{self.replica}, rank {rank}" if rank >= 0 else self.replica

    @property
    def is_consequence(self) -> bool:
        """Whether another failure, or a request, was the cause of this one."""
        others_absent = bool(self.reason and self.reason.culprits)
        stopped = self.exit_code == ExitCode.STOPPED
        return (stopped or self.means(ExitCode.PEER_LOST)) and not others_absent

    def means(self, code: ExitCode) -> bool:
        """Whether it ended with a code of the runtime's; see Reason.means()."""
        return self.reason.means(code) if self.reason else self.exit_code == code

    @property
    def chosen_by_script(self) -> bool:
        """Whether a script left with its exit code; a command may be a shell that passes one on."""
        return bool(self.reason and self.reason.type == "Exit" and self.reason.rank >= 0)


@dataclass(frozen=True)
class Facts:
    """A job, its objects and its output, at one moment.

    Attributes:
        snapshot: the job and its objects.
        logs: the last lines of each replica's output, by its name; replicas may be missing. Lines
            are those of observe.logs, which know when they were written, or plain text.
        related: objects beside the job's own; see Backend.related.
        now: the present moment.
    """

    snapshot: Snapshot
    logs: Mapping[str, Sequence[str]]
    related: Sequence[Json]
    now: datetime

    @cached_property
    def status(self) -> JobStatus:
        """The state of the job and its replicas."""
        return job_status(self.snapshot)

    @property
    def job(self) -> Job:
        """The job."""
        return self.snapshot.job

    @property
    def target(self) -> Target:
        """The kind of the job."""
        return self.snapshot.job.target

    @property
    def kubectl_name(self) -> str:
        """The job as kubectl takes it."""
        kind, argument = self.target.kind.lower(), self.job.argument
        return f"{argument if '/' in argument else f'{kind} {argument}'} -n {self.namespace}"

    @property
    def pods_argument(self) -> str:
        """The job's Pods as kubectl takes them."""
        selector = self.target.pods.selector(self.name)
        names = " ".join(pod.name for pod in self.pods[:_MOST_NAMED])
        return f"pods -n {self.namespace} {f'-l {shlex.quote(selector)}' if selector else names}"

    @property
    def name(self) -> str:
        """The job's name."""
        return self.job.name

    @property
    def namespace(self) -> str:
        """The job's namespace."""
        return self.status.ref.namespace

    @property
    def namespace_deleted(self) -> datetime | None:
        """When its namespace's deletion was requested; None if it was not, or the job has ended."""
        if self.status.state.finished:
            return None
        namespaces = map(Object, self.of_kind("Namespace"))
        stamps = (namespace.metadata.get("deletionTimestamp") for namespace in namespaces)
        return moment(next(filter(None, stamps), None))

    @cached_property
    def ended_by_deadline(self) -> bool:
        """Whether the operator, or a kubelet by the same deadline of a Pod, ended the job."""
        if self.status.state is not JobState.FAILED:
            return False
        # A kubelet whose clock is ahead ends its Pod before the operator's deadline, and with a
        # backoffLimit of 0 a failed Pod counts first: then the condition names another reason.
        by_kubelet = any(
            pod.status.get("reason") == "DeadlineExceeded"
            and pod.spec.get("activeDeadlineSeconds") == self.job.active_deadline
            for pod in self.pods
        )
        return by_kubelet or any(text in self.status.message for text in _DEADLINE)

    @cached_property
    def kubelet_kills(self) -> dict[str, Json]:
        """The last Event about why the kubelet itself ended the training of a Pod, by its uid."""
        reasons: dict[str, Json] = {}
        kills: dict[str, Json] = {}
        for event in self.snapshot.events:
            subject, reason = Object(event).part("involvedObject"), event.get("reason")
            uid, field = subject.get("uid", ""), subject.get("fieldPath", "")
            if subject.get("kind") != "Pod" or field not in self.training_fields:
                continue
            probed = reason == "Unhealthy" and _PROBED.match(event.get("message", ""))
            if probed or reason in {"DeadlineExceeded", "FailedPostStartHook"}:
                reasons[uid] = event
            elif reason == "Killing":
                kills[uid] = event
        # A probe may fail long before another reason ends the Pod: while Python starts.
        near = timedelta(seconds=GRACE_SECONDS)
        return {
            uid: event
            for uid, event in reasons.items()
            if uid in kills and abs(event_time(kills[uid]) - event_time(event)) <= near
        }

    @cached_property
    def kubelet_kills_by_replica(self) -> dict[str, list[Json]]:
        """The same of the Pods of each replica."""
        kills: defaultdict[str, list[Json]] = defaultdict(list)
        for event in self.kubelet_kills.values():
            pod = Object(event).part("involvedObject").get("name", "")
            kills[self.job.replica_named(pod)].append(event)
        return kills

    @cached_property
    def training_fields(self) -> set[str]:
        """What Events about a Pod, or about its training container, name in it."""
        return training_fields(self.snapshot.job)

    @property
    def local(self) -> bool:
        """Whether it runs on this machine, and in no cluster."""
        return self.namespace == LOCAL

    @property
    def job_argument(self) -> str:
        """The job as a command line names it, whatever the current namespace."""
        return self.name if self.local else str(self.status.ref)

    @property
    def output_argument(self) -> str:
        """The job, or its record, as the commands name it that only show it."""
        return self.snapshot.record or self.job_argument

    @cached_property
    def ranks(self) -> dict[str, int]:
        """How many processes each replica has; `auto` and the like count as one."""
        names, (first, each) = replica_names(self.snapshot.job), processes(self.snapshot.job)
        return dict.fromkeys(names, each) | dict.fromkeys(names[:1], first)

    @cached_property
    def _first_ranks(self) -> dict[str, int]:
        """The first rank of each replica; empty where the spec does not tell."""
        if self.job.is_elastic or not (self.job.nproc_per_node or "1").isdigit():
            return {}
        return dict(zip(self.ranks, accumulate(self.ranks.values(), initial=0), strict=False))

    @cached_property
    def _by_first_rank(self) -> list[tuple[int, str]]:
        return [(first, name) for name, first in self._first_ranks.items()]

    def with_ranks(self, replica: str) -> str:
        """A replica with the ranks of its processes: "worker-0 (rank 1)"."""
        if replica not in self._first_ranks:
            return replica
        first = self._first_ranks[replica]
        last = first + self.ranks[replica] - 1
        return f"{replica} (rank {first})" if first == last else f"{replica} (ranks {first}-{last})"

    def replica_of(self, rank: int) -> str:
        """The replica of a rank; empty if it is not known."""
        at = bisect(self._by_first_rank, rank, key=itemgetter(0)) - 1
        if at < 0:
            return ""
        first, replica = self._by_first_rank[at]
        return replica if rank < first + self.ranks[replica] else ""

    @cached_property
    def pods(self) -> tuple[ReplicaPod, ...]:
        """The job's Pods, Master first."""
        events: defaultdict[tuple[str, str], list[Json]] = defaultdict(list)
        for event in self.snapshot.events:
            subject = Object(event).part("involvedObject")
            events[subject.get("name", ""), subject.get("uid", "")].append(event)
        pods = []
        for pod in map(objects.Pod, self.snapshot.pods):
            # Pods of a JobSet of others have no labels of ours: their names tell.
            replica = self.job.replica_of(pod.raw) or self.job.replica_named(pod.name)
            replica = replica or pod.name.removeprefix(f"{self.name}-")
            pod_events = events[pod.name, pod.uid]  # earlier Pods had other uids
            pods.append(ReplicaPod(pod.raw, replica, tuple(pod_events)))
        return tuple(pods)

    def pod(self, replica: str) -> ReplicaPod | None:
        """The first Pod of a replica; None if there is none."""
        return next(iter(self.pods_of(replica)), None)

    def pods_of(self, replica: str) -> Sequence[ReplicaPod]:
        """The Pods of a replica."""
        return self._pods_by_replica.get(replica, ())

    @cached_property
    def _pods_by_replica(self) -> dict[str, list[ReplicaPod]]:
        pods: dict[str, list[ReplicaPod]] = {}
        for pod in self.pods:
            pods.setdefault(pod.replica, []).append(pod)
        return pods

    def runs_again(self, replica: str) -> bool:
        """Whether a replica runs now, whatever has happened to it before."""
        is_over = self.status.state.finished
        return not is_over and any(pod.training for pod in self.pods_of(replica))

    @cached_property
    def done(self) -> tuple[ReplicaPod, ...]:
        """The Pods whose training ended with exit code 0."""
        return tuple(pod for pod in self.pods if pod.terminated.get("exitCode") == 0)

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """Replicas that the job asks for and that have no Pod.

        A Job keeps a deleted Pod that has ended until it has created the next one.
        """
        keeps = self.target.pods.ended_stay
        present = {pod.replica for pod in self.pods if pod.live or not (keeps and pod.deleting)}
        return tuple(name for name in self.ranks if name not in present)

    @cached_property
    def job_events(self) -> tuple[Json, ...]:
        """The Events about the job itself, and what is made of it, oldest first."""
        return tuple(
            event
            for event in self.snapshot.events
            if Object(event).part("involvedObject").get("kind") != "Pod"
        )

    @cached_property
    def unschedulable(self) -> dict[str, Explanation]:
        """A cache: the scheduler's message and the shape of a Pod -> the explanation."""
        return {}

    @cached_property
    def outputs(self) -> dict[Failure, Any]:
        """A cache: the LastOutput before each failure."""
        return {}

    def of_kind(self, kind: str) -> list[Json]:
        """The related objects of a kind."""
        return [related for related in self.related if related.get("kind") == kind]

    def init_output(self, container: str) -> list[str]:
        """The last lines of an init container that fails, of the first Pod in which it does."""
        outputs = self.of_kind(OUTPUT)
        lines = next((o.get("lines") or () for o in outputs if o.get("container") == container), ())
        return [shortened(line) for line in lines if line.strip()][-_INIT_LINES:]

    @cached_property
    def not_found(self) -> set[tuple[str, str]]:
        """The resources that the apiserver does not have, each with the name; empty: any."""
        statuses = (Object(status).part("details") for status in self.of_kind("Status"))
        return {(details.get("kind", ""), details.get("name", "")) for details in statuses}

    def reported(self, kind: EventKind) -> list[Event]:
        """The runtime's events of a kind in the output of all replicas."""
        return [event for events in self.events.values() for event in events if event.kind == kind]

    @cached_property
    def events(self) -> dict[str, list[Event]]:
        """The runtime's events in the known output of each replica."""
        return {
            replica: [event for line in lines if (event := Event.decode(line))]
            for replica, lines in self.logs.items()
        }

    def tail(self, replica: str, until: float | None = None) -> list[str]:
        """The last lines of a replica that are not empty; those written until a moment."""
        lines = self.logs.get(replica, ())
        if until is not None:
            lines = [line for line in lines if getattr(line, "time", 0.0) <= until]
        return [text for line in lines if (text := line.rstrip())]

    def output_before(self, end: Failure) -> list[str]:
        """The last lines that a failure's replica wrote before it."""
        failure, lines = self._restarts.get(end.replica, (None, []))
        # After a restart in place the container writes on: the lines before it have the reason.
        if failure and end.time <= failure.time + _ONE_FAILURE_SECONDS:
            return lines
        return self.tail(end.replica, self._ended_before.get(end.replica))

    @cached_property
    def _ended_before(self) -> dict[str, float]:
        """When the containers that run again had ended, by replica."""
        again = [pod for pod in self.pods if pod.training and pod.terminated_before]
        ended = {pod.replica: moment(pod.terminated_before.get("finishedAt")) for pod in again}
        return {name: time.timestamp() + _SECOND for name, time in ended.items() if time}

    @cached_property
    def ends(self) -> list[Failure]:
        """The newest failure of each replica that has one.

        A Pod shows its container's last end. When the controller has deleted the Pod (a crashing
        one counts as running, so cleanPodPolicy Running deletes it) the Events still show it.
        """
        newest: dict[str, Failure] = {}
        started = self.status.started  # or resumed: what ended before does not matter
        recorded = [
            record
            for record in self.snapshot.job.recorded_ends(self.snapshot.events)
            if not (started and (ended := moment(record.time)) and ended < started)
        ]
        # An Event "Error" has the termination message; "ExitedWithCode" and a Job's condition have
        # the exit code alone, so they count only where nothing else is known.
        detailed = (_end(*record[:5]) for record in recorded if record.whole)
        for end in (*detailed, *self._ends_of_pods()):
            if end.replica not in newest or newest[end.replica].time <= end.time:
                newest[end.replica] = end
        for record in reversed(recorded):
            if not record.whole:
                newest.setdefault(record.replica, _end(*record[:5]))
        return list(newest.values())

    @property
    def restarts(self) -> list[Failure]:
        """Failures after which a replica's agent started its processes again in place.

        Each is the newest failure of a replica that runs now, or ran until the job was stopped.
        """
        return [end for end, _ in self._restarts.values()]

    @cached_property
    def _restarts(self) -> dict[str, tuple[Failure, list[str]]]:
        """The same by replica, each with the lines before it."""
        status, restarts = self.status, dict[str, tuple[Failure, list[str]]]()
        newest = {end.replica: end.time for end in self.ends}
        since = status.started.timestamp() if status.started else 0.0  # see ends
        # The ends of a stopped job are the stop; a hang just before it may be why it was stopped.
        if status.state is JobState.STOPPED and status.finished:
            newest, since = {}, status.finished.timestamp() - _STOPPED_SECONDS
        elif status.state.finished:
            return restarts
        done = {pod.replica for pod in self.done}
        for replica in self.logs:
            lines = self.tail(replica)
            number, event = _last_restart(lines)
            reason, time = Reason.decode(json.dumps(event.data.get("reason"))), event.time
            matters = replica not in done and time > max(since, newest.get(replica, 0.0))
            if matters and reason and reason.exit_code:
                end = Failure(replica, reason.exit_code, "", "", reason, time)
                restarts[replica] = end, lines[:number]
        return restarts

    def _ends_of_pods(self) -> Iterator[Failure]:
        for pod in self.pods:
            ended = pod.terminated or pod.terminated_before
            # On this machine a replica that was stopped with its job keeps its Pod.
            if ended.get("exitCode") and ended.get("reason") != "Stopped":
                yield _end(
                    pod.replica,
                    int(ended["exitCode"]),
                    ended.get("reason", ""),
                    ended.get("message", ""),
                    ended.get("finishedAt", ""),
                )


def _end(replica: str, exit_code: int, why: str, message: str, stamp: str) -> Failure:
    reason = Reason.decode(message) or _cut_reason(message)
    ended = moment(stamp)
    time = reason.time if reason and reason.time else ended.timestamp() if ended else 0.0
    # The container's own may be RESTARTS_SPENT; a container that failed did not end with 0.
    code = (reason.exit_code if reason else 0) or exit_code
    return Failure(replica, code, why, message, reason, time)


def _last_restart(lines: Sequence[str]) -> tuple[int, Event]:
    """The newest RESTARTING event and the number of its line; an empty one if there is none."""
    for number in reversed(range(len(lines))):
        event = Event.decode(lines[number]) if EventKind.RESTARTING in lines[number] else None
        if event and event.kind == EventKind.RESTARTING:
            return number, event
    return 0, Event(EventKind.RESTARTING)


def _cut_reason(message: str) -> Reason | None:
    """The reason in a termination message whose end is missing."""
    fields = _CUT_REASON.match(message)
    if fields is None:
        return None
    whole = re.sub(r"\\u[0-9a-f]{0,3}$", "", fields["message"])  # it may be cut within a character
    try:
        text = json.loads(f'"{whole}"', strict=False)
    except ValueError:
        return None
    return Reason(int(fields["code"]), int(fields["rank"]), fields["type"], text)
