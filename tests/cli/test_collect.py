"""`k8sjob collect` as a process that is ended and started again."""

import signal
import socket
from datetime import UTC, datetime

import pytest
from serving import Inbox
from trainings import BEGIN, job


@pytest.fixture
def there(api):
    """A job that has failed just now."""
    end = (datetime.now(UTC) - BEGIN).total_seconds() // 1
    api.jobs["blue", "one"] = made = job(end=end, state="Failed", name="one")
    made["metadata"] |= {"namespace": "blue", "uid": "11111111-2222"}


@pytest.fixture
def collect(process, there, tmp_path):
    """Starts a collector, waits for a condition or its first record, and ends it."""

    def run(url, until=None):
        env = {"K8SJOB_WEBHOOK_URL": url, "K8SJOB_STATE": str(tmp_path / "state")}
        collector = process("collect", "-n", "blue", env=env)
        assert until.wait(60) if until else collector.stdout.readline()
        collector.send_signal(signal.SIGTERM)
        _, err = collector.communicate(timeout=60)
        assert "Traceback" not in err
        return collector.returncode

    return run


def test_a_message_outlives_its_collector_and_comes_once(collect, k8sjob, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/SECRET"
    assert collect(url) == 0
    (kept,) = (tmp_path / "state/records/.unsent").iterdir()
    assert kept.read_text().startswith("blue/one failed")
    assert "SECRET" not in kept.read_text()
    with Inbox(port=port) as inbox:
        assert collect(url, until=inbox.came) == 0
        next((tmp_path / "state/records/blue").glob("*.k8sjob")).unlink()
        assert collect(url) == 0  # it records the job again, and sends nothing
    (message,) = inbox.bodies
    assert "\nwhy: " in message["text"]
    assert list((tmp_path / "state/records/.unsent").iterdir()) == []
    (record,) = (tmp_path / "state/records/blue").glob("*.k8sjob")
    assert k8sjob("status", record, "-o", "name").out == "blue/one\n"
