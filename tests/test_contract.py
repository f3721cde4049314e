import json
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from k8sjob.contract import Event, EventKind, Reason, decode_object
from k8sjob.view.summary import JobSummary
from k8sjob.view.views import record

WATCHER = ("job", "replica", "log", "finding")
NESTED = "[" * 3000 + "]" * 3000
SHALLOW = "[" * 100 + "]" * 100
MANY = "9" * 400


@pytest.mark.parametrize(
    "body",
    [
        f'{{"kind": "progress", "time": {MANY}, "data": {{}}}}',
        f'{{"kind": "progress", "time": {"9" * 5000}, "data": {{}}}}',
        '{"kind": "progress", "time": 1e999, "data": {}}',
        '{"kind": "progress", "time": NaN, "data": {}}',
        '{"kind": "progress", "time": -1e12, "data": {}}',
        '{"kind": "progress", "time": true, "data": {}}',
        f'{{"kind": "progress", "time": 1, "data": {{"x": {NESTED}}}}}',
        f'{{"kind": "progress", "time": 1, "data": {{"x": {SHALLOW}}}}}',
        f'{{"kind": "progress", "time": 1, "data": {{"x": "{"x" * 2**17}"}}}}',
        '{"kind": ["job"], "time": 1, "data": {}}',
        '{"kind": "progress", "data": {}}',
        "{" * 100_000,
        *(f'{{"kind": "{kind}", "time": 1, "data": {{"state": "Succeeded"}}}}' for kind in WATCHER),
    ],
    ids=range(16),
)
def test_a_line_that_is_no_event_of_the_runtime_is_text(body):
    assert Event.decode("k8sjob/1 " + body) is None


@pytest.mark.parametrize("kind", [kind for kind in EventKind if kind not in WATCHER])
def test_an_event_of_the_runtime_survives_its_line(kind):
    event = Event(kind, {"a": [1, {"b": None}], "c": 1.5}, 12.5, "worker-0")
    assert Event.decode("bar 10%|" + event.encode(), "worker-0") == event


@pytest.mark.parametrize(
    "body",
    [
        {"exit_code": 10**400},
        {"exit_code": "1"},
        {"exit_code": True},
        {"exit_code": -1},
        {"exit_code": 256},
        {"exit_code": 1, "rank": -2},
        {"exit_code": 1, "time": math.inf},
        {"exit_code": 1, "time": math.nan},
        {"exit_code": 1, "culprits": [-5]},
        {"exit_code": 1, "culprits": "123"},
        {"exit_code": 1, "culprits": 5},
        {"message": "no exit code"},
        [1],
    ],
)
def test_a_termination_message_of_another_shape_is_text(body):
    assert Reason.decode(json.dumps(body)) is None


@pytest.mark.parametrize("text", ["9" * 5000, NESTED, f'{{"exit_code": 1, "x": {NESTED}}}', "{"])
def test_a_termination_message_that_cannot_be_decoded_is_text(text):
    assert Reason.decode(text) is None


def test_a_reason_survives_its_message():
    reason = Reason(138, 3, "PeerLost", "gone", "a.py:3", 12.5, (1, 2))
    assert Reason.decode(reason.encode()) == reason


@pytest.mark.parametrize("cause", ["from OSError: " + "x" * 280, "é" * 5000])
def test_a_long_message_gives_way_to_its_causes(cause):
    reason = Reason(1, 0, "RuntimeError", "y" * 10**6, "a.py:3", causes=(cause,))
    text = reason.encode()
    assert len(text) <= 4096
    (kept,) = Reason.decode(text).causes
    assert cause.startswith(kept)
    assert len(kept) >= 280


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["Succeeded", "\x1b[2J", "1e999"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
KEYS = ["epoch", "epochs", "step", "steps", "loss", "samples_per_s", "wait_s", "step_s", "slowest"]
KEYS += ["path", "message", "signal", "world_size", "restart"]


@given(
    st.sampled_from([kind for kind in EventKind if kind not in WATCHER] + ["other"]),
    st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), VALUES),
    VALUES,
)
@example("progress", {"epoch": 10**400, "loss": math.inf}, 1.0)
def test_whatever_an_event_holds_it_can_be_added_up_and_printed(kind, data, time):
    line = "k8sjob/1 " + json.dumps({"kind": kind, "data": data, "time": time})
    event = Event.decode(line, "worker-0")
    if event is not None:
        JobSummary().add(event)
        json.loads(json.dumps(record(event), allow_nan=False))


@given(
    VALUES, st.sampled_from(["exit_code", "rank", "time", "culprits", "causes", "message", "type"])
)
def test_whatever_a_termination_message_holds_it_is_decoded_or_text(value, key):
    found = Reason.decode(json.dumps({"exit_code": 1, key: value}))
    assert found is None or Reason.decode(found.encode()) == found


@pytest.mark.parametrize("text", ['{"a": ["b\\ud800"]}', '{"a": ["b\ud800"]}'])
def test_half_a_character_is_replaced(text):
    assert decode_object(text) == {"a": ["b\ufffd"]}


@pytest.mark.parametrize("message", ["can't encode '\\ud800'", "\U0001f680 \\", "\\u00e9"])
def test_whole_characters_and_text_that_looks_like_half_of_one_stay(message):
    for text in (json.dumps({"a": message}), json.dumps({"a": message}, ensure_ascii=False)):
        assert decode_object(text) == {"a": message}


def test_an_integer_that_no_float_holds_is_infinite():
    assert decode_object(f'{{"x": {MANY}}}') == {"x": math.inf}
    assert decode_object('{"x": 12345678901234567890}') == {"x": 12345678901234567890}
