"""The pages of the documentation, and a reader who runs what they show.

In README*.md and docs/**/*.md

- a ```console block is a terminal session: each line after `$ ` runs in one folder for the whole
  page, and what it prints must match what the page shows, where `...` stands for anything;
- a ```python block runs in that folder, in a fresh interpreter, and must end with exit code 0;
- a ```yaml block that starts with `name:` is a job.yaml: it must validate, with its script in
  place, and is written to job.yaml in the page's folder, as any block under <!-- file: NAME --> is
  written to NAME;
- a block under <!-- shows: FILE --> is that file of the repository, or parts of it (`make docs`
  writes it, tests/docs compares it);
- a Korean page (.ko.md) has the same blocks as the English one; only the English one is run;
- a ```console block under <!-- recorded: NAME --> is run beside the cluster of
  tests/observe/recorded/NAME.json;
- <!-- needs: a cluster --> on the line before a block: it is run where there is one;
- <!-- not run: REASON --> on the line before a block says why it is only shown.
"""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

from clusters import kubeconfig
from hostile import Recorded
from observed import RECORDED

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [*ROOT.glob("README*.md"), *ROOT.glob("CONTRIBUTING.md"), *ROOT.glob("docs/**/*.md")]
)
KOREAN = [page for page in PAGES if page.name.endswith(".ko.md")]
BLOCK = re.compile(
    r"(?:^<!-- (?P<note>not run|needs|file|shows|recorded): (?P<text>[^\n]+?) -->\n)?"
    r"^```(?P<language>\w+)[^\n]*\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
MATCH = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks(page):
    """The blocks of code of a page."""
    return list(BLOCK.finditer(page.read_text()))


def name(page):
    """A page as it is called in messages."""
    return str(page.relative_to(ROOT))


class Reader:
    """Runs the blocks of a page, in a folder of its own.

    Args:
        folder: is created.
        env: variables that the reader has set.
        stand_ins: a word of the page -> the text that replaces it.

    Attributes:
        state: where jobs on this machine are kept.
    """

    def __init__(self, folder, env=None, stand_ins=None):
        self.folder, self.stand_ins = folder, stand_ins or {}
        self.state = folder.parent / "state"
        folder.mkdir()
        (folder / "manifests").symlink_to(ROOT / "manifests")  # pages run in the checkout's root
        kubeconfig_file = folder.parent / "no-kubeconfig"
        variables = {**os.environ, "KUBECONFIG": str(kubeconfig_file), **(env or {})}
        self.env = {
            **{k: v for k, v in variables.items() if k not in {"CI", "FORCE_COLOR"}},
            "PATH": f"{Path(sys.executable).parent}:{variables['PATH']}",
            "K8SJOB_STATE": str(self.state),
            "OMP_NUM_THREADS": "1",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # they take half of its time
            "NO_COLOR": "1",
            "COLUMNS": "100",
        }

    def follow(self, page, *, needs=False):
        """Run the blocks of a page; with `needs` also those that need more than this machine."""
        for block in blocks(page):
            line = page.read_text()[: block.start()].count("\n") + 1
            if block["note"] != "not run" and (needs or block["note"] != "needs"):
                self._block(block, f"{name(page)}:{line}")

    def _block(self, block, where):
        body, language = block["body"], block["language"]
        for word, stand_in in self.stand_ins.items():
            body = body.replace(word, stand_in)
        if block["note"] == "shows":
            return
        if block["note"] == "file":
            (self.folder / block["text"]).write_text(body)
        elif block["note"] == "recorded":
            with Recorded(RECORDED[block["text"]]).served() as server:
                file = kubeconfig(self.folder.parent, server.url)
                self._console(body, where, KUBECONFIG=str(file))
        elif language == "console":
            self._console(body, where)
        elif language == "yaml" and body.startswith("name:"):
            (self.folder / "job.yaml").write_text(body)
            if script := re.search(r"\bscript: ([\w./-]+)", body):  # the reader's own
                (self.folder / script[1]).touch()
            done = self._run(["k8sjob", "validate", "job.yaml"])
            assert done.returncode == 0, f"{where}: {done.stdout}"
        elif language == "python":
            done = self._run([sys.executable, "-W", "error", "-c", body])
            assert done.returncode == 0, f"{where}: {done.stdout}"

    def _run(self, argv, **env):
        return subprocess.run(
            argv,
            check=False,
            cwd=self.folder,
            env=self.env | env,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=300,
        )

    def _console(self, body, where, **env):
        for session in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
            command, _, expected = session.partition("\n")
            seen = self._run(["bash", "-c", command], **env).stdout
            if expected.strip():
                # `...` as the first line also stands for no line.
                expected = re.sub(r"\A\.\.\.\n", "...", expected)
                ok = doctest.OutputChecker().check_output(expected, seen, MATCH)
                assert ok, f"{where}: $ {command}\nexpected:\n{expected}\nseen:\n{seen}"
