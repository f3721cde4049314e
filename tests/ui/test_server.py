"""What the page's server answers, and to whom."""

import math
import socket
import struct
import time
from contextlib import ExitStack, suppress

import pytest
from inmemory import JobsInMemory
from trainings import pod
from ui.conftest import TOKEN, job

from k8sjob.backends.record import RecordBackend, write_record
from k8sjob.contract import Event, EventKind
from k8sjob.errors import BackendError
from k8sjob.ui import server
from k8sjob.ui.details import MOST_LINES

KEY = "local:uid-digits"
GONE = "local:uid-gone"
_ENDED = {"exitCode": 1, "reason": "Error", "message": "ValueError: <b>empty</b>\x1b[2J"}
_CONTAINERS = [{"name": "pytorch", "state": {"terminated": _ENDED}}]
FAILED = pod("master-0", 0) | {"status": {"phase": "Failed", "containerStatuses": _CONTAINERS}}


def rows(events):
    """What the list has shown so far, by name, from the first whole list on."""
    shown = {}
    for name, data in events:
        if name == "jobs":
            shown |= {row["name"]: row for row in data["jobs"]}
            if not data["unread"]:
                yield shown, data


def first_list(client):
    with client.stream("/api/events") as events:
        return next(rows(events))[0]


@pytest.fixture
def digits():
    backend = JobsInMemory(digits=job("digits"))
    backend.write(
        "digits",
        Event(EventKind.STARTED, {"world_size": 2, "strategy": "ddp"}, 1.0),
        Event(EventKind.PROGRESS, {"epoch": 0, "step": 1, "steps": 2, "loss": 2.0}, 2.0),
        Event(EventKind.PROGRESS, {"epoch": 0, "step": 2, "steps": 2, "loss": 1.0}, 3.0),
        Event(EventKind.METRICS, {"test_accuracy": 0.5, "note": "x"}, 3.0),  # at once
        "\x1b[31mred\x1b[0m <b>\u202ebold",
    )
    return backend


@pytest.fixture
def client(serve, digits):
    """One that has seen the list."""
    made = serve(digits)
    first_list(made)
    return made


# --- who is answered ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, 200),
        ({"Host": "localhost:80"}, 200),
        ({"Host": "[::1]:8080"}, 200),
        ({"Authorization": ""}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer \u00e9"}, 401),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "localhost@evil.example"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
        ({"Sec_Fetch_Site": "same-origin"}, 200),
    ],
)
def test_only_the_page_itself_is_answered(client, headers, code):
    assert client.ask(f"/api/jobs/{KEY}/status", **headers)[0] == code


def test_the_address_may_be_a_link_on_another_page(serve):
    client = serve(JobsInMemory())
    link = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
    assert client.ask("/", **link)[0] == 200
    assert client.ask("/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors")[0] == 403
    assert client.ask("/api/events", **link)[0] == 403


def test_nothing_of_the_interface_is_reached_without_the_token(client, digits):
    for path in ("/api/events", f"/api/jobs/{KEY}/events", "/api/compare", "/api/anything"):
        assert client.ask(path, Authorization="")[0] == 401
    for action in ("suspend", "delete"):
        assert client.ask(f"/api/jobs/{KEY}/{action}", "POST", Authorization="")[0] == 401
    assert digits.asked == []


def test_the_page_may_run_only_its_own_scripts(serve):
    client = serve(JobsInMemory())
    for path in ("/", "/static/main.js", "/api/events", "/nothing"):
        code, headers, _ = client.ask(path, Authorization="")
        assert code in {200, 401, 404}
        policy = headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in headers


def test_no_file_outside_of_the_pages_own_is_served_and_no_other_method_answered(serve):
    client = serve(JobsInMemory())
    for path in ("../server.py", "%2e%2e/server.py", "..%2fserver.py"):
        assert client.ask(f"/static/{path}")[0] == 404
    for method in ("PUT", "DELETE", "OPTIONS", "TRACE"):
        assert client.ask("/", method)[0] == 405


def opened(client, stack):
    return stack.enter_context(socket.create_connection(("127.0.0.1", client.port), 20))


