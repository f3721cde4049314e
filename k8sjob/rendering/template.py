"""The jinja2 templates: where they are, and how values get into them.

A template holds only layout. Every value passes through a filter that makes it safe for the
language it is written in, and one that does not is an error, not a hole: see `_only_written`.
"""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from k8sjob.errors import RenderError
from k8sjob.files import own_cache_folder

if TYPE_CHECKING:
    import jinja2

_HERE: Final = Path(__file__).resolve().parent


class _Written(str):
    """Text that a filter has made safe for its place in a template."""

    __slots__ = ()


def templates_dir() -> Path:
    """The folder of the templates: inside the package in a wheel, at the top of a checkout."""
    packaged = _HERE.parent / "_templates"
    return packaged if packaged.is_dir() else _HERE.parents[1] / "templates"


def fill(template: str, folder: Path | None = None, **values: Any) -> str:
    """The text of a template with its values.

    Args:
        template: its file, as "pod.yaml.j2".
        folder: where it is looked for first; None: only in templates_dir().
        values: what it writes.

    Raises:
        RenderError: the template does not fit the values, as where it names one that is missing.
    """
    import jinja2  # noqa: PLC0415 - a fifth of a command's start-up, which most commands save

    try:
        return _environment(folder).get_template(template).render(values)
    except jinja2.TemplateError as error:
        raise RenderError(f"{templates_dir() / template}: {error}") from error


@cache
def _environment(folder: Path | None = None) -> jinja2.Environment:
    import jinja2  # noqa: PLC0415 - see fill

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*filter(None, [folder]), templates_dir()]),
        bytecode_cache=_bytecode_cache(),
        undefined=jinja2.StrictUndefined,
        finalize=_only_written,
        autoescape=False,  # noqa: S701 - no HTML; the filters below do what escaping does there
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        scalar=_scalar, tree=_tree, note=_note, word=_word, argv=_argv, shell=_shell
    )
    return environment


def _bytecode_cache() -> jinja2.BytecodeCache | None:
    """Compiled templates, in a folder of this user's: compiling takes longer than rendering.

    A failed write must not fail the command: without the cache it is only slower.
    """
    import jinja2  # noqa: PLC0415 - see fill

    if sys.dont_write_bytecode or (folder := own_cache_folder()) is None:
        return None

    class Cache(jinja2.FileSystemBytecodeCache):
        def dump_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
            with suppress(OSError):
                super().dump_bytecode(bucket)

    # The options and the finalizer above are compiled in, and what jinja2's compiler makes fits
    # its own release: another version of either has files of its own.
    mtimes = [Path(file).stat().st_mtime_ns for file in (__file__, jinja2.compiler.__file__)]
    return Cache(str(folder), f"{sys.implementation.cache_tag}-{mtimes[0]}-{mtimes[1]}-%s.jinja")


def _only_written(value: Any) -> Any:
    if not isinstance(value, _Written):
        raise RenderError(f"a template writes {value!r} without a filter; add `| scalar`")
    return value


def _scalar(value: Any) -> _Written:
    """A string, number, boolean or null, in YAML."""
    from k8sjob.yamldoc.writing import scalar  # noqa: PLC0415 - a .dockerignore needs no YAML

    return _Written(scalar(value))


def _tree(value: Any, indent: int) -> _Written:
    """A mapping or list as a YAML block, every leaf by the same rules as a scalar."""
    from k8sjob.yamldoc.writing import dump  # noqa: PLC0415 - as above

    return _Written(textwrap.indent(dump(value), " " * indent).removesuffix("\n"))


def _note(value: str) -> _Written:
    """Text within a comment, which ends with its line."""
    return _Written("".join(c if c.isprintable() else "?" for c in value))


def _word(value: str) -> _Written:
    """One word of a Dockerfile instruction: nothing in it is expanded, quoted or continued."""
    if not value or not all(c.isascii() and (c.isalnum() or c in "-+./:=@_~,") for c in value):
        raise RenderError(
            f"{value!r} cannot be written in a Dockerfile; use letters, digits and -+./:=@_~,"
        )
    return _Written(value)


def _argv(value: list[str]) -> _Written:
    """Exec form, which neither the builder nor a shell expands; ASCII, on one line."""
    return _Written(json.dumps(value))


def _shell(value: list[str]) -> _Written:
    """Arguments of a shell command in a RUN instruction."""
    for argument in value:
        if not argument.isprintable() or "\\" in argument:
            raise RenderError(f"{argument!r} has characters that a Dockerfile would act on")
    return _Written(shlex.join(value))
