import time
from dataclasses import replace

import pytest
from serving import Server, hang_up
from waiting import until

from k8sjob import runtime
from k8sjob.contract import Event, EventKind
from k8sjob.runtime.base.config import TIMEOUTS, status_server
from k8sjob.runtime.tracking import Trackers
from k8sjob.runtime.trainer_status import TrainerStatus

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/digits/status"
PROGRESS = {"epoch": 1, "epochs": 4, "step": 5, "steps": 10, "loss": 0.5, "eta_s": 61.7}


@pytest.fixture
def trainer(monkeypatch, tmp_path, certificate):
    """A status server; `posts` are (token, trainerStatus), `reply` is its answer."""

    def take(request):
        assert (request.method, request.path) == ("POST", PATH)
        server.posts.append((request.headers["Authorization"], request.json["trainerStatus"]))
        return server.reply

    short = replace(TIMEOUTS, track_every=0.05, connect=1.0, join=0.5)
    monkeypatch.setattr("k8sjob.runtime.trainer_status.TIMEOUTS", short)
    with Server(take, tls=[certificate]) as server:
        server.posts, server.reply, server.token = [], (200, {}), tmp_path / "token"
        server.token.write_text("first\n")
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", server.url + PATH)
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", f"{certificate}.crt")
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(server.token))
        yield server


def test_progress_is_posted_with_the_token_of_the_moment_and_past_proxies(trainer, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    tracking = Trackers(pytest.fail, TrainerStatus(status_server()))
    tracking(Event(EventKind.PROGRESS, PROGRESS))
    until(lambda: trainer.posts)
    trainer.token.write_text("second")
    tracking(Event(EventKind.METRICS, {"accuracy": 0.75, "n" * 70: 1, "": 2, "note": "fine"}))
    until(lambda: trainer.posts[1:])
    tracking.close("stopped")
    (token, status), (later, both), (_, end) = trainer.posts
    assert (token, later) == ("Bearer first", "Bearer second")
    assert status.pop("lastUpdatedTime").endswith("Z")
    expected = {"progressPercentage": 37, "estimatedRemainingSeconds": 61}
    assert status == {**expected, "metrics": [{"name": "loss", "value": "0.5"}]}
    assert [(metric["name"], metric["value"]) for metric in both["metrics"]] == [
        ("loss", "0.5"),
        ("accuracy", "0.75"),
        ("n" * 64, "1"),
    ]
    assert end["progressPercentage"] == 37


def test_a_session_ends_with_all_of_it_done(trainer):
    with runtime.session() as job:
        job.log(loss=float("nan"), steps=3)
    (*_, (_, status)) = trainer.posts
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (100, 0)
    assert status["metrics"] == [{"name": "loss", "value": "nan"}]


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("refused", "HTTP 403 Forbidden"),
        ("redirect", "HTTP 307 Temporary Redirect"),
        ("hang up", "RemoteDisconnected: "),
        ("no token", "FileNotFoundError: "),
        ("no address", "ValueError: "),
        ("silence", "TimeoutError: "),
    ],
)
def test_what_goes_wrong_costs_one_line_and_no_time(trainer, monkeypatch, capsys, fault, line):
    if fault == "no token":
        trainer.token.unlink()
    elif fault == "no address":
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://[x" + PATH)
    with Server(lambda _: pytest.fail("the token went to another server")) as stranger:
        location = {"Location": stranger.url + PATH}
        trainer.reply = {
            "redirect": (307, {}, location),
            "hang up": hang_up,
            "silence": lambda _: time.sleep(1.2),
        }.get(fault, (403,))
        before = time.monotonic()
        tracking = Trackers(pytest.fail, TrainerStatus(status_server()))
        for step in range(10):
            tracking(Event(EventKind.PROGRESS, {**PROGRESS, "step": step}))
            time.sleep(0.02)
        tracking.close("finished")
        assert time.monotonic() - before < 3
    (shown,) = capsys.readouterr().err.splitlines()
    assert f" did not accept the progress: {line}" in shown


def test_without_a_server_over_https_there_is_no_status():
    names = [f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN")]
    for environ in ({}, {names[0]: "https://trainer"}, dict.fromkeys(names, "http://trainer")):
        assert status_server(environ) is None
