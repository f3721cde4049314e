"""The drawing of the architecture: writes docs/images/architecture.svg."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PATH = Path(__file__).resolve().parent / "images/architecture.svg"
WIDTH, HEIGHT = 900, 450

# name: x, y, width, height, second line, colour
BOXES = {
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
}
# from, to, side of the one, side of the other, label
ARROWS = [
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
]
FRAMES = [
    (8, 12, 884, 204, "client: a laptop or CI; never imports torch"),
    (452, 330, 440, 108, "container, or processes here; needs torch alone"),
]
COLOURS = {"code": "#dbeafe", "file": "#fef3c7", "outside": "#e5e7eb"}


HEAD = f"""<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}'
 font-family='system-ui, sans-serif' text-anchor='middle'>
<title>The architecture of k8sjob</title>
<defs><marker id='end' viewBox='0 0 8 8' refX='8' refY='4' markerWidth='7' markerHeight='7'
 orient='auto'><path d='M0 0L8 4L0 8z' fill='#475569'/></marker></defs>
<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>"""


def drawing() -> str:
    """The whole picture as SVG."""
    frames = [_frame(*frame) for frame in FRAMES]
    arrows = [_arrow(*arrow) for arrow in ARROWS]
    return "\n".join([HEAD, *frames, *arrows, *map(_box, BOXES), "</svg>\n"])


def _frame(*place: Any) -> str:
    x, y, width, height, label = place
    return (
        f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='10' fill='#f8fafc' "
        "stroke='#cbd5e1' stroke-dasharray='5 4'/>"
        f"{_text((x + width - 12, y + 22), label, 'end')}"
    )


def _box(name: str) -> str:
    x, y, width, height, more, kind = BOXES[name]
    middle, half = x + width / 2, y + height / 2
    return (
        f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='7' fill='{COLOURS[kind]}' "
        f"stroke='#475569'/><text x='{middle:g}' y='{half - 3:g}' font-size='15'>{name}</text>"
        f"{_text((middle, half + 15), more)}"
    )


def _arrow(*arrow: str) -> str:
    start, end, out, into, label = arrow
    (x1, y1), (x2, y2) = _side(start, out), _side(end, into)
    path = f"M{x1:g} {y1:g}" + (f"V{y2:g}H{x2:g}" if out == "bottom" else f"H{x2:g}V{y2:g}")
    down = x1 if out == "bottom" else x2  # where the arrow's vertical part is
    drawn = f"<path d='{path}' fill='none' stroke='#475569' marker-end='url(#end)'/>"
    return drawn + _text((down + 6, (y1 + y2) / 2 + 4), label, "start")


def _side(name: str, side: str) -> tuple[float, float]:
    x, y, width, height, *_ = BOXES[name]
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
    PATH.write_text(drawing(), encoding="utf-8")
