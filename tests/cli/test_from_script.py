"""The job.yaml that is made for a script."""

import json
import os
import re
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

from k8sjob.checks.lint import lint
from k8sjob.checks.scripts.job_draft import draft, find_script
from k8sjob.errors import SpecError
from k8sjob.spec import JobSpec

GROUP = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
CUDA = "import torch, torch.distributed as dist\n"
NCCL = "dist.init_process_group('nccl')\n"
PARSED = "import argparse\np = argparse.ArgumentParser()\n"
look = metadata.packages_distributions
look_once = cache(look)


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    """All installed packages are looked at once, which takes half a second."""
    monkeypatch.setattr(metadata, "packages_distributions", look_once)


def made(folder, text, name="train.py", **options):
    (folder / name).write_text(text)
    return draft(folder / name, folder, **options)


@pytest.mark.parametrize(
    ("text", "workers", "processes", "reason"),
    [
        (GROUP, 1, 1, "init_process_group (line 2) takes the ranks from the environment"),
        ("from k8sjob import runtime\nruntime.session()\n", 1, 1, "k8sjob.runtime creates the"),
        (f"{GROUP}import torch.multiprocessing as mp\nmp.spawn(print, nprocs=2)\n", 0, 1,
         "mp.spawn (line 4) starts its own processes, in one replica"),
        ((f"{GROUP}import torch, torch.multiprocessing as mp\nn = torch.cuda.device_count()\n"
          "mp.spawn(print, nprocs=n)\n"),
         0, 1, "for each GPU of one replica, and none without a"),
        ("import lightning as L\nL.Trainer(devices=2, num_nodes=3)\n", 2, 2,
         "has devices=2 and num_nodes=3"),
        ("import lightning as L\nL.Trainer(devices='auto')\n", 0, 1, "is one process unless"),
        (f"from lightning import LightningModule\n{GROUP}", 1, 1, "init_process_group (line 3)"),
        ("from lightning import LightningModule\n", 0, 1, "each train separately"),
        ("from accelerate import Accelerator\nAccelerator()\n", 1, 1, "accelerate creates the"),
        ("from accelerate.utils import set_seed\nset_seed(1)\n", 0, 1, "each train separately"),
        ("import deepspeed\ndeepspeed.initialize()\n", 1, 1, "deepspeed creates the"),
        ("from deepspeed.accelerator import get_accelerator\n", 0, 1, "each train separately"),
        ("from transformers import Trainer\nTrainer()\n", 1, 1, "transformers creates the"),
        ("from transformers import GPT2LMHeadModel\n", 0, 1, "each train separately"),
        ("import torch\nimport transformers as t\nt.Seq2SeqTrainer()\n", 1, 1, "transformers c"),
        ("from ignite.engine import Engine\nEngine(print)\n", 0, 1, "each train separately"),
        ("import ignite.distributed as idist\nidist.get_rank()\n", 1, 1, "ignite creates the"),
        ("import keras\nkeras.Sequential().fit()\n", 0, 1, 'separately; see "From Keras'),
        ("import torch\ntorch.ones(2)\n", 0, 1, 'separately; see "From torch'),
    ],
)  # fmt: skip
def test_how_a_script_is_started(text, workers, processes, reason, tmp_path):
    files = made(tmp_path, text).files
    spec = JobSpec.from_yaml(files["job.yaml"])
    assert (spec.replicas.workers, spec.replicas.nproc_per_node) == (workers, processes)
    (line,) = (line for line in files["job.yaml"].splitlines() if "script:" in line)
    assert reason in line


