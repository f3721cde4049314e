import struct

import pytest

from k8sjob import runtime
from k8sjob.contract import EventKind
from k8sjob.runtime.base.report import Reporter, ScalarFile, crc32c


@pytest.mark.parametrize(
    ("content", "value"),  # RFC 3720, B.4
    [
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"", 0),
    ],
)
def test_the_checksum_is_castagnolis(content, value):
    assert crc32c(content) == value


def varint(message, at):
    """(the number that begins there, where it ends)."""
    end = next(i for i in range(at, len(message)) if message[i] < 0x80) + 1
    return sum((byte & 0x7F) << 7 * i for i, byte in enumerate(message[at:end])), end


def fields(message):
    """(number, value) of each field of a message of protocol buffers."""
    at = 0
    while at < len(message):
        key, at = varint(message, at)
        if key & 7 == 0:
            value, at = varint(message, at)
        else:
            size, at = varint(message, at) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], at)
            value, at = message[at : at + size], at + size
        yield key >> 3, value


def events(folder):
    """(step, {name: number}) of each event of the one file of a folder, the head left out."""
    (path,) = folder.iterdir()
    content, found = path.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        body = content[12 : 12 + length]
        for part, at in ((content[:8], 8), (body, 12 + length)):
            (told,) = struct.unpack("<I", content[at : at + 4])
            value = crc32c(part)
            assert told == ((value >> 15 | value << 17) + 0xA282EAD8) % 2**32
        found.append(dict(fields(body)))
        content = content[16 + length :]
    assert found[0][3] == b"brain.Event:2"
    for event in found[1:]:
        pairs = [dict(fields(value)) for _, value in fields(event[5])]
        yield event[2], {pair[1].decode(): struct.unpack("<f", pair[2])[0] for pair in pairs}


def test_numbers_come_back_with_their_steps(tmp_path):
    file = ScalarFile(tmp_path / "logs")
    file.add(0, {"loss": 2.5}, 1.0)
    file.add(300, {"loss": 0.5, "größe": -1.0}, 2.0)
    file.add(2**40, {"n" * 300: float("inf")}, 3.0)
    assert file.path.name.startswith("events.out.tfevents.")
    assert list(events(tmp_path / "logs")) == [
        (0, {"loss": 2.5}),
        (300, {"loss": 0.5, "größe": -1.0}),
        (2**40, {"n" * 300: float("inf")}),
    ]


def test_progress_and_metrics_are_drawn_along_the_steps_of_the_run(tmp_path, capsys):
    reporter = Reporter(active=True, events=True)
    reporter.record(tmp_path)
    place = {"epochs": 3, "steps": 10, "eta_s": 1.0, "slowest": 1}
    reporter.emit(EventKind.PROGRESS, epoch=1, step=4, loss=0.5, **place)
    reporter.emit(EventKind.METRICS, epoch=2, accuracy=0.75, note="fine", best=True)
    reporter.emit(EventKind.WARNING, message="look")
    assert list(events(tmp_path)) == [
        (14, {"loss": 0.5}),
        (14, {"accuracy": 0.75}),
    ]
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_session_has_a_switch_for_them(tmp_path):
    with runtime.session(tensorboard=tmp_path / "logs") as job:
        job.log(accuracy=0.75)
    assert [numbers for _, numbers in events(tmp_path / "logs")] == [{"accuracy": 0.75}]


def test_without_a_place_training_goes_on(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    reporter = Reporter(active=True, events=False)
    reporter.record(tmp_path / "file" / "logs")
    reporter.emit(EventKind.METRICS, accuracy=0.5)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("warning: no files for TensorBoard")
    assert second == "accuracy 0.5"


def test_the_others_write_none(tmp_path):
    reporter = Reporter(active=False, events=True)
    reporter.record(tmp_path / "logs")
    reporter.emit(EventKind.METRICS, accuracy=0.5)
    assert not (tmp_path / "logs").exists()
