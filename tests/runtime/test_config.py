"""The settings that travel in one JSON variable."""

from __future__ import annotations

import json
import os
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8sjob import contract
from k8sjob.contract import RuntimeConfig
from k8sjob.runtime.base import config
from k8sjob.runtime.base.config import Timeouts
from k8sjob.runtime.base.errors import EnvError

CONFIGS = st.builds(
    RuntimeConfig,
    job=st.text(),
    options=st.dictionaries(st.text(), st.integers()),
    backend=st.none() | st.just("gloo"),
    checkpoint_dir=st.none() | st.text(min_size=1),
    checkpoint_every=st.just("epoch") | st.integers(1),
    max_restarts=st.integers(0),
    hang_timeout=st.none() | st.floats(0, 1e6),
)


@given(CONFIGS)
def test_what_the_client_writes_is_what_the_container_reads(settings):
    assert config.runtime_config({contract.CONFIG_ENV: settings.encode()}) == settings


def test_nothing_given_means_the_defaults():
    assert config.runtime_config({}) == RuntimeConfig()


def test_keys_of_a_newer_client_are_ignored():
    text = json.dumps({"version": 9, "job": "digits", "teleport": {"speed": 3}})
    assert config.runtime_config({contract.CONFIG_ENV: text}) == RuntimeConfig(job="digits")


def test_the_checkpoint_folder_of_this_machine_wins():
    environ = {
        contract.CONFIG_ENV: RuntimeConfig(checkpoint_dir="/checkpoints").encode(),
        contract.CHECKPOINT_DIR_ENV: "/home/me/state",
    }
    assert config.runtime_config(environ).checkpoint_dir == "/home/me/state"


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"job": 3}', "job is 3, not text"),
        ('{"max_restarts": true}', "max_restarts is true, not a number"),
        ('{"max_restarts": 1.5}', "max_restarts is 1.5, not a number"),
        ('{"hang_timeout": -1}', "hang_timeout is -1, not a number of at least 0"),
        ('{"hang_timeout": Infinity}', "hang_timeout is Infinity"),
        ('{"hang_timeout": NaN}', "hang_timeout is NaN"),
        ('{"checkpoint_every": 0}', 'not "epoch" or a number of steps'),
    ],
)
def test_an_invalid_value_is_named(text, seen):
    with pytest.raises(EnvError) as caught:
        config.runtime_config({contract.CONFIG_ENV: text})
    assert seen in str(caught.value)
    assert contract.CONFIG_ENV in str(caught.value)


@given(st.text())
def test_any_text_is_read_or_refused(text):
    with suppress(EnvError):
        assert isinstance(config.runtime_config({contract.CONFIG_ENV: text}), RuntimeConfig)


def test_files_and_paths(tmp_path):
    environ = {
        contract.ERROR_FILE_ENV: "/run/error",
        contract.TERMINATION_LOG_ENV: str(tmp_path / "words"),
        contract.PATHS_ENV: '{"/data": "/home/me/data"}',
    }
    assert str(config.error_file(environ)) == "/run/error"
    assert config.termination_log(environ) == tmp_path / "words"
    assert config.mapped_paths(environ) == {"/data": "/home/me/data"}
    assert (config.error_file({}), config.take_lifeline({}), config.mapped_paths({})) == (
        None,
        None,
        {},
    )


def test_tests_may_shorten_timeouts():
    environ = {config.TIMEOUTS_ENV: '{"poll": 0.001}'}
    assert Timeouts(**config.timeouts(environ)) == Timeouts(poll=0.001)
    assert Timeouts(**config.timeouts({})) == Timeouts()


@pytest.mark.parametrize("text", ["x", '{"/data": 3}', "[]"])
def test_broken_paths_are_refused(text):
    with pytest.raises(EnvError, match=contract.PATHS_ENV):
        config.mapped_paths({contract.PATHS_ENV: text})


def test_the_lifeline_is_taken_from_children():
    read, write = os.pipe()
    os.set_inheritable(read, True)  # noqa: FBT003 - os has no keyword for it
    environ = {contract.LIFELINE_ENV: str(read)}
    assert config.take_lifeline(environ) == read
    assert not environ
    assert not os.get_inheritable(read)
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("text", ["stdin", "-1", "9" * 99, "999"])
def test_a_broken_lifeline_is_refused(text):
    with pytest.raises(EnvError, match=contract.LIFELINE_ENV):
        config.take_lifeline({contract.LIFELINE_ENV: text})