@pytest.mark.parametrize(
    ("text", "there", "not_there"),
    [
        ("import yaml, os, torch, numpy\n", 'pip: ["PyYAML==', "numpy"),
        ("import cv2, nosuch\n", '"nosuch", "opencv-python-headless"]', "=="),
        ("try:\n    import wandb\nexcept ImportError:\n    wandb = None\n", "base:", "wandb"),
        ("from helper import x\nimport yaml\n", "PyYAML", "helper"),
        (f"{PARSED}p.add_argument('--data', required=True)\n", "# args: it needs --data", "takes"),
        (f"{PARSED}p.add_argument('-l', '--lr')\n", "# args: it takes --lr\n", "needs"),
        (f"{PARSED}p.add_argument('--local_rank')\n", 'local_rank_arg: "--local_rank"', "# args"),
        (f"{CUDA}{NCCL}", "  gpus: 1 # its process group", "# gpus"),
        (f"{CUDA}assert torch.cuda.is_available()\n{NCCL}", "  gpus: 1 # its process", "# gpus"),
        (f"{CUDA}if torch.cuda.is_available(): {NCCL}", "# gpus: 1", "  gpus: 1 #"),
        ("import torch\ntorch.save({}, 'x')\n", "# It saves files (line 2).", "checkpoint:"),
        ("from k8sjob import runtime\n", "dir: /checkpoints", "saves"),
    ],
)
def test_what_it_needs(text, there, not_there, tmp_path):
    (tmp_path / "helper.py").write_text("import torch\nx = 1\n")
    text = made(tmp_path, text).files["job.yaml"]
    JobSpec.from_yaml(text)
    assert there in text
    assert not_there not in text


def distributions(folder, text):
    spec = JobSpec.from_yaml(made(folder, text).files["job.yaml"])
    names = (requirement.partition("==")[0] for requirement in spec.image.pip)
    return {re.sub(r"[-_.]+", "-", name).lower() for name in names}


def test_imports_of_real_packages(tmp_path, monkeypatch):
    """None of them is installed, as on a laptop that only submits."""
    monkeypatch.setattr(metadata, "packages_distributions", dict)
    _, *rows = (Path(__file__).parent / "imports.tsv").read_text().splitlines()
    wrong = []
    for row in rows:
        text, expected = row.split("\t")
        names = distributions(tmp_path, text.replace("\\n", "\n"))
        if names != {re.sub(r"[-_.]+", "-", name).lower() for name in expected.split()}:
            wrong.append((text, names))
    assert wrong == []
    assert len(rows) > 200


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from space.blue import thing\n", {"space-blue"}),
        ("import space.red.deep\nfrom space.blue import f\n", {"space-blue", "space-red"}),
        ("from space import red\n", {"space-red"}),
    ],
)
def test_a_namespace_of_several_installed_distributions(text, expected, tmp_path, monkeypatch):
    site = tmp_path / "site"
    for color in ("red", "blue"):
        (site / f"space_{color}-1.0.dist-info").mkdir(parents=True)
        (site / f"space_{color}-1.0.dist-info/METADATA").write_text(
            f"Metadata-Version: 2.1\nName: space-{color}\nVersion: 1.0\n"
        )
        (site / f"space/{color}").mkdir(parents=True)
        for name in ("__init__.py", "deep.py"):  # Python 3.12 leaves out files that are not there
            (site / f"space/{color}" / name).touch()
        record = f"space/{color}/__init__.py,,\nspace/{color}/deep.py,,\n"
        (site / f"space_{color}-1.0.dist-info/RECORD").write_text(record)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(metadata, "packages_distributions", look)
    assert distributions(tmp_path, text) == expected


def test_requirements_and_arguments_of_the_user_count(tmp_path):
    (tmp_path / "requirements.txt").write_text("tqdm\n")
    text = f"import yaml\n{PARSED}p.add_argument('data')\np.add_argument('--lr', required=True)\n"
    done = made(tmp_path, text, name="other", args=["/data", "--lr=1"])
    spec = JobSpec.from_yaml(done.files["job.yaml"])
    assert (spec.name, spec.run.args) == ("other", ("/data", "--lr=1"))
    assert (spec.image.requirements, spec.image.pip) == ("requirements.txt", ())


