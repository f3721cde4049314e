"""The frames of the user's code, and the paths by which the user knows it."""

import json
import site
import threading

import pytest

import k8sjob
from k8sjob.contract import PATHS_ENV, SOURCE_ENV, WORKDIR
from k8sjob.runtime.base import frames


def frame_in(file):
    """A frame whose code is of that file, called from this one."""
    found = {}
    exec(compile("frame = __import__('sys')._getframe()", file, "exec"), found)
    return found["frame"]


@pytest.mark.parametrize(
    "file",
    [
        json.__file__,
        pytest.__file__,
        k8sjob.__file__,
        f"{site.getusersitepackages()}/torch/nn/modules/module.py",
        "/usr/lib/python3/dist-packages/numpy/core.py",
        "/opt/base/lib/python3.11/site-packages/torch/optim/sgd.py",
        "<frozen runpy>",
        "<string>",
    ],
)
def test_library_code_is_not_the_users(file):
    assert frames.caller(frame_in(file))[0] == __file__


@pytest.mark.parametrize("file", ["/app/main.py", "/home/me/k8sjob/train.py", "/srv/lib/mine.py"])
def test_everything_else_is_the_users(file):
    assert frames.caller(frame_in(file)) == (file, 1)


def test_an_error_comes_from_the_users_line_even_if_it_is_handled_below_that():
    handled = "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    place = failed_at(error)"
    for file, place in (("/app/main.py", "/app/main.py:2 in <module>"), (json.__file__, __file__)):
        found = {"failed_at": frames.failed_at}
        exec(compile(handled, file, "exec"), found)
        assert found["place"].startswith(place)


def test_the_users_path_is_shown_in_place_of_the_copy(monkeypatch, tmp_path):
    real, source = tmp_path / "real", tmp_path / "mine"
    real.mkdir()
    (tmp_path / "state").symlink_to(real)
    text = f'File "{tmp_path}/state/main.py", line 3; {real}/pkg/a.py:4; {tmp_path}/statement.py'
    assert frames.with_user_paths(text) == text
    monkeypatch.setenv(SOURCE_ENV, str(source))
    assert frames.with_user_paths(text) == text
    monkeypatch.setenv(PATHS_ENV, json.dumps({WORKDIR: f"{tmp_path}/state"}))
    assert frames.with_user_paths(text) == (
        f'File "{source}/main.py", line 3; {source}/pkg/a.py:4; {tmp_path}/statement.py'
    )
    monkeypatch.setenv(PATHS_ENV, "torn")
    assert frames.with_user_paths(text) == text


def test_stacks_are_those_of_the_users_threads():
    end = threading.Event()
    threads = [
        threading.Thread(target=end.wait, name=name) for name in ("loader", "k8sjob-watchdog")
    ]
    for thread in threads:
        thread.start()
    shown = frames.stacks()
    end.set()
    for thread in threads:
        thread.join()
    assert "Thread loader (most recent call first):\n" in shown
    assert "k8sjob-watchdog" not in shown
    assert f'File "{__file__}", line ' in shown


SPAWNED = """

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "/opt/lib/python3.11/site-packages/torch/multiprocessing/spawn.py", line 95, in _wrap
    fn(i, *args)
  File "/app/train.py", line 31, in work
    load(rows)
  File "/opt/lib/python3.11/site-packages/pandas/frame.py", line 9, in load
    raise errors.ParserError("row 3: too long")
pandas.errors.ParserError: row 3: too long
"""
LOADER = """Caught StopIteration in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/opt/lib/python3.11/site-packages/torch/utils/data/worker.py", line 309, in _loop
    data = fetcher.fetch(index)
StopIteration
"""


@pytest.mark.parametrize(
    ("message", "inner"),
    [
        (SPAWNED, ("ParserError", "row 3: too long", "/app/train.py:31")),
        (
            SPAWNED.replace(": row 3", ": \n\nrow 3"),
            ("ParserError", "row 3: too long", "/app/train.py:31"),
        ),
        (LOADER, ("StopIteration", "", "")),
        ("a plain message", None),
        ("Traceback (most recent call last):\n", None),
    ],
)
def test_the_cause_in_another_process_is_found(message, inner):
    assert frames.embedded(message) == inner


def test_of_a_dump_the_users_threads_remain():
    own = f'  File "{frames.RUNTIME}runtime/watchdog.py", line 9 in _watch\n'
    library = f'  File "{json.__file__}", line 1 in load\n'
    bottom = f'  File "{threading.__file__}", line 5 in _bootstrap\n'
    head = "Thread 0x01 (most recent call first):\n"
    theirs = f'{head}  File "/app/main.py", line 3 in load\n{bottom}'
    idle, main = head + library + bottom, f"Current {head}{own}{library}"
    dump = "\n".join(["Fatal Python error: Aborted\n", head + own + bottom, theirs, idle, main])
    assert frames.users_threads(dump) == dump.replace(f"{head}{own}{bottom}\n", "")


def test_of_a_fatal_error_the_users_line_is_found_without_what_is_below():
    library = f'  File "{json.__file__}", line 1 in load\n'
    start = f'  File "{frames.RUNTIME}runtime/agent/rank_main.py", line 9 in main\n'
    start += '  File "<frozen runpy>", line 88 in _run_code\n'
    head, end = "hread 0x01 (most recent call first):\n", "\nExtension modules: numpy (total: 1)\n"
    other, main = ('  File "/app/main.py", line {} in <module>\n'.format(n) for n in (3, 7))  # noqa: UP032
    rest = f"T{head}{other}\n"
    for word, threads in (
        ("C++ thread", f"{rest}T{head}{library}{main}{start}{end}"),
        ("main thread", f"{rest}Current t{head}{main}{start}{end}"),
        ("another one", f"Current t{head}{main}\nT{head}{other}{start}{end}"),
    ):
        dump = f"Fatal Python error: Aborted\n\n{threads}"
        assert frames.fatal_place(dump) == "/app/main.py:7", word
        shown = frames.users_threads(dump)
        assert not any(noise in shown for noise in ("rank_main", "frozen", "Extension"))
        assert shown.count("/app/main.py") == 2
    assert frames.fatal_place("") == frames.fatal_place(f"T{head}{library}") == ""
