import errno
import os
import re
import sys
import threading
import time

from hypothesis import example, given
from hypothesis import strategies as st

from k8sjob.backends.local.container import Launch, LocalContainer
from k8sjob.backends.local.logfiles import (
    LONGEST_LINE,
    LogWriter,
    attempts,
    follow_lines,
    read,
    read_last,
)

PIECES = [b"\n", b"\r", b"a b\n", "é\n".encode(), b"x" * LONGEST_LINE]


@given(st.lists(st.binary(max_size=40) | st.sampled_from(PIECES)))
@example([b"x" * LONGEST_LINE])
@example([b"x" * 2 * LONGEST_LINE])
@example([b"x" * 2 * LONGEST_LINE, b"x"])
def test_what_is_fed_in_pieces_comes_back_in_lines(tmp_path_factory, pieces):
    folder = tmp_path_factory.mktemp("logs")
    writer = LogWriter(folder / "0.log")
    for piece in pieces:
        writer.feed(piece)
    writer.close()
    whole = b"".join(pieces)
    expected = whole.split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    lines = list(read(folder, "master-0", 0))
    assert [line.text for line in lines] == [e.decode(errors="replace") for e in expected]
    stamps = [line.timestamp for line in lines]
    assert stamps == sorted(stamps)
    rows = (folder / "0.log").read_bytes().split(b"\n")
    assert max(map(len, rows)) < LONGEST_LINE + 60  # a longer line is in parts


def test_rows_that_a_loss_of_power_left_are_passed_over(tmp_path):
    writer = LogWriter(tmp_path / "0.log")
    writer.feed(b"before\nafter\n")
    writer.close()
    before, after = (tmp_path / "0.log").read_bytes().splitlines(keepends=True)
    damaged = [b"\0" * 100 + b"\n", b"\n", before[:20] + b"\n", b"\xff \xff F x\n"]
    (tmp_path / "0.log").write_bytes(before + b"".join(damaged) + after)
    assert [line.text for line in read(tmp_path, "r", 0)] == ["before", "after"]


def test_lines_of_code_are_those_of_the_users_own_files(tmp_path):
    """In tracebacks, warnings and logs, whatever wrote them; other paths are where they say."""
    copy, mine = "/state/jobs/a+b/work", r"/home/me/my\1 job"
    lines = [
        '  File "{}/pkg/main.py", line 3, in load',
        "{}/main.py:12: UserWarning: look",
        "INFO {}/main.py:7 read; {}/main.py:8",
    ]
    same = [f"saved to {copy}/model.pt", f"{copy}: 3", f"{copy}-2/main.py:3: no", "x" * 99]
    writer = LogWriter(tmp_path / "0.log", copy, mine)
    writer.feed("\n".join([*(line.replace("{}", copy) for line in lines), *same]).encode())
    writer.close()
    expected = [*(line.replace("{}", mine) for line in lines), *same]
    assert [line.text for line in read(tmp_path, "r", 0)] == expected


def test_a_path_that_a_line_repeats_is_looked_at_once(tmp_path):
    copy = f"/{'state' * 8}/work"
    writer = LogWriter(tmp_path / "0.log", copy, "/mine")
    began = time.process_time()
    lines = [copy * 1300, f"{copy}/" * 1300, f"{copy}/a.py:" * 1300, f'{copy}/a.py", line ' * 1300]
    for line in lines * 10:
        writer.feed(line.encode() + b"\n")
    assert time.process_time() - began < 20  # each took more than a second
    writer.feed(f"{copy}{copy}/a.py:3\n{copy}/{copy}/a.py:3 {copy}/b {copy}/c.py:4\n".encode())
    writer.close()
    texts = [line.text for line in read(tmp_path, "r", 0)]
    assert texts[:40] == lines * 10
    assert texts[40:] == [f"/mine{copy}/a.py:3", f"/mine/{copy}/a.py:3 {copy}/b /mine/c.py:4"]


def test_the_last_files_of_a_start_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("k8sjob.backends.local.logfiles.LOG_BYTES", 10_000)
    monkeypatch.setattr("k8sjob.backends.local.logfiles._FIRST_LOOK", 400)
    writer = LogWriter(tmp_path / "0.log")
    over = threading.Event()
    slow = follow_lines(tmp_path, "r", ended=over.is_set, stopped=lambda: False)
    writer.feed(b"0\n")
    assert next(slow).text == "0"
    for number in range(1, 3000):
        writer.feed(b"%d\n" % number)
    writer.close()
    over.set()
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 5
    assert 10_000 <= max(sizes) < 10_100
    gap, first, *lines = read(tmp_path, "r", 0)
    assert gap.gap
    assert "the last 50 MiB" in gap.text
    assert gap.timestamp == first.timestamp
    numbers = [int(line.text) for line in (first, *lines)]
    assert numbers == list(range(numbers[0], 3000))
    for count in (1, 20, 300, 940):
        assert [line.text for line in read_last(tmp_path, "r", count)[-count:]] == [
            str(number) for number in range(3000 - count, 3000)
        ]
    later = list(slow)  # the rest of the file that it had open, and then what is there
    assert [one.gap for one in later].count(True) == 1
    assert later[-1].text == "2999"
    assert attempts(tmp_path) == [0]


