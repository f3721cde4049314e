"""The settings that travel in one JSON variable."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8sjob import contract
from k8sjob.contract import RuntimeConfig
from k8sjob.runtime.base import config
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
        ('{"max_restarts": true}', "max_restarts is true, which is not valid"),
        ('{"hang_timeout": -1}', "hang_timeout is -1"),
        ('{"hang_timeout": NaN}', "hang_timeout is NaN"),
        ('{"checkpoint_every": 0}', "checkpoint_every is 0"),
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
