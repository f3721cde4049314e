"""Pictures of a terminal: `python docs/generate_picture.py` writes docs/images/answers.svg.

These are the first answers in README, which the tests run. With the argument `run` it also writes
docs/images/run.svg, the demo in the middle of its training, for which it needs tmux.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "images"
README = ROOT / "README.md"
COLUMNS, ROWS = 108, 32
COMMAND = "k8sjob run --fresh manifests/digits-ddp/job.yaml"
MOMENT = "epoch 18/20"  # when the picture is taken


def tmux(*arguments: str) -> str:
    """Run tmux and return what it prints."""
    argv = ["tmux", "-L", "k8sjob-picture", *arguments]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def screen() -> str:
    """The screen in the middle of the training, with its colors as escape sequences."""
    with tempfile.TemporaryDirectory() as state:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = ("env", "-u", "CI", f"PATH={path}", f"K8SJOB_STATE={state}", "TERM=xterm-256color")
        size = ("-x", str(COLUMNS), "-y", str(ROWS))
        shell = ("bash", "--norc", "-c", f"echo '$ {COMMAND}'; {COMMAND}; sleep 60")
        tmux("new-session", "-d", *size, "-c", str(ROOT), *env, *shell)
        try:
            deadline = time.monotonic() + 180
            while MOMENT not in tmux("capture-pane", "-p"):
                if time.monotonic() > deadline:
                    raise SystemExit(f"no {MOMENT!r} on the screen:\n{tmux('capture-pane', '-p')}")
                time.sleep(0.1)
            return tmux("capture-pane", "-p", "-e")
        finally:
            tmux("kill-server")
            time.sleep(6)  # the job's processes leave by themselves when their parent is gone


def answers() -> Text:
    """The console blocks of README's first section, colored."""
    section = README.read_text(encoding="utf-8").split("\n## ")[1]
    blocks = re.findall(r"^```console\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    text = Text("\n".join(blocks).rstrip("\n"))
    text.highlight_regex(r"(?m)^\$ .*", "bold")
    text.highlight_regex(r"(?m)^(why:|differs:)|warning\[[\w-]+\]", "red")
    text.highlight_regex(r"(?m)^ *next:", "green")
    return text


def picture(text: Text, title: str) -> str:
    """A terminal that shows this text, as SVG."""
    console = Console(
        width=COLUMNS, record=True, file=io.StringIO(), force_terminal=True, color_system="256"
    )
    console.print(text)
    svg = console.export_svg(title=title, theme=MONOKAI, unique_id=title.replace(" ", "-"))
    # Fonts from the network have no place in a file that must look the same anywhere.
    head, _, rest = svg.partition("@font-face")
    svg = head + rest[rest.rindex("@font-face") :].partition("}")[2] if rest else svg
    return svg.replace("Fira Code", "monospace")


if __name__ == "__main__":
    (FOLDER / "answers.svg").write_text(picture(answers(), "k8sjob"), encoding="utf-8")
    if "run" in sys.argv:
        shot = picture(Text.from_ansi(screen().rstrip("\n")), "k8sjob run")
        (FOLDER / "run.svg").write_text(shot, encoding="utf-8")
