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
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k8sjob.runtime.base import config

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_NEUTRAL: Final = re.compile(
    "accelerate|datasets|lightning|matplotlib|numpy|pandas|PIL|pytorch_lightning|requests"
    "|safetensors|scipy|timm|tokenizers|torchaudio|torchmetrics|torchvision|tqdm|transformers|yaml"
)
"""Libraries that neither set torch's variables nor have to be loaded before it."""
_MAX_FILES: Final = 50
_TRAINS: Final = re.compile(rb"\b(optim|DistributedDataParallel|fully_shard)\b")
"""What imports torch's compiler, as of torch 2.6: an optimizer's first step, and DDP."""
_SESSION: Final = re.compile(rb"\bk8sjob(\.| import )runtime\b")
_CONFIGURES: Final = re.compile(rb"\b(AOT|INDUCTOR|SYMPY|TORCH(?!ELASTIC)|TRITON)_?[A-Z]")
"""Variables, of hundreds, that torch's compiler and its libraries read at their import."""


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
    folder = Path(script_folder(argv))
    script = _Script(folder)
    try:
        files = script.files(argv[1]) if argv[0] == "-m" else [Path(os.path.realpath(argv[0]))]
        if argv[0] == "-m" and files and files[-1].name == "__init__.py":
            files.append(files[-1].with_name("__main__.py"))
        # Each is executed in turn: first the packages of a module.
        reached = next(filter(None, map(script.torch_of_file, files)), "")
        texts = script.texts(files) if reached else []
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ()  # its own process reports that
    if reached != "torch":
        return ()
    session = ["k8sjob.runtime.sessions"] if any(map(_SESSION.search, texts)) else []
    trains = processes > 1 and (session or any(map(_TRAINS.search, texts)))
    compiler = ["torch._dynamo"] if trains and not any(map(_CONFIGURES.search, texts)) else []
    return ("torch", *compiler, *session)


_ACTS: Final = "?"
"""In place of a module's name: something else than an import comes first."""


class _Script:
    """A script, and the modules in its folder that it imports."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._entered = folder, set[Path]()
        self._trees: dict[Path, tuple[bytes, ast.Module]] = {}

    def files(self, name: str) -> list[Path]:
        """The files in the folder that an import of a module executes, in their order."""
        if config.safe_path():
            return []
        files, place = [], self._folder
        for part in name.split("."):
            candidates = (place / part / "__init__.py", place / f"{part}.py")
            files += [file for file in candidates if file.is_file()][:1]
            place /= part
        return files

    def torch_of_file(self, file: Path) -> str:
        """The module by which the file imports torch; empty: it does not, and does nothing else."""
        if file in self._entered:
            return ""
        self._entered.add(file)
        return self._torch_of(self._parse(file)[1].body, file)

    def texts(self, files: Sequence[Path]) -> list[bytes]:
        """The files, and all in the folder that they import anywhere."""
        texts, waiting, queued = list[bytes](), list(files), set(files)
        while waiting and len(texts) < _MAX_FILES:
            text, tree = self._parse(file := waiting.pop())
            texts.append(text)
            for node in ast.walk(tree):
                imported = {at for name in self._names(node, file) for at in self.files(name)}
                waiting += imported - queued
                queued |= imported
        return texts

    def _parse(self, file: Path) -> tuple[bytes, ast.Module]:
        if file not in self._trees:
            text = file.read_bytes()
            self._trees[file] = text, ast.parse(text)
        return self._trees[file]

    def _torch_of(self, body: Sequence[ast.stmt], file: Path) -> str:
        for statement in body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                reached = next(filter(None, map(self._torch_by, self._names(statement, file))), "")
            elif isinstance(statement, ast.Try):  # of a library that may be missing
                handled = [inner for handler in statement.handlers for inner in handler.body]
                after = [*statement.orelse, *statement.finalbody]
                reached = self._torch_of([*statement.body, *handled, *after], file)
            else:
                reached = "" if _is_inert(statement) else _ACTS
            if reached:
                return reached
        return ""

    def _torch_by(self, name: str) -> str:
        """The same of an import of a module by its absolute name."""
        top = name.partition(".")[0]
        if files := self.files(name):
            return next(filter(None, map(self.torch_of_file, files)), "")
        # k8sjob.runtime alone imports torch when it is used.
        if top == "torch" or name.startswith("k8sjob.runtime."):
            return "torch"
        is_harmless = top == "k8sjob" or _NEUTRAL.fullmatch(top) or top in sys.stdlib_module_names
        return "" if is_harmless or (self._folder / top).is_dir() else _ACTS

    def _names(self, node: ast.AST, file: Path) -> Iterator[str]:
        """The modules that an import names, and what it takes of them, which may be modules."""
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = [node.module] if node.module else []
            if node.level:
                package = file.parent.relative_to(self._folder).parts
                parts = [*package[: len(package) - node.level + 1], *parts]
            taken = [[], *([alias.name] for alias in node.names if alias.name != "*")]
            yield from (".".join([*parts, *last]) for last in taken if parts or last)


def _is_inert(statement: ast.stmt) -> bool:
    """Whether a statement only defines names, and calls nothing."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        values = [*statement.args.defaults, *filter(None, statement.args.kw_defaults)]
        parts: list[ast.expr] = [*statement.decorator_list, *values]
    elif isinstance(statement, ast.Assign):
        parts = [*statement.targets, statement.value]
    elif isinstance(statement, ast.Expr):
        parts = [statement.value]
    elif isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
        return not statement.orelse
    else:
        return isinstance(statement, ast.Pass)
    acts = (ast.Call, ast.Attribute, ast.Subscript, ast.Await)
    return not any(isinstance(node, acts) for part in parts for node in ast.walk(part))
