"""The drawings of the pages: writes docs/images/architecture.svg and others."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent / "images"
COLORS = {"code": "#dbeafe", "file": "#fef3c7", "outside": "#e5e7eb"}


class Drawing(NamedTuple):
    """What a drawing shows.

    Attributes:
        title: in words.
        size: width and height.
        boxes: name: x, y, width, height, second line, color.
        arrows: from, to, side of the one, side of the other, label.
        frames: x, y, width, height, label.
    """

    title: str
    size: tuple[int, int]
    boxes: dict[str, tuple[int, int, int, int, str, str]]
    arrows: list[tuple[str, str, str, str, str]]
    frames: list[tuple[int, int, int, int, str]]


DRAWINGS = {
    "architecture": Drawing(
        "From a script to the causes and curves of its job",
        (900, 284),
        {
            "train.py": (24, 48, 150, 56, "or job.yaml", "file"),
            "lint, prove": (206, 48, 150, 56, "find mistakes", "code"),
            "run": (388, 48, 150, 56, "the same job, here", "code"),
            "submit": (570, 48, 150, 56, "after a dry run", "code"),
            "registry": (766, 48, 122, 56, "code on the base", "outside"),
            "PyTorchJob": (570, 200, 150, 56, "or JobSet, TrainJob, Job", "outside"),
            "Pods": (388, 200, 150, 56, "started by the operator", "outside"),
            "watch, why, ui": (206, 200, 150, 56, "progress, causes", "code"),
            "record": (24, 200, 150, 56, "outlives the job", "file"),
        },
        [
            ("train.py", "lint, prove", "right", "left", ""),
            ("lint, prove", "run", "right", "left", ""),
            ("run", "submit", "right", "left", ""),
            ("submit", "registry", "right", "left", "push"),
            ("submit", "PyTorchJob", "bottom", "top", "create"),
            ("registry", "PyTorchJob", "bottom", "right", "digest"),
            ("PyTorchJob", "Pods", "left", "right", ""),
            ("Pods", "watch, why, ui", "left", "right", ""),
            ("watch, why, ui", "record", "left", "right", ""),
        ],
        [
            (8, 12, 728, 108, "your machine"),
            (372, 164, 364, 108, "Kubernetes"),
            (8, 164, 356, 108, "any machine"),
        ],
    ),
    "packages": Drawing(
        "The packages of k8sjob",
        (900, 450),
        {
            "job.yaml": (24, 48, 100, 56, "and main.py", "file"),
            "spec": (158, 48, 116, 56, "typed, validated", "code"),
            "rendering": (308, 48, 130, 56, "manifest, Dockerfile", "code"),
            "jobs": (472, 48, 126, 56, "plan, submit, run", "code"),
            "backends": (632, 48, 106, 56, "local, cluster", "code"),
            "observe": (772, 48, 108, 56, "status, logs, why", "code"),
            "image": (472, 144, 126, 56, "layers, builders", "code"),
            "cli, view": (772, 144, 108, 56, "text, JSON", "code"),
            "registry": (308, 254, 130, 52, "image by digest", "outside"),
            "PyTorchJob, Pods": (610, 254, 150, 52, "Kubernetes or a folder", "outside"),
            "agent": (472, 366, 110, 56, "one per replica", "code"),
            "ranks": (616, 366, 120, 56, "session, strategy", "code"),
            "checkpoints": (770, 366, 110, 56, "on a volume", "file"),
        },
        [
            ("job.yaml", "spec", "right", "left", ""),
            ("spec", "rendering", "right", "left", ""),
            ("rendering", "jobs", "right", "left", ""),
            ("jobs", "backends", "right", "left", ""),
            ("backends", "observe", "right", "left", ""),
            ("observe", "cli, view", "bottom", "top", "events"),
            ("jobs", "image", "bottom", "top", ""),
            ("image", "registry", "left", "top", "push"),
            ("backends", "PyTorchJob, Pods", "bottom", "top", "requests"),
            ("PyTorchJob, Pods", "agent", "left", "top", "start"),
            ("registry", "agent", "bottom", "left", "pull"),
            ("agent", "ranks", "right", "left", ""),
            ("ranks", "checkpoints", "right", "left", ""),
        ],
        [
            (8, 12, 884, 204, "client: a laptop or CI; never imports torch"),
            (452, 330, 440, 108, "container, or processes here; needs torch alone"),
        ],
    ),
    "container": Drawing(
        "What happens in the containers of a job",
        (900, 400),
        {
            "operator": (24, 48, 120, 56, "sets variables", "outside"),
            "agent, node 0": (230, 48, 130, 56, "checks, supervises", "code"),
            "rank 0": (480, 48, 110, 56, "your script", "code"),
            "checkpoints": (740, 48, 120, 56, "on a volume", "file"),
            "roster": (215, 174, 160, 52, "who is there, who hangs", "code"),
            "agent, node 1": (230, 296, 130, 56, "checks, supervises", "code"),
            "rank 1": (480, 296, 110, 56, "your script", "code"),
            "process group": (470, 174, 130, 52, "torch: gloo or nccl", "outside"),
            "status, logs": (740, 296, 120, 56, "and watch, why", "outside"),
        },
        [
            ("operator", "agent, node 0", "right", "left", ""),
            ("agent, node 0", "rank 0", "right", "left", "starts"),
            ("agent, node 1", "rank 1", "right", "left", "starts"),
            ("agent, node 0", "roster", "bottom", "top", "keeps"),
            ("agent, node 1", "roster", "top", "bottom", "reports to"),
            ("rank 0", "process group", "bottom", "top", ""),
            ("rank 1", "process group", "top", "bottom", ""),
            ("rank 0", "checkpoints", "right", "left", "writes"),
            ("rank 1", "status, logs", "right", "left", "events, exit code"),
        ],
        [
            (200, 12, 450, 112, "pod master-0"),
            (200, 260, 450, 112, "pod worker-0"),
        ],
    ),
    "image": Drawing(
        "How code gets into an image",
        (900, 250),
        {
            "base": (24, 48, 130, 56, "has torch", "outside"),
            "dependencies": (230, 48, 130, 56, "k8sjob build, once", "code"),
            "code": (436, 48, 130, 56, "k8sjob push, a layer", "code"),
            "image by digest": (642, 48, 130, 56, "in the registry", "outside"),
            "requirements": (230, 160, 130, 56, "a file, image.pip", "file"),
            "your folder": (436, 160, 130, 56, "main.py, data", "file"),
            "job": (642, 160, 130, 56, "names the digest", "outside"),
        },
        [
            ("base", "dependencies", "right", "left", ""),
            ("dependencies", "code", "right", "left", ""),
            ("code", "image by digest", "right", "left", ""),
            ("requirements", "dependencies", "top", "bottom", ""),
            ("your folder", "code", "top", "bottom", ""),
            ("image by digest", "job", "bottom", "top", ""),
        ],
        [],
    ),
}
HEAD = """<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}'
 font-family='system-ui, sans-serif' text-anchor='middle'>
