"""The page of `k8sjob ui` over a real cluster: the list, a job, and what it changes."""

import re
from urllib.parse import quote

from ui.conftest import Client

from k8sjob.observe.status import JobState


def page(desk, *args):
    """A client of the page, and its token."""
    process = desk.start("ui", "-n", desk.namespace, *args)
    port, token = re.fullmatch(
        r"http://127\.0\.0\.1:(\d+)/#token=([\w-]+)\n", process.stdout.readline()
    ).groups()
    return Client(int(port), token)


def test_a_job_on_the_page(desk, eventually):
    desk.call("submit", desk.file("echo hello; sleep 600 & wait"))
    client = page(desk)
    with client.stream("/api/events") as events:
        rows = {}
        for name, data in events:
            rows |= {row["name"]: row for row in data["jobs"]} if name == "jobs" else {}
            if "tiny" in rows and rows["tiny"]["counts"] == {"Running": 2}:
                break
        key = quote(rows["tiny"]["key"])
        assert rows["tiny"]["namespace"] == desk.namespace
        with client.stream(f"/api/jobs/{key}/events") as of_job:
            texts = []
            for _, news in of_job:
                texts += [line["text"] for line in news["lines"]]
                if texts.count("hello") == 2:
                    break
        status = client.ask(f"/api/jobs/{key}/status")[2]
        assert {one["node"] for one in status["replicas"]} > {""} or status["replicas"][0]["node"]
        assert "kind: PyTorchJob" in client.ask(f"/api/jobs/{key}/manifest")[2]["text"]

        assert client.ask(f"/api/jobs/{key}/suspend", "POST")[0] == 200
        eventually(lambda: desk.status().state is JobState.SUSPENDED, "the suspension")
        eventually(lambda: not desk.objects("pods"), "the end of its pods")
        assert client.ask(f"/api/jobs/{key}/resume", "POST")[0] == 200
        eventually(lambda: desk.status().counts == {"Running": 2}, "its replicas")

        uid = desk.uid()
        code, _, body = client.ask(f"/api/jobs/{key}/rerun", "POST")
        new = f"cluster:{desk.uid()}"
        assert (code, body) == (200, {"done": f"{desk.namespace}/tiny replaced", "key": new})
        assert desk.uid() != uid
        assert desk.call("diff", desk.file("echo hello; sleep 600 & wait")) == ("", "")
        for name, data in events:
            rows |= {row["key"]: row for row in data["jobs"]} if name == "jobs" else {}
            if new in rows:
                break
        assert client.ask(f"/api/jobs/{quote(new)}/delete", "POST")[0] == 200
        eventually(lambda: not desk.objects("pytorchjobs"), "its end")
    client.close()
