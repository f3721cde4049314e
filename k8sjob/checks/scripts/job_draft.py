"""A job.yaml for a training script, from its code. Nothing is executed.

Read with the same eyes as lint: imports are followed into local modules, names through aliases.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import sys
import tokenize
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib import metadata
from itertools import chain
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final, NamedTuple

from k8sjob.checks.distributions import distribution_of, pinned, table
from k8sjob.checks.scripts.code import constant, keyword
from k8sjob.checks.scripts.facts import LOCAL_RANK_OPTIONS, MANAGED, Script, Setting
from k8sjob.checks.scripts.modules import check_time, parse_module, program, read_text, time_limit
from k8sjob.errors import SpecError
from k8sjob.findings import invalid
from k8sjob.rendering.template import fill
from k8sjob.spec import JobSpec
from k8sjob.spec.load import job_name
from k8sjob.yamldoc.reading import MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from k8sjob.checks.scripts.modules import Module

_IN_BASE: Final = frozenset({"k8sjob", "numpy", "torch", "torchaudio", "torchvision"})
"""Top-level modules that need no installation: of the base, and what k8sjob adds."""
_FRAMEWORKS: Final = MANAGED | {"keras", "k8sjob", "torch"}
_USUAL_NAMES: Final = ("train.py", "main.py", "run.py", "finetune.py")
_MAX_AROUND: Final = 4
"""Folders around the job's in which the rest of a repository is looked for."""
_MOST: Final = 12
"""Options of the script that are named."""
_CELLS_OF_PYTHON: Final = re.compile(r"%%(?:capture|prun|time|timeit)\b")
_FOR_IPYTHON: Final = re.compile(r"(\s*)([%!?].*|[\w.]+\?{1,2}\s*)")
"""A line of a notebook that is no Python: a magic, a shell's command, a question."""
_OF_THE_SYSTEM: Final = re.compile(
    "app|bin|boot|dev|etc|home|lib|lib64|media|mnt|opt|proc|root|run|sbin|srv|sys|tmp|usr|var"
)
"""Folders of an image that no data may hide."""
_LIGHTNING: Final = re.compile(table("group")["lightning"])


@dataclass(frozen=True, slots=True)
class Draft:
    """The new files of a job by their names, and notes on what its user has to look at."""

    files: dict[str, str]
    notes: list[str] = field(default_factory=list)


def find_script(path: Path) -> Path:
    """The training script that a path stands for: itself, or the one program of a folder.

    Raises:
        SpecError: there is none, or several are possible.
    """
    if not path.is_dir():
        if path.suffix not in {".py", ".ipynb"} or not path.is_file():
            step = "specify a .py or .ipynb file, or a folder with one"
            raise SpecError([invalid((), "no script", step)], str(path))
        return path
    with time_limit():
        files = [file for file in sorted(path.glob("*.py")) if file.is_file()]
        scripts = [file for file in files if _is_training(file)]
        check_time()
    for name in _USUAL_NAMES if len(scripts) > 1 else ():
        if path / name in scripts:
            return path / name
    if len(scripts) == 1:
        return scripts[0]
    several = f"several training scripts: {', '.join(file.name for file in scripts)}"
    message = several if scripts else "no .py file in it is a training script"
    raise SpecError([invalid((), message, "specify the one to start")], str(path))


def _is_training(file: Path) -> bool:
    try:
        text = read_text(file, str(file))
        script = Script([_entry(file, text, file.parent)], Setting())
        # Mostly its own imports tell, without those of all modules around it.
        if script.is_program and not script.modules & _FRAMEWORKS:
            script = _read(file, text, file.parent)
    except SpecError:
        return False
    return script.is_program and bool(script.modules & _FRAMEWORKS)


@lru_cache(maxsize=1)  # the one script of a folder is read to find it, and again for its job.yaml
def _read(file: Path, text: str, folder: Path) -> Script:
    """A script with its imports from its own folder and the job's."""
    return Script(program(_entry(file, text, folder), [file.parent, folder]), Setting())