def is_closed(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_of_connections_that_ask_nothing_the_oldest_are_closed(serve, digits):
    client = serve(digits)
    with client.stream("/api/events") as events, ExitStack() as stack:
        list_of_jobs = rows(events)
        next(list_of_jobs)
        idle = [opened(client, stack) for _ in range(300)]
        assert client.ask("/")[0] == 200
        assert all(is_closed(connection) for connection in idle[:170])
        idle[-1].sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\n\r\n".encode())
        assert idle[-1].recv(15) == b"HTTP/1.1 200 OK"
        digits.there["digits"] = job("digits", "Failed")
        assert next(list_of_jobs)


@pytest.mark.parametrize("path", ["/static/uPlot.min.js", "/api/events"])
def test_answers_that_nobody_reads_keep_no_connection(serve, path):
    """Neither those of files nor refusals; /api/ without the token."""
    client = serve(JobsInMemory())
    ask = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\n\r\n".encode()
    with ExitStack() as stack:
        unread = [opened(client, stack) for _ in range(server._CONNECTIONS + 20)]
        for connection in unread:
            connection.settimeout(0)
            with suppress(OSError):
                while connection.send(ask * 80):
                    pass
        assert client.ask("/")[0] == 200
        assert client.ask("/api/anything")[0] == 404


def test_who_has_the_token_may_read_slowly(serve, monkeypatch):
    """As through a tunnel: the answer is complete for the server long before it is read."""
    monkeypatch.setattr(server.Page, "_part", lambda *_: "x" * 20_000_000)
    client = serve(JobsInMemory(digits=job("digits")))
    first_list(client)
    with ExitStack() as stack:
        connection = opened(client, stack)
        head = f"GET /api/jobs/{KEY}/status HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\n"
        connection.sendall(f"{head}Authorization: Bearer {TOKEN}\r\n\r\n".encode())
        received = len(connection.recv(100))
        time.sleep(0.5)
        while received < 20_000_000 and (block := connection.recv(1 << 20)):
            received += len(block)
    assert received > 20_000_000


def test_a_client_that_goes_away_is_no_error(serve, digits, capfd):
    client = serve(digits)
    for asked in (b"", b"GET", b"GET /api/events HTTP/1.1\r\n", b"nonsense\r\n\r\n"):
        with ExitStack() as stack:
            connection = opened(client, stack)
            bearer = f"Host: 127.0.0.1:{client.port}\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
            connection.sendall(asked + (bearer.encode() if asked.endswith(b"1.1\r\n") else b""))
            if len(asked) > 3:
                connection.recv(15)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert client.ask("/")[0] == 200
    client.end()
    assert capfd.readouterr().err == ""


# --- the list -------------------------------------------------------------------------------------


def test_the_list_shows_jobs_and_what_changes_about_them(serve, digits):
    client = serve(digits)
    with client.stream("/api/events") as events:
        seen = rows(events)
        shown, _ = next(seen)
        assert shown["digits"]["state"] == "Running"
        assert shown["digits"]["key"] == KEY
        digits.there["digits"] = job("digits", "Failed", "no\x1b[2J more")
        digits.there["other"] = job("other")
        while len(shown) < 2 or shown["digits"]["state"] == "Running":
            shown, _ = next(seen)
        assert shown["digits"]["message"] == "no more"
        del digits.there["other"]
        gone = []
        while not gone:
            gone = next(seen)[1]["gone"]
        assert gone == ["local:uid-other"]


@pytest.mark.parametrize("kind", [BackendError, OSError])
def test_a_place_that_cannot_be_read_is_named_until_it_can(serve, digits, monkeypatch, kind):
    read = digits.jobs

    def jobs():
        try:
            return read()
        except BackendError as error:
            raise kind(str(error)) from None

    monkeypatch.setattr(digits, "jobs", jobs)
    digits.problem = "the state folder is gone"
    client = serve(digits)
    with client.stream("/api/events") as events:
        problems = (data["problems"] for name, data in events if name == "jobs")
        while next(problems) != {"local": "the state folder is gone"}:
            pass
        digits.problem = None
        while next(problems):
            pass


def test_a_row_has_the_progress_and_the_curve_until_its_job_fails_and_then_why(serve, digits):
    client = serve(digits)
    with client.stream("/api/events") as events:
        first_list(client)
        running = client.ask(f"/api/rows?job={KEY}&job={GONE}")[2]
        digits.there["digits"] = job("digits", "Failed", "1 Master replica(s) failed")
        digits.write("digits", "x\x1b[2J\nmore")
        digits.pods["digits"] = [FAILED]
        while next(rows(events))[0]["digits"]["state"] == "Running":
            pass
        failed = client.ask(f"/api/rows?job={KEY}")[2][KEY]
    assert running[KEY].pop("progress")["text"].startswith("epoch 1  step 2/2  loss 1  (")
    curve = [[0.5, 2.0], [1.0, 1.0]]
    assert running == {KEY: {"state": "Running", "why": "", "curve": curve}}
    assert failed["why"] == "master-0: exit code 1: ValueError: <b>empty</b>"
    assert failed["progress"]["text"] == "loss 1  test_accuracy 0.5  note x"
    assert failed["curve"] == curve


def test_many_pages_read_a_row_once(serve, digits, monkeypatch):
    reads, logs = [], digits.logs
    monkeypatch.setattr(digits, "logs", lambda *a, **more: reads.append(a) or logs(*a, **more))
    client = serve(digits)
    first_list(client)
    assert [client.ask(f"/api/rows?job={KEY}")[0] for _ in range(4)] == [200] * 4
    assert len(reads) == 1


# --- one job --------------------------------------------------------------------------------------


def test_a_job_is_followed_to_its_end(client, digits):
    with client.stream(f"/api/jobs/{KEY}/events") as events:
        lines, points = [], []
        for name, news in events:
            if name == "end":
                break
            lines += [line["text"] for line in news["lines"]]
            points += news["points"].get("loss", [])[1:]
            last = news
            if lines:
                digits.there["digits"] = job("digits", "Succeeded", "done")
    assert (lines, points) == (["red <b>bold"], [[0.5, 1.0], [2.0, 1.0]])
    assert last["training"]["metrics"] == {"loss": 1.0, "test_accuracy": 0.5, "note": "x"}
    assert last["job"]["state"] == "Succeeded"
    assert [event["text"] for event in last["events"]] == ["Succeeded"]


def test_numbers_that_json_lacks_do_not_break_the_stream(serve):
    backend = JobsInMemory(digits=job("digits", "Succeeded"))
    line = Event(EventKind.PROGRESS, {"epoch": 0, "step": 1, "loss": math.nan}, 2.0).encode()
    backend.write("digits", line, line.replace("NaN", "1e999"))
    client = serve(backend)
    first_list(client)
    with client.stream(f"/api/jobs/{KEY}/events") as events:
        *_, last = (news for name, news in events if name == "news")
    assert last["training"]["metrics"] == {"loss": None}


def test_a_job_in_its_parts(client):
    parts = {
        part: client.ask(f"/api/jobs/{KEY}/{part}")[2]
        for part in ("status", "history", "why", "timing", "manifest", "output?replica=master-0")
    }
    assert parts["status"]["names"] == ["master-0", "worker-0"]
    assert parts["status"]["can"] == ["suspend", "resume", "rerun", "delete"]
    assert parts["history"]["curves"]["loss"] == [[0.5, 1.0], [2.0, 1.0]]
    assert parts["history"]["curves"]["test_accuracy"] == [[1.0], [0.5]]
    assert parts["history"]["group"]["strategy"] == "ddp"
    assert "kind: PyTorchJob" in parts["manifest"]["text"]
    assert [one["text"] for one in parts["output?replica=master-0"]["lines"]] == ["red <b>bold"]


def test_every_line_is_searched_and_the_last_are_sent(serve, digits):
    digits.write("digits", *(f"step {step} of\x1b[0m NaN" for step in range(MOST_LINES + 10)))
    client = serve(digits)
    first_list(client)
    _, _, answer = client.ask(f"/api/jobs/{KEY}/output?search=OF+nan")
    assert answer["total"] == MOST_LINES + 10
    assert len(answer["lines"]) == MOST_LINES
    assert answer["lines"][-1]["text"] == f"step {MOST_LINES + 9} of NaN"
    assert answer["lines"][-1]["timestamp"] == answer["ends"]["master-0"]
    _, headers, text = client.ask(f"/api/jobs/{KEY}/output.txt?search=step+7+")
    assert headers["content-type"] == "text/plain; charset=utf-8"
    assert text == b"master-0 | step 7 of\x1b[0m NaN\n"
    _, _, text = client.ask(f"/api/jobs/{KEY}/output.txt?replica=worker-9")
    assert text.startswith(b"k8sjob: the output ends here: 'worker-9' is not a replica")


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/api/jobs/local:nobody/status", 404),
        (f"/api/jobs/{KEY}/secrets", 404),
        (f"/api/jobs/{KEY}/output?replica=worker-9", 502),
        (f"/api/compare?job={KEY}", 404),
        (f"/api/compare?job={KEY}&job={GONE}", 404),
    ],
)
def test_what_is_not_there_is_an_error_with_its_reason(serve, digits, path, code):
    digits.there["gone"] = job("gone")
    client = serve(digits)
    first_list(client)
    del digits.there["gone"]
    answered, _, body = client.ask(path)
    assert answered == code
    assert body["error"]


