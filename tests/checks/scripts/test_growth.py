"""Lint of large and odd texts: its work grows as they do, or it says that it gives up."""

import gc
import json
import runpy
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from k8sjob.checks.lint import Severity, lint_script
from k8sjob.checks.scripts import modules
from k8sjob.checks.scripts.facts import Script
from k8sjob.checks.scripts.job_draft import draft, find_script
from k8sjob.cli.program import program
from k8sjob.errors import SpecError

HEAD = (
    "import accelerate, glob, keras, os, subprocess, torch\nimport torch.distributed as dist\n"
    "from torch.nn.parallel import DistributedDataParallel as DDP\n"
    "from torch.utils.data.distributed import DistributedSampler\n"
    "dist.init_process_group('gloo')\nrank = dist.get_rank()\n"
)
SHAPES = runpy.run_path(str(Path(__file__).resolve().parents[3] / "bench/growth.py"))["SCRIPTS"]
REFUSED = {"attribute-calls", "attribute-deep", "imports-dotted", "number"}
"""What Python, or lint, does not parse in this length."""


def calls(text):
    """How many functions are called for a script, of Python and of C."""
    number = 0

    def count(frame, event, arg):
        nonlocal number
        number += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        found = lint_script(text, "main.py")
    finally:
        sys.setprofile(None)
    assert not {"script-syntax", "script-unfinished"} & {finding.id for finding in found}
    return number


@pytest.mark.parametrize("name", sorted(SHAPES.keys() - REFUSED))
def test_the_work_for_a_script_grows_as_it_does(name):
    small, large = (SHAPES[name](size) for size in (2_000, 8_000))
    # Some work grows until a bound is reached: 64 values, or conditions.
    assert calls(large) / calls(small) < 1.7 * len(large) / len(small)


def test_every_way_to_a_line_counts():
    ways = ["def save():\n    torch.save(m, 'm.pt')\n", *["if rank == 0: save()\n"] * 300]
    for text, ids in ((ways, []), ([*ways, "save()\n"], ["save-on-every-rank"])):
        found = lint_script(f"{HEAD}{''.join(text)}dist.destroy_process_group()\n", "main.py")
        assert [finding.id for finding in found] == ids


def test_the_bases_of_classes_are_looked_at_once():
    bases = "".join(f"class A{i + 1}({f'A{i}, ' * 12}): pass\n" for i in range(20))
    text = f"{HEAD}class A0: pass\n{bases}if rank == 0: A20().f()\n"  # 12 ** 8 ways of old
    assert calls(text) < 100_000


def test_a_message_shows_the_beginning_of_a_long_condition():
    terms = " and ".join(["rank == 0"] * 500)
    found = lint_script(f"{HEAD}if {terms}:\n{'    dist.barrier()' + chr(10) * 1}", "main.py")
    shown = [finding.message for finding in found if finding.id == "collective-on-one-rank"]
    assert shown
    assert all(len(message) < 600 and "...`" in message for message in shown)


LATE = HEAD + "torch.save(m, 'm.pt')\n"
"""It has one finding."""


def test_a_script_that_takes_too_long_is_an_error(monkeypatch, tmp_path):
    clock = iter(range(1_000_000))
    monkeypatch.setattr(modules.time, "thread_time", lambda: next(clock))
    monkeypatch.setattr(modules, "TIME_LIMIT", 20)
    (tmp_path / "main.py").write_text(LATE)
    result = CliRunner().invoke(program, ["lint", str(tmp_path / "main.py")], standalone_mode=False)
    reason = "reading the script took more than 20 s of CPU time"
    assert f"error[script-unfinished]: not checked further: {reason}" in result.output
    assert result.return_value == 1
    monkeypatch.setattr(modules, "TIME_LIMIT", -1)
    with pytest.raises(
        SpecError,
        match="reading the script took more than -1 s of CPU time; specify a smaller script",
    ):
        draft(tmp_path / "main.py", tmp_path)


