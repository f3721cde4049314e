"""A training script with the local modules that it imports, as Python would find them."""

from __future__ import annotations

import ast
import gc
import io
import math
import re
import sys
import time
import tokenize
import warnings
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.util import decode_source
from typing import TYPE_CHECKING, Final

from k8sjob.errors import SpecError
from k8sjob.findings import invalid
from k8sjob.yamldoc.reading import MAX_BYTES, content

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

_INNER: Final = (ast.expr, ast.arguments, ast.arg, ast.pattern)
"""What a field of a node may hold, besides a list of nodes."""
_MAX_MODULES: Final = 300
_MAX_PROGRAM: Final = 8 * MAX_BYTES
"""Local modules that are read, and their length; what is imported beyond counts as a library."""
_MAX_PARTS: Final = 30
"""Packages in each other in which a module is looked for."""
_MAX_JOINED: Final = 1000
"""Parts of a name, values of an f-string: Python parses both in quadratic time (140 s, 1 GB)."""
_LONG_NAME: Final = re.compile(rf"(?<![\w.])(?:[^\W\d]\w*+[\s\\]*\.[\s\\]*){{{_MAX_JOINED}}}")
TIME_LIMIT: Final = 60
"""CPU seconds for a script with its modules. 10,000 lines take 3, all of Megatron-LM 10 to 15."""
_deadline: ContextVar[float] = ContextVar("_deadline", default=math.inf)


class TooLarge(SpecError):  # noqa: N818 - as JobTooLarge
    """Code that would take too long to read."""


@contextmanager
def time_limit() -> Iterator[None]:
    """Limit the CPU time for a script, in this thread: a busy machine fails no file."""
    token = _deadline.set(time.thread_time() + TIME_LIMIT)
    # All nodes of a script live until its end. The garbage collector visits them again and again:
    # a quarter of the time for 1 MB, and more than linear. Before, it frees the last script's.
    gc.collect(1)
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        _deadline.reset(token)
        if is_collecting:
            gc.enable()


def check_time() -> None:
    """Give up when the time of `time_limit` is over; no signal and no thread has to do it.

    Raises:
        TooLarge: it is over.
    """
    if time.thread_time() > _deadline.get():
        raise _too_large(f"reading the script took more than {TIME_LIMIT} s of CPU time")


def _too_large(reason: str) -> TooLarge:
    return TooLarge([invalid((), reason, "specify a smaller script")])


@dataclass(eq=False, slots=True)
class Module:
    """One parsed file.

    Attributes:
        name: its dotted name; "__main__" for a script.
        source: its file name, for findings.
        package: what its relative imports start from.
        nodes: all of its tree, level by level, without operators and contexts.
        parents: the node above each.
        scopes: the innermost function or class around each, or else the tree.
        imports: dotted names that it imports and that may be modules.
        aliases: what each imported name stands for.
        stars: modules whose names are all imported.
        tops: what stands at its top level and can be imported.
    """

    name: str
    source: str
    text: str
    tree: ast.Module
    package: str = ""
    nodes: list[ast.AST] = field(default_factory=list)
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    scopes: dict[ast.AST, ast.AST] = field(default_factory=dict)
    imports: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    tops: dict[str, Definition] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes.append(self.tree)
        self.scopes[self.tree] = self.tree
        for node in self.nodes:
            scope = node if isinstance(node, Definition) else self.scopes[node]
            if inner := _children(node):
                self.nodes += inner
                self.parents.update(dict.fromkeys(inner, node))
                self.scopes.update(dict.fromkeys(inner, scope))
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    self.aliases[alias.asname or top] = alias.name if alias.asname else top
                    self.imports.append(alias.name)
            elif isinstance(node, ast.ImportFrom):
                self._import_from(node)
        self.tops = {node.name: node for node in self.tree.body if isinstance(node, Definition)}

    def _import_from(self, node: ast.ImportFrom) -> None:
        base = _base(node, self.package)
        self.imports.append(base)
        for alias in node.names:
            self.imports.append(f"{base}.{alias.name}".lstrip("."))
            if alias.name == "*":
                self.stars.append(base)
            else:
                self.aliases[alias.asname or alias.name] = self.imports[-1]


def _children(node: ast.AST) -> list[ast.AST]:
    """The nodes in a node; `ast.iter_child_nodes` takes three times as long."""
    children: list[ast.AST] = []
    for value in () if isinstance(node, ast.Name | ast.Constant) else vars(node).values():
        if isinstance(value, list):
            children += [child for child in value if isinstance(child, ast.AST)]
        elif isinstance(value, _INNER):
            children.append(value)
    return children


