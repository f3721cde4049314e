"""Dependencies put on a real base without a builder, in the containers of a real cluster."""

import wheelhouse
from baseimage import cache_home
from wheelhouse import wheel

MAIN = """\
import numpy, tinylib, torch
print("tinylib", tinylib.version, "numpy of", numpy.__file__, torch.ones(2).sum().item())
"""


def test_a_job_finds_them_behind_the_packages_of_the_base(desk, tmp_path, monkeypatch):
    links = tmp_path / "wheels"
    wheel(links, "tinylib", "1.2", requires=["numpy>=2"])
    wheel(links, "tinylib", "1.3", requires=["numpy>=999"])
    wheel(links, "numpy", "999.0")
    wheelhouse.alone(links, tmp_path, monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home() / "user"))  # the base is read once
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    code = desk.folder / "code"
    code.mkdir()
    (code / "main.py").write_text(MAIN)
    image = {"repository": f"{desk.cluster.registry}/unaided/code", "base": desk.cluster.base_image}
    job = desk.file(
        image={**image, "context": "code", "pip": ["tinylib", "torch", "pyyaml"]},
        run={"script": "main.py"},
        replicas={"workers": 0},
        resources={"cpu": "100m", "memory": "300Mi"},
    )
    _, err = desk.call("build", job, "--builder", "uv", "--zstd")
    assert "\ntinylib==1.2\n" in err
    assert "\nbuilt with uv: deps-" in err
    _, err = desk.call("submit", job, "--watch")
    out, _ = desk.call("logs", "tiny", "-n", desk.namespace)
    assert "tinylib 1.2 numpy of /usr/lib/python3/dist-packages/numpy/__init__.py 2.0" in out, err