def test_findings_before_the_limit_are_kept(monkeypatch):
    text = "import torch\ntorch.distributed.init_process_group('mpi')\n"

    def nested(script):
        raise RecursionError

    monkeypatch.setattr("k8sjob.checks.scripts.collectives._one_sided", nested)
    unfinished, *others = lint_script(text)
    assert unfinished.message == "not checked further: it is nested too deeply"
    assert (unfinished.id, unfinished.severity) == ("script-unfinished", Severity.ERROR)
    assert [finding.id for finding in others] == ["backend-not-built-in", "group-not-destroyed"]


def test_what_python_parses_in_quadratic_time_and_memory_is_refused():
    for text in ("import a" + ".b" * 200_000, "a" + ".b" * 50_000):
        (finding,) = lint_script(text)
        assert finding.id == "script-unfinished"
        assert "a name of more than 1000 parts" in finding.message
    refused = lint_script("x = f'" + "{a}" * 200_000 + "'\n")
    if sys.version_info < (3, 12):
        assert "an f-string of more than 1000 values" in refused[0].message
    assert lint_script("x = f'" + "{{a}}" * 20_000 + "'\n") == []  # no value
    assert lint_script("x = '" + "{a}" * 20_000 + "'\ny = 'a b." + "c" * 500_000 + "'\n") == []


@pytest.mark.parametrize("number", ["1e999", f"0x{'f' * 5000}"], ids=["infinite", "long"])
def test_odd_numbers_are_no_error_of_lint(number):
    found = lint_script(f"{HEAD}f(rank={number})\nif int({number}): dist.barrier()\n", "main.py")
    assert "script-syntax" not in {finding.id for finding in found}
    assert lint_script(f"{HEAD}f(rank='{'9' * 5000}')\ndist.destroy_process_group()\n") == []


def test_a_set_that_is_made_of_itself_is_no_error_of_lint():
    text = "import os\ns = set(os.listdir('.'))\ns = s | {'a'}\nx = list(s)\n"
    assert lint_script(text) == []


def test_the_code_of_a_notebook_is_bounded(tmp_path):
    cells = [{"cell_type": "code", "source": ["x = 1\n" * 200_000]}]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    with pytest.raises(SpecError, match="its code is longer than 1048576 bytes"):
        draft(tmp_path / "a.ipynb", tmp_path)


def test_a_folder_of_scripts_is_searched_by_their_own_imports(tmp_path, monkeypatch):
    names = [f"m{number}" for number in range(20)]
    for name in names:
        imports = "".join(f"import {other}\n" for other in names)
        (tmp_path / f"{name}.py").write_text(f"import torch\n{imports}print(torch)\n")
    reads, read = [], modules.content
    monkeypatch.setattr(modules, "content", lambda file: reads.append(file) or read(file))
    with pytest.raises(SpecError, match="several training scripts"):
        find_script(tmp_path)
    assert sorted(file.stem for file in reads) == sorted(names)  # and no module that they import
    monkeypatch.setattr(modules, "TIME_LIMIT", -1)
    with pytest.raises(SpecError, match="took more than -1 s"):
        find_script(tmp_path)


def test_local_modules_are_bounded_by_their_length(tmp_path):
    text = "import torch\n" + "# long\n" * 150_000
    names = [f"m{number}" for number in range(12)]
    for name in names:
        (tmp_path / f"{name}.py").write_text(text[: modules.MAX_BYTES - 100])
    entry = modules.parse_module("".join(f"import {name}\n" for name in names), "main.py")
    assert len(modules.program(entry, [tmp_path])) == 1 + 9


def test_parsed_modules_are_bounded_by_their_length(monkeypatch):
    monkeypatch.setattr(modules, "_MAX_PROGRAM", 1000)
    module = modules.parse_module("x = 1", "main.py")
    for number in range(5):
        assert modules.parse_module("x = 1", "main.py") is module
        modules.parse_module(f"{number}\n" * 150, f"{number}.py")
    assert modules.parse_module("x = 1", "main.py") is not module


def test_a_script_is_freed_before_the_next_is_read():
    gc.collect()
    for number in range(12):
        lint_script(f"import torch\nx = sorted([{number}])\n")
    # By type(): an instance check asks torch's deprecated names for their class.
    assert sum(type(alive) is Script for alive in gc.get_objects()) <= 3
    with pytest.raises(KeyError), modules.time_limit(), modules.time_limit():
        raise KeyError
    assert gc.isenabled()
