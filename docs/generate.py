"""Writes docs/reference/spec.md from the spec's own JSON Schema: `python docs/generate.py`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from k8sjob.spec import schema
from k8sjob.yamldoc import flow

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).parent / "reference" / "spec.md"

HEAD = """\
<!-- Written by docs/generate.py from the spec's JSON Schema; change the fields there. -->
# job.yaml, field by field

All fields of a job.yaml, which is one YAML document. Keys that are not listed here are
[errors](errors.md). `k8sjob validate` checks a file, `k8sjob schema` prints the JSON Schema for
editors.

- **Quantities** (cores, bytes) are written as in Kubernetes: `500m`, `4`, `8Gi`, `1.5T`. They are
  normalized: `1024Mi` becomes `1Gi`, `0.5` cores become `500m`.
- **Times** are `90s`, `10m`, `1h30m`, `2d`, or a whole number of seconds.
- **Text** may be written as a number (`PORT: 8080`) and is kept unchanged. Quote `on`, `off`, `yes`
  and `no`: YAML reads them as booleans, which are refused as text.
- **null** is allowed for fields whose default is `null`, and means the same as no key.
"""

WORDS = {
    "boolean": "true or false",
    "integer": "whole number",
    "number": "number",
    "object": "mapping",
    "string": "text",
}


def page() -> str:
    """The whole page."""
    described = schema()
    parts = {"": described, **_parts(described, described)}
    first = {id(part): at for at, part in reversed(parts.items())}  # each once
    return HEAD + "".join(_section(at, parts[at]) for at in parts if first[id(parts[at])] == at)


def _parts(root: dict[str, Any], part: dict[str, Any], base: str = "") -> dict[str, dict[str, Any]]:
    """The parts below a part, by their path in a job.yaml, in its order."""
    found: dict[str, dict[str, Any]] = {}
    for name, field in part["properties"].items():
        for kind, is_list in _references(field):
            path = f"{base}{name}{'[]' if is_list else ''}"
            below = root["$defs"][kind]
            found[path] = below
            found |= _parts(root, below, f"{path}.")
    return found


def _references(field: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """Names of the parts that a field holds, and whether in a list."""
    for option in (field, *field.get("anyOf", ()), *field.get("oneOf", ())):
        for each, is_list in ((option, False), (option.get("items", {}), True)):
            if "$ref" in each:
                yield each["$ref"].rpartition("/")[2], is_list


def _section(at: str, part: dict[str, Any]) -> str:
    lines = [
        f"\n## {at or 'The job'}\n",
        part["description"].split("\n\n")[0].replace("\n", " ") + "\n",
        "| Field | Type | Default | Meaning | Example |",
        "|---|---|---|---|---|",
    ]
    required = part.get("required", ())
    for name, field in part["properties"].items():
        default = "required" if name in required else _default(field)
        examples = "<br>".join(_code(example) for example in field["examples"])
        cells = (f"`{name}`", _measured(field), default, field["description"], examples)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _measured(field: dict[str, Any]) -> str:
    """A field's type with its unit."""
    unit = field.get("unit")
    if unit in ("bytes", "cores"):
        return f"quantity of {unit}"
    kind = _type(field)
    if kind == "number":
        return f"number ({unit})"
    return "time" if unit == "time" else kind + (f" of {unit}" if unit else "")


def _default(field: dict[str, Any]) -> str:
    return "as below" if "$ref" in field else _code(field.get("default"))


def _type(field: dict[str, Any]) -> str:
    options = field.get("anyOf") or field.get("oneOf")
    if options:
        names = [_type(option) for option in options if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(names))
    if "const" in field or "enum" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    kind = "object" if "$ref" in field else field["type"]
    if kind == "array":
        return f"list of {_type(field['items'])}"
    return WORDS[kind if isinstance(kind, str) else kind[0]]  # several: text that may be a number


def _code(value: Any) -> str:
    return f"`{value if isinstance(value, str) else flow(value)}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
