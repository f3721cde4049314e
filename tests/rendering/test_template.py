"""Where templates are found, and that no value reaches one unfiltered."""

import sys
from pathlib import Path

import jinja2
import pytest

from k8sjob.errors import RenderError
from k8sjob.rendering import template
from k8sjob.rendering.template import templates_dir

ROOT = Path(__file__).resolve().parents[2]


def test_a_checkout_has_its_templates_at_the_top():
    assert templates_dir() == ROOT / "templates"


def test_a_value_without_a_filter_is_an_error():
    environment = template._environment()
    with pytest.raises(RenderError, match="without a filter"):
        environment.from_string("name: {{ name }}").render(name="x")
    assert environment.from_string("name: {{ name | scalar }}").render(name="on") == 'name: "on"'


def test_a_value_that_is_missing_is_an_error():
    with pytest.raises(RenderError, match=r"pytorchjob\.yaml\.j2: 'spec' is undefined"):
        template.fill("pytorchjob.yaml.j2")


def test_a_nested_value_is_laid_out_as_a_block():
    text = template._environment().from_string("a:\n{{ value | tree(2) }}\nb: 1")
    value = {"x": ["on", {"y": "é\n"}], "z": {}}
    assert text.render(value=value) == 'a:\n  x:\n    - "on"\n    - "y": "\\xe9\\n"\n  z: {}\nb: 1'


def test_templates_hold_no_defaults_and_no_arithmetic():
    environment = jinja2.Environment(autoescape=False)
    forbidden = (
        jinja2.nodes.BinExpr,
        jinja2.nodes.UnaryExpr,
        jinja2.nodes.Assign,
        jinja2.nodes.CondExpr,
    )
    logic = (jinja2.nodes.And, jinja2.nodes.Or, jinja2.nodes.Not)
    for path in sorted(templates_dir().rglob("*.j2")):
        tree = environment.parse(path.read_text())
        found = [node for node in tree.find_all(forbidden) if not isinstance(node, logic)]
        assert found == [], path
        used = {node.name for node in tree.find_all(jinja2.nodes.Filter)}
        assert used <= {"scalar", "tree", "word", "argv", "shell", "indent", "note"}, path


def test_compiled_templates_are_cached_where_only_the_user_can_write(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    folder = tmp_path / "k8sjob"
    template._environment.cache_clear()
    assert template._environment().get_template("Dockerfile.j2")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len([*folder.glob("*.jinja")]) == 1
    for mode in (0o770, 0o702):
        folder.chmod(mode)
        assert template._bytecode_cache() is None
    folder.chmod(0o700)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert template._bytecode_cache() is None
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert template._bytecode_cache() is None
    template._environment.cache_clear()


def test_a_relative_folder_is_no_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", ".cache")
    assert template._bytecode_cache() is None
    assert not list(tmp_path.iterdir())
