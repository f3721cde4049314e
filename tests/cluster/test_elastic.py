"""An elastic job of the operator: its Workers meet by themselves, also without the first."""

import json
from pathlib import Path

from k8sjob.contract import Event

MAIN = (Path(__file__).parents[1] / "dist/programs/until.py").read_text()


def test_the_first_worker_is_lost_and_the_others_go_on(desk, checkpoints, eventually):
    checkpoints("checkpoints")
    file = desk.code(
        MAIN,
        "elastic",
        run={"script": "main.py", "args": ["/checkpoints/done"], "env": {"OMP_NUM_THREADS": "1"}},
        replicas={"workers": 1, "elastic": {"min": 1, "max": 2}},
        checkpoint={"dir": "/checkpoints", "every": 1},
        volumes=[{"name": "checkpoints", "mount": "/checkpoints", "pvc": "checkpoints"}],
    )
    desk.call("submit", file)

    def events(kind, *names):
        told = [desk.cluster.logs(f"elastic-{name}", desk.namespace) for name in names]
        found = [Event.decode(line) for lines in told for line in lines]
        return [event.data for event in found if event and event.kind == kind]

    both = ("worker-0", "worker-1")
    eventually(lambda: events("metrics", *both), "an epoch", deadline=300)
    before = desk.objects("pods")["elastic-worker-0"]["metadata"]["uid"]
    desk.cluster.delete("pods", "elastic-worker-0", desk.namespace)
    eventually(lambda: events("resumed", *both), "the next round", deadline=300)
    pods = desk.objects("pods")
    assert pods["elastic-worker-0"]["metadata"]["uid"] != before
    assert pods["elastic-worker-1"]["status"]["containerStatuses"][0]["restartCount"] == 0
    desk.cluster.kubectl(
        "exec", "-n", desk.namespace, "elastic-worker-1", "--", "touch", "/checkpoints/done"
    )
    desk.call("watch", "elastic", "-n", desk.namespace)
    status = json.loads(desk.call("status", "elastic", "-n", desk.namespace, "-o", "json")[0])
    assert status["state"] == "Succeeded"