def test_jobs_are_compared_by_what_their_authors_wrote(serve, digits):
    digits.there["other"] = job("other", labels={"team": "red"})
    client = serve(digits)
    first_list(client)
    code, _, body = client.ask(f"/api/compare?job={KEY}&job=local:uid-other")
    assert code == 200
    (lines,) = body["manifests"]
    assert "+    team: red" in lines
    assert not any("uid" in line or "startTime" in line for line in lines)


# --- changes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["suspend", "resume", "delete"])
def test_a_job_is_changed(client, digits, action):
    digits.there["digits"]["spec"]["runPolicy"] = {"suspend": action == "resume"}
    code, _, body = client.ask(f"/api/jobs/{KEY}/{action}", "POST")
    assert (code, digits.asked) == (200, [(action, "digits")])
    assert "digits" in body["done"]
    assert client.ask(f"/api/jobs/{KEY}/{action}")[0] == 404  # a GET changes nothing
    assert client.ask(f"/api/jobs/{KEY}/explode", "POST")[0] == 404


@pytest.mark.parametrize(("action", "now"), [("suspend", True), ("resume", False)])
def test_what_a_job_already_is_it_is_not_made_again(client, digits, action, now):
    digits.there["digits"]["spec"]["runPolicy"] = {"suspend": now}
    code, _, body = client.ask(f"/api/jobs/{KEY}/{action}", "POST")
    assert (code, digits.asked) == (200, [])
    assert body["done"].endswith("nothing was changed")


