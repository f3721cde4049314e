"""Runs a user's script or module as `python SCRIPT` or `python -m MODULE` would.

Not runpy: its run_path takes `__main__` away again when the script's last line is done, while
threads and atexit handlers that the script left still pickle and import by that name.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from k8sjob.runtime.env import EnvError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType

__all__ = ["run_as_main"]


def run_as_main(argv: Sequence[str]) -> None:
    """Execute a program in a new `__main__`, which stays in place afterwards.

    Args:
        argv: what would follow `python`: SCRIPT [ARGS...] or -m MODULE [ARGS...]. A folder or a
            zip file with a `__main__.py` is a script too.

    Raises:
        EnvError: there is no such script or module.
        BaseException: whatever the program raises.
    """
    if argv[0] == "-m":
        name, arguments = argv[1], argv[2:]
        _set_path(os.getcwd())  # noqa: PTH109 - sys.path holds strings
        sys.argv = ["-m", *arguments]  # what Python shows while a module's parents are imported
        spec = _module_spec(name)
        sys.argv[0] = spec.origin or name
        _run_spec(spec, package=spec.parent or "")
        return
    path, arguments = argv[0], argv[1:]
    sys.argv = [path, *arguments]
    if not os.path.exists(path):  # noqa: PTH110 - as Python, without normalising the argument
        raise EnvError(f"there is no script {path!r} in {os.getcwd()}; check run.script")  # noqa: PTH109 - a string
    inner = _archive_spec(_absolute(path))
    if inner is not None:
        # Always first, PYTHONSAFEPATH or not: here it is the program itself.
        sys.path[:0] = [_absolute(path)]
        _run_spec(inner, package="")
    else:
        _set_path(os.path.dirname(os.path.realpath(path)))  # noqa: PTH120 - as above
        _run_file(path)


def _absolute(path: str) -> str:
    """As Python makes the path of its program: joined, neither normalised nor resolved."""
    return os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118 - pathlib would normalise


def _set_path(first: str) -> None:
    """Put the program's folder in front, as Python does without PYTHONSAFEPATH.

    The flag -P says nothing here: it is how this process itself was started.
    """
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path[:0] = [first]


def _run_file(path: str) -> None:
    path = _absolute(path)
    with io.open_code(path) as stream:
        code: CodeType = compile(stream.read(), path, "exec", dont_inherit=True)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    attributes = dict.fromkeys(["__cached__", "__spec__", "__package__"])
    _execute(code, __file__=path, __loader__=loader, **attributes)


def _run_spec(spec: ModuleSpec, package: str) -> None:
    loader: Any = spec.loader
    code = loader.get_code(spec.name)
    if code is None:
        raise ImportError(f"no code object for {spec.name}: it is not written in Python")
    _execute(
        code,
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=loader,
        __spec__=spec,
        __package__=package,
    )


def _execute(code: CodeType, **attributes: Any) -> None:
    main = ModuleType("__main__")
    vars(main).update(attributes, __builtins__=builtins)
    sys.modules["__main__"] = main
    exec(code, vars(main))  # noqa: S102 - running the user's program is the purpose


def _module_spec(name: str) -> ModuleSpec:
    spec = _find(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = _find(name)
    if spec is None or spec.loader is None:
        raise EnvError(f"there is no module {name!r} on sys.path; check run.module and PYTHONPATH")
    return spec


def _find(name: str) -> ModuleSpec | None:
    """A module's spec; None also where a parent of it is missing, but not where one fails."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise


def _archive_spec(path: str) -> ModuleSpec | None:
    """The `__main__` of a folder or a zip file; None for a plain file."""
    spec = importlib.machinery.PathFinder.find_spec("__main__", [path])
    if spec is None and os.path.isdir(path):  # noqa: PTH112 - see run_as_main
        raise EnvError(f"there is no __main__.py in the folder {path!r}; check run.script")
    return spec
