"""What a script imports before it does anything else, read from its text without running it.

Such imports can be made once for all processes of a node, which are forked afterwards. They must
not be made for a script that first sets variables that torch reads at its import, or that changes
the path, the filters of warnings, or the order in which libraries are loaded.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import warnings
from importlib.util import resolve_name
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k8sjob.runtime.base import config

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_IN_PLACE: Final = re.compile("numpy|pandas|PIL|scipy|sklearn|yaml")
"""Libraries that are imported before torch where the script does so: the first OpenMP counts."""
_LATER: Final = re.compile(
    "accelerate|datasets|evaluate|ignite|lightning|matplotlib|pytorch_lightning|requests"
    "|safetensors|timm|tokenizers|torchaudio|torchmetrics|torchvision|tqdm|transformers"
)
"""Libraries that set none of torch's variables; a rank imports them, as some read its own."""
_SESSION: Final = re.compile(rb"\bk8sjob(\.| import )runtime\b")
_CONFIGURES: Final = re.compile(rb"\b(AOT|INDUCTOR|SYMPY|TORCH(?!ELASTIC)|TRITON)_?[A-Z]")
"""Variables, of hundreds, that torch's compiler and its libraries read at their import."""
_MAX_FILES: Final = 50


def script_folder(argv: Sequence[str]) -> str:
    """The folder that Python puts in front of sys.path for a program."""
    # pathlib would normalize the path.
    return os.getcwd() if argv[0] == "-m" else os.path.dirname(os.path.realpath(argv[0]))  # noqa: PTH109, PTH120


def early_imports(argv: Sequence[str], processes: int) -> tuple[str, ...]:
    """The modules to import before a program's processes are forked; empty: there are none.

    Args:
        argv: what would follow `python`: SCRIPT or -m MODULE, and arguments.
        processes: how many share them. One would only join the others later by the compiler.
    """
    script = _Script(Path(script_folder(argv)))
    modules = list[str]()
    try:
        files = [Path(os.path.realpath(argv[0]))]
        if argv[0] == "-m":
            files = script.files(f"{argv[1]}.__main__")  # which only a package has
        # Each is executed in turn: first the packages of a module.
        for name in (name for file in files for name in script.first_imports(file)):
            top = name.partition(".")[0]
            # k8sjob.runtime alone imports torch when it is used.
            if top == "torch" or name.startswith("k8sjob.runtime."):
                break
            if _IN_PLACE.fullmatch(top):
                modules.append(top)
            elif not (top in {*sys.stdlib_module_names, "k8sjob"} or _LATER.fullmatch(top)):
                return ()
        else:
            return ()
        texts = script.texts(files)
    except (OSError, SyntaxError, ValueError, ImportError, RecursionError, MemoryError):
        return ()  # its own process reports that
    # An optimizer's first step and DDP import the compiler, as of torch 2.6.
    shared = processes > 1 and not any(map(_CONFIGURES.search, texts))
    compiler = ["torch._dynamo"] if shared else []
    session = ["k8sjob.runtime.sessions"] if any(map(_SESSION.search, texts)) else []
    return (*dict.fromkeys(modules), "torch", *compiler, *session)


class _Script:
    """A script, and the modules in its folder that it imports."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._entered = folder, set[Path]()

    def files(self, name: str) -> list[Path]:
        """The files in the folder that an import of a module executes, in their order."""
        if config.safe_path():
            return []
        files, place = [], self._folder
        for part in name.split("."):
            place, module = place / part, place / f"{part}.py"
            files += [file for file in (place / "__init__.py", module) if file.is_file()][:1]
        return files

    def first_imports(self, file: Path) -> Iterator[str]:
        """The modules outside the folder that a file imports first, and "" if it then acts."""
        if file in self._entered:
            return
        self._entered.add(file)
        for statement in _parse(file.read_bytes()).body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                for name in self._names(statement, file):
                    files = self.files(name)
                    for inner in files:
                        yield from self.first_imports(inner)
                    if not files and not (self._folder / name.partition(".")[0]).is_dir():
                        yield name
            elif not _is_inert(statement):
                yield ""

    def texts(self, files: Sequence[Path]) -> list[bytes]:
        """The files, and all in the folder that they import anywhere."""
        texts, waiting, queued = list[bytes](), list(files), set(files)
        while waiting and len(texts) < _MAX_FILES:
            texts.append((file := waiting.pop()).read_bytes())
            for node in ast.walk(_parse(texts[-1])):
                imported = {at for name in self._names(node, file) for at in self.files(name)}
                waiting += imported - queued
                queued |= imported
        return texts

    def _names(self, node: ast.AST, file: Path) -> Iterator[str]:
        """The modules that an import names, and what it takes of them, which may be modules."""
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(file.parent.relative_to(self._folder).parts)
            module = resolve_name("." * node.level + (node.module or ""), package)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names if alias.name != "*")


def _parse(text: bytes) -> ast.Module:
    with warnings.catch_warnings(action="ignore"):  # the script's own process shows them
        return ast.parse(text)


def _is_inert(statement: ast.stmt) -> bool:
    """Whether a statement is a text, or binds names to values, and calls nothing."""
    acts = ast.Call | ast.Attribute | ast.Subscript
    plain = isinstance(statement, ast.Assign | ast.Expr)
    return plain and not any(isinstance(node, acts) for node in ast.walk(statement))