@pytest.mark.parametrize(
    ("args", "left"),
    [
        ([], "-o, --out, --lr, data"),
        (["--lr=1", "--out=x", "-o", "y"], "data"),
        (["-l", "1", "/data", "--out", "x", "-o", "y"], ""),
    ],
)
def test_arguments_that_are_still_needed(args, left, tmp_path):
    text = (
        f"{PARSED}p.add_argument('-o', required=True)\np.add_argument('--out', required=True)\n"
        "p.add_argument('data')\np.add_argument('-l', '--lr', required=True)\n"
    )
    notes = made(tmp_path, text, args=args).notes
    needs = [note for note in notes if " needs " in note]
    assert needs == ([f"train.py needs {left}: add them to run.args"] if left else [])


def test_names_of_files_and_options_stay_in_their_comment(tmp_path):
    text = f"{PARSED}p.add_argument('--a\\nname: b')\n"
    assert JobSpec.from_yaml(made(tmp_path, text).files["job.yaml"]).name == "train"


def test_a_notebook_becomes_a_script(tmp_path):
    magic = "!pip install x\n%matplotlib inline"
    cells = [("markdown", "# text"), ("code", magic), ("code", GROUP)]
    book = {"cells": [{"cell_type": kind, "source": [text]} for kind, text in cells]}
    files = made(tmp_path, json.dumps(book), name="My Notes.ipynb").files
    assert files["My Notes.py"] == f"# !pip install x\n# %matplotlib inline\n\n{GROUP}"
    assert JobSpec.from_yaml(files["job.yaml"]).run.script == "My Notes.py"


def test_a_notebook_beside_the_script_of_its_name(tmp_path):
    (tmp_path / "a.py").touch()
    files = made(tmp_path, json.dumps({"cells": []}), name="a.ipynb").files
    assert set(files) == {"a_notebook.py", "job.yaml"}


def test_a_package_of_the_folder_is_no_library(tmp_path):
    for name in ("net", "projects"):
        (tmp_path / name).mkdir()
    (tmp_path / "net/__init__.py").write_text(f"import yaml\n{GROUP}")
    (tmp_path / "projects/train.py").write_text("import torch, net\n")
    job = draft(tmp_path / "projects/train.py", tmp_path).files["job.yaml"]
    assert ("PyYAML" in job, '"net"' in job) == (True, False)
    assert JobSpec.from_yaml(job).replicas.workers == 1  # net makes the process group


def test_a_line_of_another_file_is_named_with_it(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/group.py").write_text(
        "import torch\ndef start():\n    torch.distributed.init_process_group('gloo')\n"
        "    torch.save({}, 'x')\n"
    )
    job = made(tmp_path, "from lib.group import start\nstart()\n").files["job.yaml"]
    assert "# init_process_group (lib/group.py:3) takes the ranks" in job
    assert "# It saves files (lib/group.py:4)." in job


def test_a_script_that_imports_from_its_package_is_a_module(tmp_path):
    (tmp_path / "net/run").mkdir(parents=True)
    (tmp_path / "net/model.py").write_text(GROUP)
    script = tmp_path / "net/run/train.py"
    script.write_text("import torch\nfrom ..model import Net\n")
    done = draft(script, tmp_path)
    spec = JobSpec.from_yaml(done.files["job.yaml"])
    assert (spec.run.script, spec.run.module, spec.replicas.workers) == (None, "net.run.train", 1)
    assert not done.notes
    (note, _) = draft(script, script.parent).notes
    assert note == (
        "train.py imports from the package around it (line 2); to add that:"
        f" k8sjob init --from {script} {os.path.relpath(tmp_path)}"
    )
    script.write_text("try: from ..model import Net\nexcept ImportError: from model import Net\n")
    assert JobSpec.from_yaml(draft(script, tmp_path).files["job.yaml"]).run.module is None


