"""From the submission to the first training step, split, with the operator's init container or not.

    python bench/first_step.py [--rounds 5]

Starts a cluster of its own (see tests/cluster/bed; root on Linux). Each round submits the same job
of a Master and a Worker, its code pushed anew, with each of the templates for the init container,
and asks `k8sjob why --timing`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from cluster.bed import Bed  # noqa: E402 - of the tests
from cluster.desk import Desk  # noqa: E402 - as the line before
from cluster.test_timing import MAIN  # noqa: E402 - as the line before

PAGE = ROOT / "docs/how-to/set-up-a-cluster.md"
FLAG = "--pytorch-init-container-template-file=/run/bed/conf/initContainer.yaml"
TEXT = PAGE.read_text()
TEMPLATES = {
    "the operator's own": None,
    "short waits": TEXT[TEXT.index("- name: init-pytorch") :].partition("```")[0],
    "none": "[]\n",
}


def use(bed: Bed, template: str | None, argv: list[str]) -> None:
    """Start the operator anew with a template for its init container."""
    bed.stop("operator")
    bed.commands["operator"] = argv if template is None else [*argv, FLAG]
    (bed.folder / "conf/initContainer.yaml").write_text(template or "")
    bed.start("operator")


def job(desk: Desk, **image: object) -> Path:
    """The job.yaml of a Master and a Worker that train, on the cluster's base."""
    cluster = desk.cluster
    return desk.file(
        image={"repository": f"{cluster.registry}/bench/step", "base": cluster.base_image, **image},
        run={"script": "main.py", "env": {"OMP_NUM_THREADS": "1"}},
        resources={
            "cpu": "2",
            "memory": "800Mi",
            "requests": {"cpu": "100m", "memory": "300Mi"},
        },
        policy={"clean_pod_policy": "None", "termination_grace": "2s"},
    )


def once(desk: Desk, file: Path, edit: int) -> dict[str, float]:
    """One job: seconds after its submission."""
    (desk.folder / "main.py").write_text(f"{MAIN}# {edit}\n")
    desk.call("submit", file, "--replace", "--watch")
    told = json.loads(desk.call("why", "--timing", "default/tiny", "-o", "json")[0])
    rows = {row["name"]: row for row in told["replicas"]}
    master, worker = rows["master-0"], rows["worker-0"]
    return {
        "worker's first line": worker["first_line"],
        "master imported": master["imported"],
        "met": master["met"],
        "first step": told["seconds"],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    found: dict[str, list[dict[str, float]]] = {name: [] for name in TEMPLATES}
    with tempfile.TemporaryDirectory() as name, Bed() as bed:
        desk, argv = Desk(bed, "default", Path(name)), list(bed.commands["operator"])
        file = job(desk)
        for number in range(rounds):
            for way, template in TEMPLATES.items():
                use(bed, template, argv)
                found[way].append(once(desk, file, number))
    print(f"seconds after the submission, median (least) of {rounds}")
    for way, times in found.items():
        print(f"init container: {way}")
        for what in times[0]:
            seconds = [one[what] for one in times]
            print(f"  {what:20} {statistics.median(seconds):5.1f} ({min(seconds):.1f})")


if __name__ == "__main__":
    main()
