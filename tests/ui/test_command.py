"""`k8sjob ui` as a process."""

import os
import re
import resource
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest
import urllib3
from ui.conftest import Client

from k8sjob.errors import install_step


@pytest.fixture
def ui(tmp_path):
    """Starts the command; the address that it prints comes back with the process."""
    started = []

    def start(*args):
        places = {"K8SJOB_STATE": str(tmp_path / "state"), "KUBECONFIG": str(tmp_path / "none")}
        command = [sys.executable, "-m", "k8sjob", "ui", *map(str, args)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=os.environ | places, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_page_is_served_until_an_interrupt_comes(ui):
    process = ui()
    url = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/#token=([\w-]{43})\n", process.stdout.readline())
    assert url
    http = urllib3.PoolManager()
    bearer = {"Authorization": f"Bearer {url[2]}"}
    address = f"http://127.0.0.1:{url[1]}"
    stream = http.request(
        "GET", f"{address}/api/events", headers=bearer, preload_content=False, timeout=20
    )
    assert stream.status == 200
    assert b'"jobs": []' in stream.read1()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    stream.close()
    http.clear()
    assert (process.returncode, out) == (130, "")
    assert len(err.strip().splitlines()) == 1  # nothing but the note below the address
    assert "Traceback" not in err


def test_a_server_has_file_descriptors_left_whatever_connects(ui):
    process = ui("--local")
    port = int(process.stdout.readline().split("/#")[0].rpartition(":")[2])
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (256, 256))
    with ExitStack() as stack:
        for _ in range(700):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
        client = Client(port)
        assert [client.ask("/")[0] for _ in range(3)] == [200] * 3
        client.close()
    process.send_signal(signal.SIGINT)
    assert len(process.communicate(timeout=60)[1].strip().splitlines()) == 1


def test_a_port_that_is_taken_is_one_error(ui):
    process = ui()
    port = process.stdout.readline().split("/#")[0].rpartition(":")[2]
    other = ui("--port", port)
    out, err = other.communicate(timeout=60)
    assert (other.returncode, out) == (1, "")
    assert f"port {port} of 127.0.0.1 cannot be used: Address already in use" in err
    client = Client(int(port))
    assert client.ask("/")[0] == 200
    client.close()


def test_a_record_that_is_none_is_one_error(ui, tmp_path):
    path = tmp_path / "x.k8sjob"
    path.write_text("no record")
    out, err = ui(path).communicate(timeout=60)
    assert out == ""
    assert "cannot be read as a record of a job" in err


@pytest.mark.parametrize("names", ["ui starlette", "ui uvicorn", "mcp mcp"])
def test_without_its_packages_the_command_says_what_to_install(names):
    command, package = names.split()
    code = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        f"u.find_spec = lambda name, *a: None if name == {package!r} else find(name, *a)\n"
        f"from k8sjob.cli import main; main([{command!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert install_step(command) in done.stderr
    assert done.stdout == ""
