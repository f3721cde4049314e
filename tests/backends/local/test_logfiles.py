import os
import re
import threading
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from k8sjob.backends.local.logfiles import (
    LONGEST_LINE,
    LogWriter,
    attempts,
    follow_lines,
    last_lines,
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


def test_rows_that_a_loss_of_power_left_are_passed_over(tmp_path):
    writer = LogWriter(tmp_path / "0.log")
    writer.feed(b"before\nafter\n")
    writer.close()
    before, after = (tmp_path / "0.log").read_bytes().splitlines(keepends=True)
    damaged = [b"\0" * 100 + b"\n", b"\n", before[:20] + b"\n", b"\xff \xff F x\n"]
    (tmp_path / "0.log").write_bytes(before + b"".join(damaged) + after)
    assert [line.text for line in read(tmp_path, "r", 0)] == ["before", "after"]


@pytest.mark.parametrize("made", [os.mkfifo, lambda log: log.symlink_to("/dev/zero")])
def test_a_log_that_the_job_replaced_has_no_lines(tmp_path, made):
    made(tmp_path / "0.log")
    assert list(read(tmp_path, "master-0", 0)) == []
    lines = follow_lines(tmp_path, "master-0", ended=lambda: True, stopped=lambda: False)
    assert list(lines) == []


def test_the_last_lines_of_a_huge_log_are_read_from_its_end(tmp_path):
    with (tmp_path / "0.log").open("wb") as file:
        file.truncate(1 << 43)  # sparse, one row without an end: to read it would take an hour
    writer = LogWriter(tmp_path / "0.log")
    writer.feed(b"\n" + b"early\n" * 100 + b"late\nk8sjob: mine\n")
    writer.close()
    found = last_lines(tmp_path, 0, lines=2, size=100, without="k8sjob: ")
    assert found == "early\nlate"


@pytest.mark.parametrize("size", [LONGEST_LINE - 1, LONGEST_LINE, 3 * LONGEST_LINE + 5])
def test_long_lines_are_written_in_parts_and_read_whole(tmp_path, size):
    writer = LogWriter(tmp_path / "0.log")
    text = ("0123456789" * size)[:size]
    for start in range(0, size, 5000):
        writer.feed(text[start : start + 5000].encode())
    writer.feed(b"\nnext\n")
    writer.close()
    assert [line.text for line in read(tmp_path, "r", 0)] == [text, "next"]
    assert max(map(len, (tmp_path / "0.log").read_bytes().splitlines())) < LONGEST_LINE + 60


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
    last = last_lines
    assert last(tmp_path, 4, lines=2, size=100, without="") == "99\nk8sjob: mine"
    assert last(tmp_path, 4, lines=9, size=4, without="k8sjob: ") == "8\n99"
    assert last(tmp_path, 5, lines=9, size=4, without="") == ""


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
