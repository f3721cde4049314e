"""YAML in, with the place of every field: the safe subset that Kubernetes' tools agree on.

Duplicate keys, unknown tags, deep nesting and aliases that multiply are refused. Numbers that YAML
1.1 and 1.2 read differently (010, 1_000, 12:30, 0x1F), dates and .nan stay text: a field that wants
a number refuses them with their line. Booleans are those of YAML 1.1 (on, yes), since kubectl reads
them so.
"""

from __future__ import annotations

import math
import re
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import yaml

from k8sjob.contract import JOB_FILE
from k8sjob.errors import SpecError
from k8sjob.findings import FieldPath, invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from k8sjob.findings import Finding

MAX_BYTES: Final = 2**20
"""Largest text that is taken for a document; an apiserver takes no larger object either."""


def content(file: str | Path) -> bytes:
    """The bytes of a file, or of standard input ("-"), to be parsed; at most MAX_BYTES + 1 of them.

    So a file without an end (/dev/zero, a socket) is refused for its size, as any other.

    Raises:
        OSError: it cannot be read.
    """
    if str(file) == "-":
        return sys.stdin.buffer.read(MAX_BYTES + 1)
    with Path(file).open("rb") as opened:
        return opened.read(MAX_BYTES + 1)


def job_file(path: Path) -> Path:
    """The file that is meant: of a folder its job.yaml, and job.yml where that is the one there."""
    file = path / JOB_FILE if path.is_dir() else path
    if file.name == JOB_FILE and not file.exists():
        yml = file.with_suffix(".yml")
        return yml if yml.is_file() else file
    return file


MAX_DEPTH: Final = 64
MAX_NODES: Final = 50_000
"""Most values in one document, with every alias counted as often as it is used."""
_MAX_COMPOSED: Final = 2 * MAX_NODES + 1
"""Most keys and values in one file: a document of MAX_NODES values, each with a key."""
_TOO_MANY: Final = f"more than {MAX_NODES} values with its aliases expanded"

Place = tuple[int, int]
"""Line and column, both from 1."""


class WrittenFloat(float):
    """A float that remembers how it was written: `VERSION: 1.10` means "1.10", not "1.1"."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, value: float, text: str = "") -> Self:
        """The float, and its text; without one, the shortest that gives it back."""
        number = super().__new__(cls, value)
        number.text = text or repr(float(value))
        return number


@dataclass(frozen=True, slots=True)
class Document:
    """One YAML document.

    Attributes:
        data: dicts with string keys, lists, strings, ints, floats, booleans, None.
        source: the file's name, or empty.
        keys: place of each mapping's key, by the path of its value.
        values: place of each scalar and list item, by path.
        line: line at which the document starts, from 1; 0 where no file has it.
    """

    data: Any
    source: str = ""
    keys: Mapping[FieldPath, Place] = field(default_factory=dict)
    values: Mapping[FieldPath, Place] = field(default_factory=dict)
    line: int = 1

    def place(self, path: FieldPath, *, key: bool = False) -> Place:
        """Line and column of a field, or of the nearest thing around it.

        Args:
            path: keys and list indices, as ("volumes", 1, "mount").
            key: the place of the field's key, also where its value has one of its own.
        """
        for end in range(len(path), 0, -1):
            at = path[:end]
            places = (self.keys, self.values) if key else (self.values, self.keys)
            for table in places:
                if at in table:
                    return table[at]
        return self.line, min(self.line, 1)

    def refuse(self, path: FieldPath, message: str, next_step: str) -> SpecError:
        """The error that says this of one field."""
        return SpecError([self.placed(invalid(path, message, next_step))], self.source)

    def placed(self, finding: Finding) -> Finding:
        """The finding with the place of its field."""
        line, column = self.place(finding.path)
        return finding._replace(line=line, column=column)


class _Refused(yaml.MarkedYAMLError):
    """The error for what this module refuses beyond YAML's own rules."""

    def __init__(self, message: str, mark: yaml.Mark, next_step: str = "") -> None:
        self.next_step = next_step
        super().__init__(problem=message, problem_mark=mark)