def _entry(file: Path, text: str, folder: Path) -> Module:
    try:
        inside = file.resolve().parent.relative_to(folder.resolve()).parts
        return parse_module(text, str(file), package=".".join(inside))
    except (SyntaxError, ValueError) as error:
        message = f"Python cannot parse it: {getattr(error, 'msg', error)}"
        line = getattr(error, "lineno", 0) or 0
        if line and file.suffix == ".ipynb":  # not a line of the notebook
            message += f", in {(getattr(error, 'text', None) or '').strip()!r}"
            line = 0
        raise SpecError([invalid((), message, line=line)], str(file)) from None


def draft(file: Path, folder: Path, *, name: str = "", args: Sequence[str] = ()) -> Draft:
    """The job.yaml of a script, with the reasons as comments.

    Args:
        file: the script, or a notebook, of whose cells a script is made.
        folder: where job.yaml is to be: the script's own folder, or one around it.
        name: the job's; empty: after the script.
        args: arguments of the script.

    Raises:
        SpecError: Python cannot parse the script, it lies elsewhere, or the name is not valid.
    """
    is_notebook = file.suffix == ".ipynb"
    text = _cells(file) if is_notebook else read_text(file, str(file))
    script_file = file.resolve().with_suffix(".py")
    if is_notebook and script_file.exists():
        script_file = script_file.with_stem(f"{file.stem}_notebook")
    if not script_file.is_relative_to(folder.resolve()):
        message = f"not in {folder}, which becomes the image's context"
        step = "specify a folder that contains it"
        raise SpecError([invalid((), message, step)], str(file))
    path = script_file.relative_to(folder.resolve()).as_posix()
    files = {path: text} if is_notebook else {}
    with time_limit():
        job = _Job(_read(file, text, folder), file, path, folder, args)
        files["job.yaml"] = job.text(name or job_name(file.stem))
    try:
        JobSpec.from_yaml(files["job.yaml"])
    except SpecError as error:  # its lines are of a file that is not written
        problems = [problem._replace(line=0, column=0) for problem in error.findings]
        raise SpecError(problems, str(file)) from None
    return Draft(files, list(job.notes()))