def test_who_suspends_a_job_in_a_queue_learns_what_kueue_does(client, digits):
    digits.there["digits"]["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "q"}
    done = client.ask(f"/api/jobs/{KEY}/suspend", "POST")[2]["done"]
    assert "if Kueue manages the job, it starts it again" in done


@pytest.mark.parametrize("state", ["Failed", "Running"])
def test_of_a_clusters_job_that_has_ended_a_record_remains(serve, tmp_path, monkeypatch, state):
    monkeypatch.setenv("K8SJOB_STATE", str(tmp_path / "state"))
    backend = JobsInMemory(digits=job("digits", state))
    client = serve(backend)
    first_list(client)
    code, _, body = client.ask(f"/api/jobs/{KEY}/delete", "POST")
    assert (code, body) == (200, {"done": "team/digits deleted", "key": ""})
    assert bool(list(tmp_path.glob("state/records/team/digits@*"))) == (state == "Failed")


def test_read_only_changes_nothing(serve, digits):
    client = serve(digits, read_only=True)
    first_list(client)
    code, _, body = client.ask(f"/api/jobs/{KEY}/delete", "POST")
    assert (code, digits.asked) == (403, [])
    assert "--read-only" in body["error"]
    assert client.ask(f"/api/jobs/{KEY}/status")[2]["can"] == []


def test_the_job_of_a_record_is_shown_and_not_changed(serve, digits, tmp_path):
    path = tmp_path / "digits.k8sjob"
    digits.there["digits"] = job("digits", "Succeeded")
    with path.open("wb") as out:
        write_record(digits, digits.find("digits"), out, lambda *_: None)
    client = serve(records=[RecordBackend(path)])
    shown = first_list(client)
    key = shown["digits"]["key"]
    assert key == "record-0:uid-digits"
    assert client.ask(f"/api/jobs/{key}/status")[2]["can"] == []
    assert client.ask(f"/api/jobs/{key}/history")[2]["curves"]["loss"][1] == [2.0, 1.0]
    assert client.ask(f"/api/jobs/{key}/delete", "POST")[0] == 502
