"""`k8sjob metrics`: what it prints, what it serves, and a real Prometheus that reads it."""

import json
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
import urllib3

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "manifests/grafana/k8sjob.json"
PAGE = ROOT / "docs/how-to/metrics.md"
TRAINING = """\
import time
import torch
from torch.nn import Linear, functional as F
from k8sjob import runtime

data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.long))
with runtime.session(seed=1) as job:
    run = job.prepare(lambda: Linear(4, 2), loss=F.cross_entropy, optimizer=torch.optim.SGD)
    for epoch in run.epochs(100_000):
        for inputs, targets in run.batches(data, batch_size=8):
            run.step(inputs, targets)
            time.sleep(0.05)
"""


def families(text):
    """The metrics of a text by name; it must be OpenMetrics."""
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    return {family.name: family for family in text_string_to_metric_families(text)}


@pytest.fixture
def tiny(tmp_path, k8sjob):
    """A job on this machine that has failed."""
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: tiny\nimage: x:1\nrun: {command: ['false']}\npolicy: {max_restarts: 0}\n"
    )
    assert k8sjob("run", file).code == 100


def test_states_of_jobs(tiny, k8sjob):
    done = k8sjob("metrics")
    assert (done.code, done.err) == (0, "")
    found = families(done.out)
    assert found["k8sjob_up"].samples[0].value == 1
    (state,) = found["k8sjob_job_state"].samples
    assert state.labels["state"] == "Failed"
    assert (state.labels["namespace"], state.labels["name"]) == ("local", "tiny")
    assert re.fullmatch("[0-9a-f]{8}", state.labels["run"])
    began = found["k8sjob_job_created_timestamp_seconds"].samples[0].value
    assert time.time() - 600 < began <= time.time()
    assert found["k8sjob_job"].samples[0].labels["kind"] == "PyTorchJob"
    assert not found["k8sjob_job_device_seconds"].samples  # it has ended


def test_a_cluster_that_cannot_be_read_is_down(k8sjob, tmp_path):
    done = k8sjob("metrics", "--kubeconfig", tmp_path / "none", "-n", "team")
    assert done.code == 0
    assert families(done.out)["k8sjob_up"].samples[0].value == 0


@pytest.mark.parametrize("listen", ["x", "99999", "a b:1"])
def test_addresses_that_are_none(k8sjob, listen):
    done = k8sjob("metrics", "--listen", listen)
    assert done.code == 2
    assert f"--listen {listen!r}: write PORT or HOST:PORT, such as 9400" in done.err


def test_a_port_that_is_taken_is_one_error(k8sjob):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = k8sjob("metrics", "--listen", port)
    assert done.code == 1
    assert done.err == (
        f"error: --listen {port}: Address already in use; choose another address or port\n"
    )


def test_each_request_reads_the_jobs_again(process, k8sjob, tmp_path):
    server = process("metrics", "--listen", "0")
    address = server.stdout.readline().strip()
    http = urllib3.PoolManager()

    def states():
        text = http.request("GET", address, timeout=20).data.decode()
        return re.findall(r'^k8sjob_job_state\{.*state="(\w+)"\}', text, re.MULTILINE)

    assert address.startswith("http://127.0.0.1:")
    assert states() == []
    file = tmp_path / "job.yaml"
    file.write_text("name: tiny\nimage: x:1\nrun: {command: ['true']}\n")
    assert k8sjob("run", file).code == 0
    assert states() == ["Succeeded"]
    for host in ("rebound.example", "rebound.example:80", "127.0.0.1.example", "localhost.evil"):
        answer = http.request("GET", address, headers={"Host": host}, timeout=20)
        assert (answer.status, b"tiny" in answer.data) == (403, False)
    for host in ("LocalHost:9400", "[::1]:9400", "127.0.0.1"):
        assert http.request("GET", address, headers={"Host": host}, timeout=20).status == 200
    http.clear()


def test_the_page_names_every_metric(tiny, k8sjob):
    page = PAGE.read_text()
    names = {name for name in families(k8sjob("metrics").out) if "timestamp" not in name}
    assert [name for name in names if f"`{name}" not in page] == []


@pytest.mark.system
def test_a_prometheus_answers_what_the_dashboard_asks(process, k8sjob, tmp_path):
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        pytest.skip("needs Debian's prometheus")
    (tmp_path / "train.py").write_text(TRAINING)
    done = k8sjob("run", tmp_path / "train.py", "--workers", "1", "--name", "tiny", "--detach")
    assert done.code == 0
    target = process("metrics", "--listen", "0").stdout.readline().split("/")[2]
    (tmp_path / "prometheus.yml").write_text(
        "scrape_configs: [{job_name: k8sjob, scrape_interval: 1s,"
        f" static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {"config.file": f"{tmp_path}/prometheus.yml", "storage.tsdb.path": f"{tmp_path}/data"}
    options |= {"web.listen-address": f"127.0.0.1:{port}", "log.level": "error"}
    server = subprocess.Popen([prometheus, *(f"--{key}={value}" for key, value in options.items())])
    http = urllib3.PoolManager(retries=False)

    def asked(expression):
        for variable, value in (("$namespace", ".*"), ("$job", "tiny"), ("5m", "10s")):
            expression = expression.replace(variable, value)
        url = f"http://127.0.0.1:{port}/api/v1/query"
        answer = http.request("GET", url, fields={"query": expression}, timeout=10)
        body = json.loads(answer.data)
        assert body["status"] == "success", body
        return body["data"]["result"]

    panels = json.loads(DASHBOARD.read_text())["panels"]
    waiting = {target["expr"] for panel in panels for target in panel["targets"]}
    waiting = {one for one in waiting if "> 0" not in one}  # restarts, of which there are none
    assert len(waiting) > 8
    deadline = time.monotonic() + 120
    try:
        while waiting and time.monotonic() < deadline:
            time.sleep(1)
            try:
                waiting = {expression for expression in waiting if not asked(expression)}
            except urllib3.exceptions.HTTPError:
                continue  # it starts
        assert waiting == set()
    finally:
        http.clear()
        server.terminate()
        server.wait(20)
        assert k8sjob("delete", "local/tiny").code == 0
