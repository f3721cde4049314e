"""A back end in memory, for what only reads jobs and their output."""

import time
from datetime import UTC, datetime

from k8sjob.backends.api import JobRef, LogLine, Snapshot
from k8sjob.backends.record import write_record
from k8sjob.contract import Event
from k8sjob.errors import BackendError, JobNotFound
from k8sjob.targets.jobs import job_of

STAMP = "2026-01-01T00:00:00.{:09}Z"


class JobsInMemory:
    """A back end of jobs that a test gives it, with their pods and the lines of their Master."""

    recorded = False

    def __init__(self, **jobs):
        self.there, self.pods, self.lines, self.asked = dict(jobs), {}, {}, []
        self.problem = None

    def write(self, name, *texts):
        """Lines, or events, of a job's Master; one of a real time is written then."""
        lines = self.lines.setdefault(name, [])
        for text in texts:
            written = text.encode() if isinstance(text, Event) else text
            at = text.time if isinstance(text, Event) else 0.0
            if lines and not lines[-1].timestamp.startswith(STAMP[:10]):
                at = at or time.time()  # a text after an event of a real time
            real = datetime.fromtimestamp(at, UTC).isoformat()
            stamp = real if at > 1e9 else STAMP.format(len(lines))
            lines.append(LogLine("master-0", 0, stamp, written))

    def jobs(self):
        if self.problem:
            raise BackendError(self.problem)
        return [Snapshot(job_of(one)) for one in self.there.values()]

    def snapshot(self, ref):
        if ref.name not in self.there:
            raise JobNotFound(f"no job {ref.name}")
        return Snapshot(job_of(self.there[ref.name]), self.pods.get(ref.name, ()))

    def watch(self, ref, *, stop=None):
        seen = None
        while not stop.is_set() and ref.name in self.there:
            if self.there[ref.name] is not seen:
                seen = self.there[ref.name]
                yield Snapshot(job_of(seen), self.pods.get(ref.name, ()))
            time.sleep(0.01)

    def logs(self, ref, replica, *, follow=False, stop=None, **_options):
        at = 0
        own = [pod for pod in self.pods.get(ref.name, ()) if replica in pod["metadata"]["name"]]
        ended = any(pod["status"]["phase"] in {"Failed", "Succeeded"} for pod in own)
        while True:
            lines = self.lines.get(ref.name, []) if replica == "master-0" else []
            yield from lines[at:]
            at = len(lines)
            if ended or not follow or stop.is_set():
                return
            time.sleep(0.01)

    def related(self, _snapshot):
        return ()

    def suspend(self, ref, *, value, waiting=None):
        self.asked.append(("suspend" if value else "resume", ref.name))

    def delete(self, ref):
        self.asked.append(("delete", ref.name))
        del self.there[ref.name]

    def find(self, name):
        return JobRef.of(job_of(self.there[name]))


def record(path, document, pods, lines):
    """Writes the record of a job with these pods and lines of its Master; its file."""
    meta = document["metadata"]
    backend = JobsInMemory(**{meta["name"]: document})
    backend.pods[meta["name"]], backend.lines[meta["name"]] = pods, lines
    with path.open("wb") as out:
        write_record(backend, JobRef(meta["name"], meta["namespace"]), out, lambda *_: None)
    return path