<title>{title}</title>
<defs><marker id='end' viewBox='0 0 8 8' refX='8' refY='4' markerWidth='7' markerHeight='7'
 orient='auto'><path d='M0 0L8 4L0 8z' fill='#475569'/></marker></defs>
<rect width='{width}' height='{height}' rx='10' fill='white'/>"""


def drawing(name: str) -> str:
    """The whole picture as SVG."""
    shown = DRAWINGS[name]
    width, height = shown.size
    frames = [_frame(*frame) for frame in shown.frames]
    arrows = [_arrow(shown, *arrow) for arrow in shown.arrows]
    boxes = [_box(box, *shown.boxes[box]) for box in shown.boxes]
    head = HEAD.format(width=width, height=height, title=shown.title)
    return "\n".join([head, *frames, *arrows, *boxes, "</svg>\n"])


def _frame(*place: Any) -> str:
    x, y, width, height, label = place
    return (
        f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='10' fill='#f8fafc' "
        "stroke='#cbd5e1' stroke-dasharray='5 4'/>"
        f"{_text((x + width - 12, y + 22), label, 'end')}"
    )


def _box(name: str, *place: Any) -> str:
    x, y, width, height, more, kind = place
    middle, half = x + width / 2, y + height / 2
    return (
        f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='7' fill='{COLORS[kind]}' "
        f"stroke='#475569'/><text x='{middle:g}' y='{half - 3:g}' font-size='15'>{name}</text>"
        f"{_text((middle, half + 15), more)}"
    )


def _arrow(shown: Drawing, *arrow: str) -> str:
    start, end, out, into, label = arrow
    (x1, y1), (x2, y2) = _side(shown.boxes[start], out), _side(shown.boxes[end], into)
    upright = out in {"bottom", "top"}
    turns = [f"V{y2:g}", f"H{x2:g}"] if upright else [f"H{x2:g}", f"V{y2:g}"]
    # An arrow's head looks along the last part, so there must be no part of no length.
    path = f"M{x1:g} {y1:g}" + "".join(t for t in turns if t not in {f"V{y1:g}", f"H{x1:g}"})
    drawn = f"<path d='{path}' fill='none' stroke='#475569' marker-end='url(#end)'/>"
    if y1 == y2:
        return drawn + _text(((x1 + x2) / 2, y1 - 6), label)
    down = x1 if upright else x2  # where the arrow's vertical part is
    return drawn + _text((down + 6, (y1 + y2) / 2 + 4), label, "start")


def _side(box: tuple[Any, ...], side: str) -> tuple[float, float]:
    x, y, width, height, *_ = box
    return {
        "left": (x, y + height / 2),
        "right": (x + width, y + height / 2),
        "top": (x + width / 2, y),
        "bottom": (x + width / 2, y + height),
    }[side]


def _text(at: tuple[float, float], text: str, anchor: str = "middle") -> str:
    return (
        f"<text x='{at[0]:g}' y='{at[1]:g}' font-size='12' fill='#475569' "
        f"text-anchor='{anchor}'>{text}</text>"
    )


if __name__ == "__main__":
    for _name in DRAWINGS:
        (FOLDER / f"{_name}.svg").write_text(drawing(_name), encoding="utf-8")
