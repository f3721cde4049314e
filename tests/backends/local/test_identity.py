import os
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from k8sjob.backends.local.store import Identity


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_this_process_is_alive_and_comes_back_from_json():
    me = Identity.of(os.getpid())
    assert me.alive
    assert me.here
    assert Identity.from_json(asdict(me)) == me


def test_a_process_that_agrees_in_all_is_killed(sleeper):
    it = Identity.of(sleeper.pid)
    assert it.kill()
    sleeper.wait(60)
    assert not it.alive
    assert not it.kill()


@pytest.mark.parametrize("change", [{"started": "1"}, {"boot": "another"}])
def test_another_process_of_the_same_number_is_not(sleeper, change):
    other = replace(Identity.of(sleeper.pid), **change)
    assert not other.alive
    assert not other.kill()
    assert sleeper.poll() is None


def test_of_another_machine_nothing_is_known_and_nothing_signalled(sleeper):
    other = replace(Identity.of(sleeper.pid), host="elsewhere")
    assert other.alive
    assert not other.kill()
    assert sleeper.poll() is None


def test_a_zombie_is_not_alive(sleeper):
    it = Identity.of(sleeper.pid)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # dead, and not reaped
    assert not it.alive


def test_no_process_no_identity():
    with pytest.raises(ProcessLookupError):
        Identity.of(2**22 + 1)


@pytest.mark.parametrize("body", [{}, {"pid": "x"}, {"pid": None, "started": ""}])
def test_what_is_no_identity_is_refused(body):
    with pytest.raises((KeyError, ValueError, TypeError)):
        Identity.from_json(body)