def test_a_package_around_the_folder_is_no_library(tmp_path, monkeypatch):
    (tmp_path / "net/run").mkdir(parents=True)
    (tmp_path / "net/model.py").write_text(GROUP)
    script = tmp_path / "net/run/train.py"
    script.write_text("import torch, nosuch\nfrom net.model import Net\n")
    monkeypatch.chdir(tmp_path)
    done = draft(script.relative_to(tmp_path), script.parent)
    assert JobSpec.from_yaml(done.files["job.yaml"]).image.pip == ("nosuch",)
    step = "k8sjob init --from net/run/train.py ."
    assert "# its process group, if any, is created in net, not in" in done.files["job.yaml"]
    assert done.notes[0] == f"net is in ., not in the job's folder; to add it: {step}"


def test_an_import_in_a_function_of_another_file_may_be_missing(tmp_path):
    (tmp_path / "helper.py").write_text(
        "import nosuch_top\ndef rare():\n    import nosuch_rare, yaml\nrare\n"
    )
    text = "from helper import rare\ndef main():\n    import nosuch_own\nmain()\n"
    job = made(tmp_path, text).files["job.yaml"]
    spec = JobSpec.from_yaml(job)
    names = [one.partition("=")[0] for one in spec.image.pip]
    assert names == ["nosuch_own", "nosuch_top", "PyYAML"]
    assert "  # imported in functions only, and not installed here: nosuch_rare\n" in job


@pytest.mark.parametrize(
    ("path", "volumes"),
    [
        ("../data", [("data", "/data", "../data")]),
        ("../data/a/b.bin", [("data", "/data", "../data")]),
        ("../nothing", []),
        ("../job", []),
        ("../usr", []),
        ("data", []),
    ],
)
def test_data_beside_its_folder_is_a_volume(path, volumes, tmp_path):
    for name in ("job", "data", "usr"):
        (tmp_path / name).mkdir()
    files = made(tmp_path / "job", f"import torch\nopen({path!r})\n").files
    spec = JobSpec.from_yaml(files["job.yaml"])
    assert [(one.name, one.mount, one.local) for one in spec.volumes] == volumes
    assert ("# line 2 reads ../data; " in files["job.yaml"]) == bool(volumes)


LONG = "x = [\n" + "    1, 2, 3, 4,\n" * 5000 + "]\n"


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        ("for i in x:\n    !ls\n    %time y", "for i in x:\n    pass  # !ls\n    pass  # %time y"),
        ("torch.nn?\n?torch\nx = 1", "# torch.nn?\n# ?torch\nx = 1"),
        ("%%time\nx = 1", "# %%time\nx = 1"),
        ("%%bash\nls -l\ncd x", "# %%bash\n# ls -l\n# cd x"),
        ("!pip install \\\n  a\nx = 1\n!ls", "# !pip install \\\n#   a\nx = 1\n# !ls"),
        ("x = 5 \\\n  % 3\n!ls", "x = 5 \\\n  % 3\n# !ls"),
        ("f(a\n  % b,\n  c)\ny = '''\n%x\n'''\n%x", "f(a\n  % b,\n  c)\ny = '''\n%x\n'''\n# %x"),
        (
            "def f():\n    if x:\n        !ls\n    return (1\n    % 2)\n?f",
            "def f():\n    if x:\n        pass  # !ls\n    return (1\n    % 2)\n# ?f",
        ),
        ("x = (5\n% 3)\ny = '''\n!\u2028'''", "x = (5\n% 3)\ny = '''\n!\u2028'''"),
        pytest.param(f"{LONG}!ls", f"{LONG}# !ls", id="long"),
    ],
)
def test_only_what_python_cannot_read_becomes_a_comment(cell, text, tmp_path):
    picture = {"data": {"image/png": "A" * 2**20}}
    cells = [{"cell_type": "code", "source": cell, "outputs": [picture]}]
    assert made(tmp_path, json.dumps({"cells": cells}), name="a.ipynb").files["a.py"] == f"{text}\n"


def test_what_is_no_notebook(tmp_path):
    book = json.dumps({"cells": [{"cell_type": "code", "source": "x = !ls"}]})
    with pytest.raises(SpecError, match=r"a\.ipynb: Python cannot parse it: .*, in 'x = !ls'$"):
        made(tmp_path, book, name="a.ipynb")
    with pytest.raises(SpecError, match="not a notebook of format 4"):
        made(tmp_path, "{}", name="a.ipynb")