def _cells(file: Path) -> str:
    """The code of a notebook, whatever its size: pictures make it long."""
    try:
        cells = json.loads(file.read_bytes())["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise SpecError([invalid((), "not a notebook of format 4")], str(file)) from None
    if sum(map(len, code)) > MAX_BYTES:
        message = f"its code is longer than {MAX_BYTES} bytes"
        raise SpecError([invalid((), message, "specify a smaller script")], str(file))
    return "\n\n".join(_python(cell.rstrip("\n")) for cell in code) + "\n"


def _python(cell: str) -> str:
    """A cell in which what is only for IPython has become comments."""
    try:
        parse_module(cell, "")
    except (SyntaxError, ValueError):
        lines = cell.split("\n")
    else:
        return cell
    if cell.startswith("%%") and not _CELLS_OF_PYTHON.match(cell):
        return "\n".join(f"# {line}" for line in lines)
    code, is_continued = list[str](), False
    while len(code) < len(lines):
        line = lines[len(code)]
        magic = _FOR_IPYTHON.fullmatch(line)
        if magic or is_continued:
            indent, text = magic.groups() if magic else ("", line)
            code.append(f"{indent}{'pass  ' if indent else ''}# {text}")
            is_continued = line.endswith("\\")
        else:
            code += lines[len(code) : len(code) + _length(lines, len(code))]
    return "\n".join(code)


def _length(lines: list[str], first: int) -> int:
    """The lines of a statement, which may be in brackets; if those are never closed, the rest."""
    if lines[first].strip()[:1] in {"", "#"}:
        return 1
    source = (f"{lines[number]}\n" for number in range(first, len(lines)))
    tokens = tokenize.generate_tokens(source.__next__)
    ends = (token.end[0] for token in tokens if token.type == tokenize.NEWLINE)
    try:
        return next(ends, 1)
    except (SyntaxError, tokenize.TokenError) as error:
        # Of 3.12 and later, too: "too many nested parentheses" after 200 that are open.
        is_open = any(text in str(error) for text in ("EOF", "triple-quoted", "nested paren"))
        return len(lines) - first if is_open else 1


class _Start(NamedTuple):
    """The start of a script's processes: the reason, Workers, and processes of each replica."""

    reason: str
    workers: int = 1
    processes: int = 1


class _Option(NamedTuple):
    """An option or positional argument of argparse.

    Attributes:
        name: the one to show, of all names.
        needed: whether it must be given.
        valued: whether it is an option that a value follows.
    """

    name: str
    names: frozenset[str]
    needed: bool
    valued: bool


class _Job:
    def __init__(
        self, script: Script, file: Path, path: str, folder: Path, args: Sequence[str]
    ) -> None:
        self._script, self._file, self._path = script, file, path
        self._folder, self._args = folder, args

    def text(self, name: str) -> str:
        """The job.yaml."""
        return fill(
            "init/from-script.yaml.j2",
            name=name,
            script=self._path,
            module=self._module,
            start=self._start,
            requirements=(self._folder / "requirements.txt").is_file(),
            packages=self._packages(),
            perhaps=_some(sorted(self._libraries[1])),
            local_rank=self._local_rank,
            args=list(self._args),
            options=_some(option.name for option in self._options if not option.needed),
            needed=_some(option.name for option in self._options if option.needed),
            nccl=self._needs_gpus(),
            session=self._script.has_runtime,
            data=self._data(),
            saves=next(map(self._place, self._script.torch_calls("save")), ""),
        )

    def notes(self) -> Iterator[str]:
        """Notes on what the user should check."""
        passed = {word.partition("=")[0] for word in self._args}
        needed = [option for option in self._options if option.needed]
        names = [option.name for option in needed if not option.names & passed]
        positional = [name for name in names if not name.startswith("-")]
        positional = positional[self._positional_words() :]
        if missing := [name for name in names if name.startswith("-")] + positional:
            yield f"{self._path} needs {', '.join(missing)}: add them to run.args"
        again = f"k8sjob init --from {shlex.quote(str(self._file))}"
        if self._relative and not self._module:
            levels = self._levels - len(PurePosixPath(self._path).parent.parts)
            around = os.path.relpath(self._folder.resolve().parents[max(levels, 1) - 1])
            reason = f"{self._path} imports from the package around it"
            where = self._place(self._relative[0])
            yield f"{reason} ({where}); to add that: {again} {shlex.quote(around)}"
        for package, outer in self._outside.items():
            reason = f"{package} is in {outer}, not in the job's folder"
            yield f"{reason}; to add it: {again} {shlex.quote(outer)}"
        if self._start.workers == 0 and self._start.processes == 1:
            yield self._start.reason

    @cached_property
    def _relative(self) -> list[ast.ImportFrom]:
        """The relative imports of the script, which work only in a module."""
        return [
            node
            for node in ast.walk(self._script.files[0].tree)
            if isinstance(node, ast.ImportFrom) and node.level and not self._is_optional(node)
        ]

    @property
    def _levels(self) -> int:
        """The folders that its relative imports go up, at most."""
        return max((node.level for node in self._relative), default=0)

    @property
    def _module(self) -> str:
        """The script's name as a module, where it must be one and its package is in the folder."""
        parts = PurePosixPath(self._path).with_suffix("").parts
        named = all(part.isidentifier() for part in parts)
        return ".".join(parts) if named and 0 < self._levels < len(parts) else ""

    def _place(self, node: ast.expr | ast.stmt) -> str:
        """The line of a node, with the file if that is not the script."""
        module = self._script.module(node)
        if module is self._script.files[0]:
            return f"line {node.lineno}"
        return f"{os.path.relpath(module.source, self._folder)}:{node.lineno}"

    # --- how it starts

    @cached_property
    def _start(self) -> _Start:
        script = self._script
        spawned = script.spawns
        groups = script.torch_calls("init_process_group", "init_device_mesh")
        forms = {name: table("group").get(name, "") for name in sorted(script.modules & MANAGED)}
        if script.has_runtime:
            start = _Start("k8sjob.runtime creates the process group")
        elif self._names(_LIGHTNING):
            start = self._of_lightning()
        elif spawned:
            processes = "its own processes, in one replica"
            count = keyword(spawned[0], "nprocs", 2)
            if count and set(script.makers(count)) == {"torch.cuda.device_count"}:
                processes = "a process for each GPU of one replica, and none without a GPU"
            start = _Start(f"mp.spawn ({self._place(spawned[0])}) starts {processes}", 0)
        elif groups:
            maker = f"{script.last_name(groups[0].func)} ({self._place(groups[0])})"
            start = _Start(f"{maker} takes the ranks from the environment")
        elif managed := [name for name, form in forms.items() if self._names(re.compile(form))]:
            start = _Start(f"{managed[0]} creates the process group from the environment")
        elif self._outside:
            names = ", ".join(self._outside)
            start = _Start(
                f"its process group, if any, is created in {names}, not in the folder", 0
            )
        else:
            page = "Keras's guides" if "keras" in script.modules else "torch's DDP tutorials"
            alone = "it creates no process group, so several processes would each train separately"
            start = _Start(f'{alone}; see "From {page} to job.yaml" in the documentation', 0)
        return start

    def _names(self, part: re.Pattern[str]) -> bool:
        """Whether something of a library is called or imported by name."""
        used = [called for called, _ in self._script.calls]
        used += [name for module in self._script.files for name in module.imports]
        return any(map(part.match, used))

    def _of_lightning(self) -> _Start:
        """Lightning refuses another number of processes than devices * num_nodes."""
        counts = {"devices": 1, "num_nodes": 1}
        for called, call in self._script.calls:
            if _LIGHTNING.fullmatch(called):
                for option in counts:
                    if isinstance(number := constant(keyword(call, option)), int):
                        counts[option] = max(number, 1)
        devices, nodes = counts["devices"], counts["num_nodes"]
        reason = f"Lightning's Trainer or Fabric has devices={devices} and num_nodes={nodes}"
        if devices == nodes == 1:
            reason = "Lightning is one process unless devices and num_nodes in the code are numbers"
        return _Start(reason, nodes - 1, devices)

    # --- what it needs

    @cached_property
    def _installed(self) -> Mapping[str, list[str]]:
        """The distributions of each module that is installed; it takes a look at all of them."""
        return metadata.packages_distributions()

    @cached_property
    def _libraries(self) -> tuple[dict[str, set[str]], set[str]]:
        """Libraries that the code needs, with what it imports of each; and others.

        Those others are imported only in functions of its modules: a module of a large repository
        imports in a function what few of its users need.
        """
        libraries = self._script.modules - _IN_BASE - sys.stdlib_module_names
        imports, needed = defaultdict[str, set[str]](set), self._installed.keys() & libraries
        for node in self._script.nodes:
            if isinstance(node, ast.Import | ast.ImportFrom) and not self._is_optional(node):
                inside = self._script.function(node) is not None
                its_own = self._script.module(node) is self._script.files[0]
                for name in _imported(node):
                    imports[top := name.partition(".")[0]].add(name)
                    needed |= {top} & libraries if its_own or not inside else set()
        named = {top: names for top, names in imports.items() if top in needed}
        return named, (imports.keys() & libraries) - needed

    @cached_property
    def _outside(self) -> dict[str, str]:
        """Packages that are not installed, but lie in a folder around the job's."""
        missing = sorted(self._libraries[0].keys() - self._installed.keys())
        around = self._folder.resolve().parents[:_MAX_AROUND]
        tops = {
            name: next((top for top in around if _has_module(top, name)), None) for name in missing
        }
        return {name: os.path.relpath(top) for name, top in tops.items() if top}

    def _packages(self) -> list[str]:
        imports = [names for top, names in self._libraries[0].items() if top not in self._outside]
        names = {distribution_of(name, self._installed) for name in chain(*imports)}
        names |= {name for use, name in table("use").items() if self._names(re.compile(use))}
        return [pinned(name) for name in sorted(names, key=str.lower)]

    def _is_optional(self, node: ast.AST) -> bool:
        """Whether the import may fail, or is only for type checkers."""
        return any(
            (isinstance(parent, ast.Try) and child in parent.body and bool(parent.handlers))
            or (
                isinstance(parent, ast.If)
                and child in parent.body
                and self._script.last_name(parent.test) == "TYPE_CHECKING"
            )
            for child, parent in self._script.ancestors(node)
        )

    def _data(self) -> dict[str, str]:
        """Folders next to the job's that the script names as "../data", and the line of each."""
        lines: dict[str, str] = {}
        for node in self._script.nodes:
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            path = node.value
            if not path.startswith("../") or "\0" in path:
                continue
            name = path.split("/")[1]
            folder = self._folder.absolute().parent / name
            valid = job_name(name) == name and not _OF_THE_SYSTEM.fullmatch(name)
            if valid and folder.is_dir() and not self._folder.absolute().is_relative_to(folder):
                lines.setdefault(name, self._place(node))
        return lines

    def _needs_gpus(self) -> bool:
        """Whether its process group is NCCL's, whatever there is."""
        groups = self._script.torch_calls("init_process_group")
        nccl = any(constant(keyword(call, "backend", 0)) == "nccl" for call in groups)
        asked = self._script.method_calls("is_available")
        parents = [next(self._script.ancestors(call), (call, None))[1] for call in asked]
        return nccl and all(isinstance(parent, ast.Assert) for parent in parents)

    # --- its command line

    @property
    def _local_rank(self) -> str | None:
        """The option by which a launcher of old passes the local rank, if there is one."""
        calls = self._script.method_calls("add_argument")
        names = (constant(name) for call in calls for name in call.args)
        return next((name for name in names if name in LOCAL_RANK_OPTIONS), None)

    def _positional_words(self) -> int:
        """The arguments that are no option and no option's first value."""
        valued = {name for option in self._options if option.valued for name in option.names}
        before = ["", *self._args]
        pairs = zip(before, self._args, strict=False)
        return sum(not word.startswith("-") and last not in valued for last, word in pairs)

    @cached_property
    def _options(self) -> list[_Option]:
        """The options that argparse knows but the local rank."""
        options: dict[str, _Option] = {}
        for call in self._script.method_calls("add_argument"):
            names = [name for name in map(constant, call.args) if isinstance(name, str)]
            if not names or LOCAL_RANK_OPTIONS.intersection(names):
                continue
            name = next((name for name in names if name.startswith("--")), names[0])
            optional = constant(keyword(call, "nargs")) in {"?", "*"}
            positional = not name.startswith("-") and not optional
            needed = positional or constant(keyword(call, "required")) is True
            valued = name.startswith("-") and keyword(call, "action") is None
            options[name] = _Option(name, frozenset(names), needed, valued)
        return list(options.values())


def _has_module(folder: Path, name: str) -> bool:
    files = [*folder.glob(f"{name}.py"), *folder.glob(f"{name}/*.py")]
    return bool(files) or next(folder.glob(f"{name}/*/*.py"), None) is not None


def _some(options: Iterable[str]) -> str:
    names = list(options)
    return " ".join([*names[:_MOST], *(["..."] if names[_MOST:] else [])])


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The modules of an import, with the names that are taken from them."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [] if node.level else [f"{node.module}.{alias.name}" for alias in node.names]
