"""The documentation is executed: what a page shows is what happens.

In README*.md and docs/**/*.md

- a ```console block is a terminal session: each line after `$ ` runs in one folder for the whole
  page, and what it prints must match what the page shows, where `...` stands for anything;
- a ```python block runs in that folder, in a fresh interpreter, and must end with exit code 0;
- a ```yaml block that starts with `name:` is a job.yaml: it must validate, and is written to
  job.yaml in the page's folder, as any block under <!-- file: NAME --> is written to NAME;
- a block under <!-- shows: FILE --> is that file of the repository, to the letter (`make
  docs` writes it anew);
- <!-- not run: REASON --> on the line before a block says why it is only shown;
- a link to a file of the repository must lead somewhere.
"""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("README*.md"), *ROOT.glob("CONTRIBUTING.md"), *ROOT.glob("docs/**/*.md")]
)
BLOCK = re.compile(
    r"(?:^<!-- (?P<note>not run|file|shows): (?P<text>[^\n]+?) -->\n)?"
    r"^```(?P<language>\w+)[^\n]*\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(?:#[^)]*)?\)")
MATCH = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks(page: Path) -> list[re.Match[str]]:
    return list(BLOCK.finditer(page.read_text()))


def runs_something(page: Path) -> bool:
    return any(
        block["note"] != "not run" and block["language"] in {"console", "python", "yaml"}
        for block in blocks(page)
    )


def trains(page: Path) -> bool:
    text = page.read_text()
    return "k8sjob run" in text or "torch" in text


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


class Terminal:
    """The reader's folder and shell."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        bin_folder = Path(sys.executable).parent
        self.env = {
            **{k: v for k, v in os.environ.items() if k not in {"CI", "FORCE_COLOR"}},
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "K8SJOB_STATE": str(folder.parent / "state"),
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
            "COLUMNS": "100",
        }

    def run(self, argv: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv,
            check=False,
            cwd=self.folder,
            env=self.env,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=300,
        )

    def console(self, body: str, where: str) -> None:
        for session in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
            command, _, expected = session.partition("\n")
            seen = self.run(["bash", "-c", command]).stdout
            if expected.strip():
                ok = doctest.OutputChecker().check_output(expected, seen, MATCH)
                assert ok, f"{where}: $ {command}\nexpected:\n{expected}\nseen:\n{seen}"


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.dist if trains(page) else ())
        for page in PAGES
        if runs_something(page)
    ],
    ids=name,
)
def test_what_a_page_shows_is_what_happens(page, tmp_path):
    folder = tmp_path / "reader"
    folder.mkdir()
    for example in ("manifests",):  # pages speak from the checkout's root
        (folder / example).symlink_to(ROOT / example)
    terminal = Terminal(folder)
    for block in blocks(page):
        line = page.read_text()[: block.start()].count("\n") + 1
        where, body, language = f"{name(page)}:{line}", block["body"], block["language"]
        if block["note"] == "not run":
            continue
        if block["note"] == "shows":
            assert body == (ROOT / block["text"]).read_text(), where
        elif block["note"] == "file":
            (folder / block["text"]).write_text(body)
        elif language == "console":
            terminal.console(body, where)
        elif language == "yaml" and body.startswith("name:"):
            (folder / "job.yaml").write_text(body)
            done = terminal.run(["k8sjob", "validate", "job.yaml"])
            assert done.returncode == 0, f"{where}: {done.stdout}"
        elif language == "python":
            done = terminal.run([sys.executable, "-W", "error", "-c", body])
            assert done.returncode == 0, f"{where}: {done.stdout}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    broken = [
        target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()
    ]
    assert not broken