_TAG: Final = "tag:yaml.org,2002:"
_TRUE: Final = ("true", "yes", "on")
_FALSE: Final = ("false", "no", "off")
_IMPLICIT: Final = {
    "bool": "|".join(f"{word}|{word.title()}|{word.upper()}" for word in _TRUE + _FALSE),
    "int": r"0|-?[1-9][0-9]{0,99}",
    "float": r"[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)",
    "null": r"~|null|Null|NULL|",
    "merge": r"<<",
}
"""Tag and form of each bare text that is not a string."""


class _Loader(yaml.SafeLoader):
    """Composes nodes, with fewer implicit types than YAML 1.1 and limits to depth and number."""

    depth = 0
    count = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        # Checked on the way down, since PyYAML's composer calls itself for each level.
        self.depth += 1
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]  # PyYAML's stubs
        if self.depth > MAX_DEPTH:
            raise _Refused(f"nested more than {MAX_DEPTH} levels deep, which no job needs", mark)
        self._add(1, mark)
        node = super().compose_node(parent, index)
        if node is not None and node.end_mark is None:  # it is still being composed
            raise _Refused("an alias inside its own anchor", mark)
        self.depth -= 1
        return node

    def _add(self, count: int, mark: yaml.Mark) -> None:
        self.count += count
        if self.count > _MAX_COMPOSED:
            raise _Refused(_TOO_MANY, mark)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """The mapping without `<<`: with the merged pairs first, wherever the `<<` is.

        The mapping's own keys win, then those of the first of the merged mappings.
        """
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        pairs: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for pair in node.value:
            mark = pair[0].start_mark
            # PyYAML merges when it constructs values, where the places of keys are gone.
            if pair[0].tag == _TAG + "merge":
                for source in reversed(_merged(pair[1])):
                    self._add(len(source.value), mark)
                    merged |= {_key(each[0]): each for each in source.value}
                continue
            key = _key(pair[0])
            if key in pairs:
                line = pairs[key][0].start_mark.line + 1
                raise _Refused(f"{key!r} is duplicated, first in line {line}", mark)
            pairs[key] = pair
        node.value = list((merged | pairs).values())
        return node


_Loader.yaml_implicit_resolvers = {
    None: [(_TAG + name, re.compile(rf"(?:{form})\Z")) for name, form in _IMPLICIT.items()]
}


def _merged(node: yaml.Node) -> list[yaml.MappingNode]:
    sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
    for source in sources:
        if not isinstance(source, yaml.MappingNode):
            raise _Refused("'<<' takes a mapping, or a list of mappings", source.start_mark)
    return list(sources)