def test_the_script_of_a_folder(tmp_path):
    with pytest.raises(SpecError, match=r"no \.py file in it is a training script"):
        find_script(tmp_path)
    (tmp_path / "model.py").write_text("import torch\ndef build(): ...\n")
    (tmp_path / "go.py").write_text(GROUP)
    assert find_script(tmp_path).name == "go.py"
    (tmp_path / "other.py").write_text(GROUP)
    with pytest.raises(
        SpecError, match=r"several training scripts: go\.py, other\.py; specify the"
    ):
        find_script(tmp_path)
    (tmp_path / "train.py").write_text(GROUP)
    assert find_script(tmp_path).name == "train.py"
    with pytest.raises(SpecError, match="no script; specify a"):
        find_script(tmp_path / "none.py")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\xfe\x00", r"train\.py: invalid or missing encoding declaration; save the file"),
        (b"# coding: rot13\n", r"train\.py: 'rot13' is not a text encoding.*; save the file"),
        (b"#" * (2**20 + 1), r"train\.py: longer than 1048576 bytes"),
    ],
)
def test_a_script_that_cannot_be_read(data, message, tmp_path):
    (tmp_path / "train.py").write_bytes(data)
    with pytest.raises(SpecError, match=message):
        draft(tmp_path / "train.py", tmp_path)
    os.mkfifo(tmp_path / "waits.py")
    with pytest.raises(SpecError, match="is a training script"):
        find_script(tmp_path)


def test_a_job_that_would_not_be_valid_names_the_script(tmp_path):
    with pytest.raises(SpecError, match=r"^\S*/a\nb\.py: run\.script: "):
        made(tmp_path, GROUP, name="a\nb.py")


def test_the_command(k8sjob, tmp_path):
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "train.py").write_text(GROUP)
    done = k8sjob("init", "--from", folder / "train.py", "--name", "mine", "--", "--lr", "0.1")
    assert done.code == 0, done.err
    assert f"wrote {folder / 'job.yaml'}" in done.err
    spec = JobSpec.from_yaml((folder / "job.yaml").read_text())
    assert (spec.name, spec.run.args) == ("mine", ("--lr", "0.1"))
    assert not [one for one in lint(folder) if one.severity == "error"]
    again = k8sjob("init", "--from", folder)
    assert again.code == 1
    assert f"already exists; remove it, or run the script without: k8sjob run {folder}" in again.err
    around = k8sjob("init", "--from", folder / "train.py", tmp_path)
    assert around.code == 0, around.err
    assert JobSpec.from_yaml((tmp_path / "job.yaml").read_text()).run.script == "src/train.py"
    outside = k8sjob("init", "--from", folder / "train.py", tmp_path / "else")
    assert (outside.code, "specify a folder that contains it" in outside.err) == (1, True)
    (folder / "train.py").write_text("def (")
    broken = k8sjob("init", "--from", folder / "train.py", folder / "..")
    assert (broken.code, "train.py:1: Python cannot parse it" in broken.err) == (1, True)


def test_the_command_names_what_is_not_installed(k8sjob, tmp_path):
    (tmp_path / "train.py").write_text(GROUP)
    (tmp_path / "requirements.txt").write_text("torch\nno-such-package\n")
    done = k8sjob("init", "--from", tmp_path)
    assert done.code == 0, done.err
    assert "lacks packages of the image's requirements: no-such-package; install with" in done.err


@pytest.mark.parametrize("name", ["train.py", "notes.ipynb"])
def test_a_script_outside_the_folder_of_the_job(tmp_path, name):
    (tmp_path / "job").mkdir()
    text = GROUP if name.endswith(".py") else json.dumps({"cells": []})
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecError, match="image's context; specify a folder that contains"):
        draft(tmp_path / name, tmp_path / "job")
