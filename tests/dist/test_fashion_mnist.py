"""The example with torchvision's loader, fed with files of Fashion-MNIST's own format.

No package ships the data set, so a server on loopback has scikit-learn's digits in its place: four
gzipped idx files of 28 x 28 images. What is torchvision's is not touched: the download, the check
of the md5 sums (which are those of these files), the extraction and the reading.
"""

import gzip
import hashlib
import struct
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from serving import Server

from k8sjob.contract import PATHS_ENV
from k8sjob.spec import load

pytestmark = pytest.mark.dist
EXAMPLE = Path(__file__).resolve().parents[2] / "manifests/fashion-mnist"


def idx(values):
    """An array of bytes as an idx file: type, dimensions, sizes, values."""
    head = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    return head + values.astype(np.uint8).tobytes()


@pytest.fixture
def mirror(tmp_path):
    """(URL, [(file, md5)], the files that were asked for)"""
    from sklearn.datasets import load_digits  # a second, in each process of pytest

    folder, asked = tmp_path / "mirror", set()
    folder.mkdir()
    digits = load_digits()
    images = np.pad(np.kron(digits.images * 15, np.ones((3, 3))), ((0, 0), (2, 2), (2, 2)))
    for part, rows in {"train": slice(0, 1500), "t10k": slice(1500, None)}.items():
        kinds = {"images-idx3": images[rows], "labels-idx1": digits.target[rows]}
        for kind, values in kinds.items():
            (folder / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(idx(values)))
    sums = [
        (file.name, hashlib.md5(file.read_bytes()).hexdigest()) for file in sorted(folder.iterdir())
    ]

    def answer(request):
        asked.add(request.path.lstrip("/"))
        file = folder / request.path.lstrip("/")
        return (200, file.read_bytes()) if file.is_file() else (404,)

    with Server(answer) as server:
        yield f"{server.url}/", sums, asked


def test_only_rank_0_prepares_the_volume_and_all_train(run_ranks, mirror, tmp_path):
    url, sums, asked = mirror
    spec = load(EXAMPLE / "job.yaml")
    asked_for = {"script": str(EXAMPLE / "main.py"), "mirror": url, "resources": sums}
    settings = {**asdict(spec.runtime_config), "checkpoint_dir": str(tmp_path / "saved")}
    env = {PATHS_ENV: f'{{"/data": "{tmp_path / "data"}"}}'}
    outcome = run_ranks(
        asked_for, program="mirrored.py", world=spec.world_size, limit=400, env=env, **settings
    )
    assert outcome.told("metrics")[-1]["test_accuracy"] > 0.85
    assert asked == {name for name, _ in sums}
    assert (tmp_path / "data/FashionMNIST/raw/train-images-idx3-ubyte").is_file()


def test_the_example_is_short():
    assert len((EXAMPLE / "main.py").read_text().splitlines()) <= 60