def _base(node: ast.ImportFrom, package: str) -> str:
    """The module that an import takes its names from; "" for a script's own folder."""
    if not node.level:
        return node.module or ""
    parts = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join(part for part in (*parts, node.module or "") if part)


def read_text(file: Path, source: str) -> str:
    """The text of a file, a script in its own encoding.

    Raises:
        SpecError: it cannot be read, is too long or in no encoding.
    """
    try:
        data = content(file)
        if len(data) > MAX_BYTES:
            raise refusal(f"longer than {MAX_BYTES} bytes", source)
        is_python = source.endswith((".py", ".pyw"))
        return decode_source(data) if is_python else data.decode("utf-8-sig")
    except OSError as error:
        raise refusal(f"cannot be read: {error.strerror or error}", source) from None
    except (SyntaxError, UnicodeError, LookupError) as error:  # the last: as rot13
        raise SpecError([invalid((), str(error), "save the file as UTF-8")], source) from None


def refusal(reason: str, source: str) -> SpecError:
    """A file that lint does not read, with the next step."""
    step = "specify a job's manifest, a job.yaml or a script"
    return SpecError([invalid((), reason, step)], source)


_parsed: Final[dict[tuple[str, str, str, str], Module]] = {}
"""Modules by what they were parsed from: `init` reads them, and lints what it has written."""


def parse_module(text: str, source: str, name: str = "__main__", package: str = "") -> Module:
    """The module in a text, the same one for the same arguments.

    Raises:
        SyntaxError: Python cannot parse it.
        TooLarge: Python would take minutes for it.
    """
    key = (text, source, name, package)
    if (module := _parsed.get(key)) is None:
        # A module takes about 65 times the memory of its text.
        if sum(len(parsed.text) for parsed in _parsed.values()) > _MAX_PROGRAM:
            _parsed.clear()
        module = _parsed[key] = Module(name, source, text, _tree(text), package)
    return module


def _tree(text: str) -> ast.Module:
    if text.count(".") > _MAX_JOINED and _LONG_NAME.search(text):
        raise _too_large(f"there is a name of more than {_MAX_JOINED} parts")
    # Within the parser the time limit cannot act; Python 3.12 takes linear time.
    if text.count("{") > _MAX_JOINED and sys.version_info < (3, 12) and _is_long_format(text):
        raise _too_large(f"there is an f-string of more than {_MAX_JOINED} values")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an invalid escape is not what is looked for
        try:
            return ast.parse(text.removeprefix("\ufeff"))
        except (RecursionError, MemoryError):  # 20,000 `elif`, or a sum of 3,000 terms
            raise SyntaxError("it is nested too deeply") from None
        except ValueError as error:  # null bytes, half surrogate pairs
            raise SyntaxError(str(error)) from None


def _is_long_format(text: str) -> bool:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    with suppress(tokenize.TokenError, SyntaxError):
        strings = (token.string for token in tokens if token.type == tokenize.STRING)
        values = (text.replace("{{", "").count("{") for text in strings if "f" in text[:2].lower())
        return any(count > _MAX_JOINED for count in values)
    return False


def program(entry: Module, roots: Sequence[Path]) -> list[Module]:
    """A script and the local modules that it imports, directly or through others.

    The roots are the folders where Python looks first: the script's own. Modules that cannot be
    read or parsed are left out, as libraries are.
    """
    modules: dict[str, Module | None] = {}
    queue, length_left = [entry], _MAX_PROGRAM
    for module in queue:
        for dotted in dict.fromkeys(module.imports):
            parts = dotted.split(".", _MAX_PARTS)[:_MAX_PARTS]
            for length in range(1, len(parts) + 1):
                name = ".".join(parts[:length])
                if name in modules or not name or name in sys.builtin_module_names:
                    continue
                check_time()
                is_read = len(queue) < _MAX_MODULES and length_left > 0
                modules[name] = local = _local(name, roots) if is_read else None
                # A module may import the script itself, which is there already.
                if local is not None and local.source != entry.source:
                    queue.append(local)
                    length_left -= len(local.text)
    return queue


def _local(name: str, roots: Sequence[Path]) -> Module | None:
    for root in roots:
        stem = root.joinpath(*name.split("."))
        package = stem / "__init__.py"
        for file in (package, stem.with_name(f"{stem.name}.py")):
            parent = name if file is package else name.rpartition(".")[0]
            try:
                if file.is_file() and len(data := content(file)) <= MAX_BYTES:
                    return parse_module(decode_source(data), str(file), name, parent)
            except (OSError, SyntaxError, ValueError, LookupError, RecursionError):
                return None
    return None