class FullFile:
    """A file on a disk that is full from some byte on, and takes parts of what is written."""

    room = 100

    def __init__(self, path, _mode):
        self.file = path.open("ab", buffering=0)

    def write(self, data):
        part = data[: max(self.room - self.file.tell(), 0)][:40]
        if data and not part:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(part)

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_what_a_full_disk_does_not_take_is_counted_in_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr("k8sjob.backends.local.logfiles.FileIO", FullFile)
    writer = LogWriter(tmp_path / "0.log")
    writer.feed(b"first, in two writes\n")
    for _ in range(18):
        writer.feed(b"a line that is not written\n")
    why = "output is missing here: 18 lines, 486 bytes (No space left on device)"
    assert writer.missing == why
    assert [line.text for line in read(tmp_path, "r", 0)] == ["first, in two writes"]
    monkeypatch.setattr(FullFile, "room", 9999)
    writer.feed(b"later\n")
    writer.close()
    assert writer.missing == ""
    texts = [(line.text, line.gap) for line in read(tmp_path, "r", 0)]
    assert texts == [("first, in two writes", False), (why, True), ("later", False)]


def test_a_container_that_ends_on_a_full_disk_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("k8sjob.backends.local.logfiles.FileIO", FullFile)
    monkeypatch.setattr(FullFile, "room", 0)
    (tmp_path / "logs").mkdir()
    reader, writer = os.pipe()
    launch = Launch([sys.executable, "-c", "print('lost')"], {}, str(tmp_path))
    container = LocalContainer(launch, tmp_path, 0, {}, reader)
    while not container.poll():
        time.sleep(0.01)
    os.close(reader)
    os.close(writer)
    assert container.end["exitCode"] == 0
    assert container.missing_output.startswith("output is missing here: 1 line, 5 bytes")


def test_a_log_that_cannot_be_opened_is_tried_again(tmp_path):
    (tmp_path / "0.log").mkdir()
    writer = LogWriter(tmp_path / "0.log")
    writer.feed(b"lost\n")
    (tmp_path / "0.log").rmdir()
    writer.feed(b"later\n")
    writer.close()
    assert [line.text for line in read(tmp_path, "r", 0)] == [
        "output is missing here: 1 line, 5 bytes (Is a directory)",
        "later",
    ]


def test_the_form_is_a_kubelets(tmp_path):
    writer = LogWriter(tmp_path / "0.log")
    writer.feed(b"hello\nrest")
    writer.close()
    form = rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z stdout F hello"
    first, last = (tmp_path / "0.log").read_bytes().splitlines()
    assert re.fullmatch(form, first)
    assert last.endswith(b" stdout F rest")


def test_a_line_that_is_half_written_is_not_read(tmp_path):
    (tmp_path / "0.log").write_bytes(b"t stdout F one\nt stdout F tw")
    assert [line.text for line in read(tmp_path, "r", 0)] == ["one"]


def test_follow_goes_from_attempt_to_attempt_and_loses_nothing(tmp_path):
    over = threading.Event()

    def write():
        for attempt in range(3):
            writer = LogWriter(tmp_path / "logs" / f"{attempt}.log")
            for number in range(200):
                writer.feed(f"{attempt} {number}\n".encode())
                if number % 50 == 0:
                    time.sleep(0.02)
            writer.close()
        over.set()

    thread = threading.Thread(target=write)
    thread.start()
    lines = list(follow_lines(tmp_path / "logs", "r", ended=over.is_set, stopped=lambda: False))
    thread.join()
    assert [(one.attempt, one.text) for one in lines] == [
        (attempt, f"{attempt} {number}") for attempt in range(3) for number in range(200)
    ]


def test_follow_ends_when_it_is_stopped(tmp_path):
    stop = threading.Event()
    lines = follow_lines(tmp_path, "r", ended=lambda: False, stopped=stop.is_set)
    threading.Timer(0.2, stop.set).start()
    assert list(lines) == []


def test_last_lines(tmp_path):
    writer = LogWriter(tmp_path / "4.log")
    writer.feed(b"".join(b"%d\n" % n for n in range(100)) + b"k8sjob: mine\n")
    writer.close()
    assert attempts(tmp_path) == [4]
    assert writer.tail(lines=2, size=100, without="") == "99\nk8sjob: mine"
    assert writer.tail(lines=9, size=4, without="k8sjob: ") == "8\n99"
    writer = LogWriter(tmp_path / "5.log")
    assert writer.tail(lines=9, size=4, without="") == ""
    writer.feed(b"x" * 3 * LONGEST_LINE + b"yz")
    writer.close()
    assert writer.tail(lines=9, size=4, without="k8sjob: ") == "xxyz"


@given(
    st.lists(st.integers(0, 3 * LONGEST_LINE), max_size=30), st.integers(0, 40), st.integers(1, 9)
)
def test_the_end_of_all_starts_is_that_of_their_whole_output(tmp_path_factory, sizes, count, each):
    folder = tmp_path_factory.mktemp("logs")
    for attempt, start in enumerate(range(0, len(sizes), each)):
        writer = LogWriter(folder / f"{attempt}.log")
        writer.feed(b"".join(b"x" * size + b"\n" for size in sizes[start : start + each]))
        writer.close()
    whole = [line for attempt in attempts(folder) for line in read(folder, "r", attempt)]
    found = read_last(folder, "r", count)
    assert len(found) >= min(count, len(whole))
    assert found == whole[len(whole) - len(found) :]


def test_of_a_long_file_only_the_end_is_read(tmp_path):
    writer = LogWriter(tmp_path / "0.log")
    writer.feed(b"0123456789\n" * 100_000)
    writer.close()
    assert len(read_last(tmp_path, "r", 200)) < 5_000