class _Builder:
    """Turns the nodes of one document into data and remembers their places."""

    def __init__(self) -> None:
        self.keys: dict[FieldPath, Place] = {}
        self.values: dict[FieldPath, Place] = {}
        self.count = 0

    def build(self, node: yaml.Node, path: FieldPath) -> Any:
        """The node's data; `path` is its path."""
        # An alias counts as often as it is used: nine levels of nine aliases are 9^9 values.
        self.count += 1
        if len(path) > MAX_DEPTH:
            raise _Refused(f"nested more than {MAX_DEPTH} levels deep by aliases", node.start_mark)
        if self.count > MAX_NODES:
            raise _Refused(_TOO_MANY, node.start_mark)
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            mapping = {}
            for key_node, value_node in node.value:
                at = (*path, _key(key_node))
                self.keys[at] = _place(key_node.start_mark)
                mapping[at[-1]] = self.build(value_node, at)
            return mapping
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            for index, item in enumerate(node.value):
                self.values[*path, index] = _place(item.start_mark)
            return [self.build(item, (*path, i)) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            self.values[path] = _place(node.start_mark)
            return _scalar_value(node)
        raise _Refused(f"the tag {node.tag!r} is not supported", node.start_mark, "remove it")


def _place(mark: yaml.Mark) -> Place:
    return mark.line + 1, mark.column + 1


def _key(node: yaml.Node) -> str:
    value = _scalar_value(node) if isinstance(node, yaml.ScalarNode) else node
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(node.value)  # as it is written: the key 1.50 is not "1.5"
    shown = repr(node.value) if isinstance(node, yaml.ScalarNode) else "a list or mapping"
    raise _Refused(f"{shown} cannot be a key", node.start_mark, "quote it if it is text")


def _scalar_value(node: yaml.ScalarNode) -> Any:
    text: str = node.value
    tag = node.tag.removeprefix(_TAG)
    if tag not in ("str", *_IMPLICIT):
        raise _Refused(f"the tag {tag!r} is not supported", node.start_mark, "remove it")
    if tag in ("str", "merge"):
        # JSON escapes what is beyond U+FFFF as two halves, which YAML's escapes leave apart.
        if not text.isascii():
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        return text
    if tag == "null":
        return None
    if tag == "bool" and text.lower() in _TRUE + _FALSE:
        return text.lower() in _TRUE
    if tag == "int" and re.fullmatch(r"[-+]?[0-9]{1,100}", text):
        return int(text)
    if tag == "float":
        with suppress(ValueError):
            if math.isfinite(number := float(text)):
                return WrittenFloat(number, text)
    raise _Refused(f"{text!r} does not match its tag {tag!r}", node.start_mark)


def objects(documents: list[Document]) -> Iterator[tuple[Document, FieldPath, dict[str, Any]]]:
    """Each object with its document and its path there; of a List, as kubectl writes it, the items.

    What is no mapping counts as an empty one.
    """
    for document in documents:
        data = document.data if isinstance(document.data, dict) else {}
        items = data.get("items")
        if items and str(data.get("kind")).endswith("List") and isinstance(items, list):
            for index, item in enumerate(items):
                yield document, ("items", index), item if isinstance(item, dict) else {}
        else:
            yield document, (), data


_BLOCK: Final = re.compile(r"^( *+)[^\n#]*[:-] [|>][-+\d]*\n(?:(?:\1 ++.*| *+)\n)+", re.MULTILINE)
"""A block of text, such as a script, or the settings in a ConfigMap."""
_PLACEHOLDER: Final = re.compile(
    r"^[ \t]*(?P<line>\{\{-[^{}\n]*\}\})|(?:^|[{,]|- )[ \t]*[\w./]{0,80}?"
    r"(?:name|namespace|image|gpu|cpu|memory|[rR]eplicas|numNodes): "
    r"[^#\n,}\]{]*?(?P<part>\{\{[^{}\n]*\}\}|\$\{\w+\}|<[A-Z][A-Z_ -]+>)",
    re.MULTILINE,
)
"""A part that a template leaves open, in a field where Kubernetes expands nothing."""


def refuse_template(text: str | bytes, source: str = "") -> None:
    """Refuse an unfilled template of Helm, envsubst or the like, whatever else is wrong in it.

    Raises:
        SpecError: it is one.
    """
    manifest = text.decode(errors="replace") if isinstance(text, bytes) else text
    # Scripts have ${NAME} of their own. Their lines stay, so that the line of the message is right.
    manifest = _BLOCK.sub(lambda block: "\n" * block[0].count("\n"), manifest + "\n")
    if match := _PLACEHOLDER.search(manifest):
        part, line = match["line"] or match["part"], manifest.count("\n", 0, match.end()) + 1
        step = "`helm template`" if part.startswith("{{") else "such as by `envsubst < FILE`"
        message = f"{part}: this is a template that is not filled in"
        problem = invalid((), message, f"fill it in first, {step}", line=line, column=1)
        raise SpecError([problem], source)


def parse(text: str | bytes, source: str = "") -> Document:
    """The one document in a text; its data is None if the text is empty.

    Raises:
        SpecError: not UTF-8, not YAML, too large, several documents, or what the module refuses.
    """
    return only(parse_all(text, source), source)


def only(documents: list[Document], source: str = "") -> Document:
    """The one of these documents; without data where there are none.

    Raises:
        SpecError: there are several.
    """
    if len(documents) > 1:
        line = documents[1].line
        message = f"a second document starts in line {line}"
        step = "one file describes one job, so move it to another file"
        raise SpecError([invalid((), message, step, line=line, column=1)], source)
    return documents[0] if documents else Document(None, source)


def parse_all(text: str | bytes, source: str = "") -> list[Document]:
    """All documents in a text that are not empty, as kubectl reads a file with `---` between them.

    Raises:
        SpecError: see parse.
    """
    decoded = _decode(text, source)
    try:
        return list(_documents(decoded, source))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = _place(mark) if mark else (0, 0)
        problem = invalid((), *_plain(error), line=line, column=column)
        raise SpecError([problem], source) from None
    except yaml.reader.ReaderError as error:
        before = decoded[: error.position]
        line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
        char = ascii(chr(error.character))
        message = f"the character {char} is not allowed in YAML"
        step = "write it as an escape in quotes"
        raise SpecError([invalid((), message, step, line=line, column=column)], source) from None


def _documents(text: str, source: str) -> Iterator[Document]:
    loader = _Loader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            # Nothing but comments between two `---`, as templates leave it.
            if node is None or (node.tag == _TAG + "null" and not node.value):
                continue
            builder = _Builder()
            data = builder.build(node, ())
            yield Document(data, source, builder.keys, builder.values, node.start_mark.line + 1)
    finally:
        loader.dispose()


def _decode(text: str | bytes, source: str) -> str:
    if len(text) > MAX_BYTES:
        message = f"longer than the {MAX_BYTES} bytes of a Kubernetes object"
        raise SpecError([invalid((), message, "specify another file")], source)
    if isinstance(text, str):
        return text.removeprefix("\ufeff")
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = text[: error.start].count(b"\n") + 1
        message, step = f"byte 0x{text[error.start]:02x} is not UTF-8", "save the file as UTF-8"
        if text.startswith(b"PK\3\4"):  # how a zip begins
            message, step = (
                "an archive, such as a job's record, which status, logs and why read",
                "",
            )
        raise SpecError([invalid((), message, step, line=line)], source) from None


_PLAIN: Final = {
    "mapping values are not allowed here": (
        "an unexpected ':'",
        "check the indentation, or quote the text if the ':' belongs to it",
    ),
    "could not find expected ':'": (
        "a line without 'key: value'",
        "check the indentation, or quote text that spans lines",
    ),
    "found unexpected end of stream": ("a quote is never closed", ""),
    "expected ',' or": ("a bracket is never closed, or a ',' is missing", ""),
    "expected the node content, but found '<stream end>'": ("a bracket is never closed", ""),
    "found undefined alias": (
        "an alias (*name) without its anchor (&name)",
        "quote a text that starts with '*'",
    ),
    "second occurrence": ("a duplicate anchor (&name)", "give each another name"),
    "expected <block end>, but found": (
        "this does not belong here",
        "align it with the lines around it, or quote the whole text",
    ),
}
"""How a message of PyYAML begins -> what is wrong for the file's author, and the next step."""


def _plain(error: yaml.MarkedYAMLError) -> tuple[str, str]:
    """What is wrong in the words of the file's author, and the next step."""
    problem = error.problem or "not YAML"
    if isinstance(error, _Refused):
        return problem, error.next_step
    if "'\\t'" in problem:
        return "a tab", "indent YAML with spaces"
    plain = (texts for begin, texts in _PLAIN.items() if problem.startswith(begin))
    return next(plain, (f"not YAML: {problem}", ""))
