"""Jobs of a real cluster, watched to their end."""

import json
import signal
import threading
import time

import pytest

from k8sjob.backends.cluster import connect
from k8sjob.observe.watch import watch

pytestmark = pytest.mark.cluster

EVENT = '{{"kind":"progress","time":1.0,"data":{{"epochs":1,"step":%d,"steps":3}}}}'
PROGRESS = f"""
for i in 1 2 3; do
  printf 'k8sjob/1 {EVENT}\\n' $i
  sleep 0.5
done
{{then}}
"""


@pytest.fixture
def make(created):
    """Creates a PyTorchJob of a Master's script, and Workers that sleep."""
    idle = ["sh", "-c", "echo here; sleep 600 & wait"]
    return lambda name, script, *, workers=0: created(
        name, ["sh", "-c", script], idle if workers else None
    )


def states(events):
    return [event.data["state"] for event in events if event.kind == "job"]


def test_what_a_user_does_meanwhile_is_seen(make):
    backend, ref = make("moved", "sleep 600 & wait")
    seen = []
    for event in watch(backend, ref):
        if event.kind != "job" or event.data["state"] in seen:
            continue
        seen.append(event.data["state"])
        if seen[-1] == "Running":
            backend.suspend(ref, value="Suspended" not in seen)
            if "Suspended" in seen:
                backend.delete(ref)
        if seen[-1] == "Suspended":
            seen.remove("Running")
            backend.suspend(ref, value=False)
    assert seen[-3:] == ["Suspended", "Running", "Deleted"]


def test_a_watch_outlives_its_connections(make, proxy):
    _, ref = make("cut", PROGRESS.format(then="sleep 8"), workers=1)
    through = connect(kubeconfig=proxy.kubeconfig, namespace=ref.namespace)
    events = []
    for event in watch(through, ref):
        events.append(event)
        if event.kind == "progress" and event.data["step"] == 2:
            proxy.up = False
            proxy.cut()
            threading.Timer(3, setattr, (proxy, "up", True)).start()
    assert states(events)[-1] == "Succeeded"
    assert [e.data["step"] for e in events if e.kind == "progress"] == [1, 2, 3]
    assert {e.replica for e in events if e.kind == "replica"} == {"master-0", "worker-0"}
    last = [e.data for e in events if e.kind == "job"][-1]
    assert last["finished"] >= last["started"] >= last["created"]
    detail = [e.data["message"] for e in events if e.kind == "warning"]
    assert any("is lost" in message for message in detail)
    assert any("is back" in message for message in detail)


@pytest.mark.parametrize("stops", ["operator", "kubelet"])
def test_a_part_of_the_cluster_that_goes_away_for_a_while(collected, bed, make, stops):
    backend, ref = make("outage", PROGRESS.format(then="sleep 5"), workers=1)
    events = []
    for event in watch(backend, ref):
        events.append(event)
        if event.kind == "progress" and event.data["step"] == 2:
            bed.kill(stops)
            threading.Timer(8, bed.start, (stops,)).start()
    assert states(events)[-1] == "Succeeded"


def test_all_jobs_of_a_namespace(make, desk):
    _, ref = make("one", "sleep 20")  # of a job that has ended before it a watch says nothing
    watching = desk.start("watch", "-n", ref.namespace, "-o", "json")
    last, deadline = {}, time.monotonic() + 120
    while set(last.values()) != {"Succeeded", "Failed"}:
        assert time.monotonic() < deadline, last
        data = json.loads(watching.stdout.readline())["data"]
        if not last:  # it watches
            make("two", "exit 1")
        last[f"{data['namespace']}/{data['name']}"] = data["state"]
    assert last == {str(ref): "Succeeded", f"{ref.namespace}/two": "Failed"}
    watching.send_signal(signal.SIGINT)
    watching.communicate(timeout=30)
    assert watching.returncode == 130
