"""Public training scripts, unedited, each by `k8sjob init --from` and `k8sjob run` on this machine.

    python bench/public_scripts.py CHECKOUTS [WORD ...]

CHECKOUTS holds the repositories as OWNER/NAME; WORD selects scripts by a part of their path. What a
script would download is written beside it before: tiny data sets and models of random weights.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import public_data

LIMIT = 900
"""Seconds of a script, at most."""


REPOSITORIES = {
    "accelerate": "huggingface/accelerate",
    "build-nanogpt": "karpathy/build-nanogpt",
    "examples": "pytorch/examples",
    "ignite": "pytorch/ignite",
    "keras": "keras-team/keras",
    "lightning": "Lightning-AI/pytorch-lightning",
    "minGPT": "karpathy/minGPT",
    "nanoGPT": "karpathy/nanoGPT",
    "torchtitan": "pytorch/torchtitan",
    "trl": "huggingface/trl",
}
SCRIPTS = """
examples mnist/main.py; --epochs 1 --dry-run --no-accel; mnist:data
examples vae/main.py; --epochs 1 --batch-size 32; mnist:data
examples dcgan/main.py; --dataset fake --dry-run --workers 0
examples regression/main.py
examples imagenet/main.py; IMAGENET; images:imagenet/images; run=--set replicas.workers=1
examples word_language_model/main.py; --data texts --epochs 1 --emsize 32 --nhid 32; TEXTS
examples distributed/rpc/batch/parameter_server.py; ; ; needs=a GPU
examples distributed/ddp/example.py; ; ; needs=2 GPUs
examples distributed/FSDP2/example.py; ; ; needs=2 GPUs
examples distributed/tensor_parallelism/tensor_parallel_example.py; ; ; needs=2 GPUs
examples distributed/minGPT-ddp/mingpt/main.py; ; ; needs=2 GPUs
examples distributed/ddp-tutorial-series/multigpu_torchrun.py; 2 1; ; needs=a GPU
nanoGPT train.py; NANO; tokens:data/shakespeare_char; needs=a GPU
build-nanogpt train_gpt2.py; ; ; needs=a GPU
minGPT demo.ipynb
minGPT projects/adder/adder.py; --trainer.max_iters=20; ; folder=.
accelerate examples/nlp_example.py; --cpu; NLP
accelerate examples/by_feature/local_sgd.py; --cpu; FEATURE
accelerate examples/torch_native_parallelism/nd_parallel.py; ; ; needs=a GPU
lightning examples/pytorch/bug_report/bug_report_model.py
lightning examples/pytorch/bug_report/bug_report_model.ipynb
lightning examples/pytorch/basics/autoencoder.py; CLI; mnist:Datasets; folder=.
lightning examples/fabric/image_classifier/train_fabric.py; --dry-run; mnist:Datasets; folder=.
lightning examples/fabric/build_your_own_trainer/run.py; ; mnist:/tmp/data/MNIST
lightning examples/fabric/tensor_parallel/train.py; ; ; needs=a GPU
ignite examples/mnist/mnist.py; --epochs 1; mnist:examples/mnist
trl trl/scripts/sft.py; TRAINER; llama:trl/scripts/tiny chats:trl/scripts/texts
trl trl/scripts/dpo.py; TRAINER; llama:trl/scripts/tiny pairs:trl/scripts/texts
keras guides/custom_train_step_in_torch.py
keras examples/demo_functional.py
keras guides/distributed_training_with_torch.py; ; ; needs=a GPU
torchtitan torchtitan/train.py; --module llama3 --config llama3_debugmodel; ; folder=. needs=a GPU
"""
BERT = "bert:{0}/bert-base-cased glue:{0}/nyu-mll/glue metric:{0}/glue"
TEXTS = "word_language_model/texts"
SHORT = {
    "IMAGENET": "images --epochs 1 -b 4 -j 0 --no-accel --dist-url env:// --dist-backend gloo",
    "TEXTS": " ".join(
        f"text:word_language_model/texts/{one}.txt" for one in ("train", "valid", "test")
    ),
    "NANO": "config/train_shakespeare_char.py --device=cpu --backend=gloo --compile=False",
    "NLP": BERT.format("examples"),
    "FEATURE": BERT.format("examples/by_feature"),
    "CLI": "--trainer.max_epochs=1 --trainer.limit_train_batches=4",
    "TRAINER": "--model_name_or_path tiny --dataset_name texts --max_steps 4 --use_cpu",
}
LACKS = {"": r"$^", "a GPU": r"NVIDIA|CUDA|GPU", "2 GPUs": r"Unable to locate sufficient 2 gpus"}
"""What a script says where this machine lacks something."""


class Script(NamedTuple):
    """A script of a repository, and what it is given."""

    repository: str
    path: str
    args: str  # of the script
    data: str  # functions of this module and the path that each writes to
    folder: str  # of job.yaml; empty: that of the script
    run: str  # options of `k8sjob run`
    needs: str  # what most machines lack

    @classmethod
    def read(cls, line: str) -> Script:
        """A line of SCRIPTS."""
        place, args, data, more = (*(one.strip() for one in line.split(";")), "", "", "")[:4]
        repository, path = place.split()
        options = dict(re.findall(r"(folder|run|needs)=(.*?)(?= \w+=|$)", more))
        given = (SHORT.get(one, one) for one in (args, data))
        rest = (options.get(name, "") for name in ("folder", "run", "needs"))
        return cls(REPOSITORIES[repository], path, *given, *rest)

    @property
    def name(self) -> str:
        """Its path, with the repository."""
        return f"{self.repository}/{self.path}"


def measure(script: Script, checkouts: Path, home: str) -> tuple[list[object], str]:
    """Run a script in a copy of its repository; its row of the table, and the output."""
    with tempfile.TemporaryDirectory(prefix="public-") as scratch:
        root = Path(scratch) / "repository"
        shutil.copytree(checkouts / script.repository, root, symlinks=True)
        for item in script.data.split():
            maker, _, path = item.partition(":")
            getattr(public_data, maker)(root / path)
        folder = root / (script.folder or Path(script.path).parent)
        env = {**os.environ, "HOME": home, "HF_HUB_OFFLINE": "1", "KERAS_BACKEND": "torch"}
        env["K8SJOB_STATE"] = f"{scratch}/state"
        output, codes = "", []

        def run(*words: str) -> None:
            nonlocal output
            command = ["timeout", str(LIMIT), sys.executable, "-m", *words]
            done = subprocess.run(
                command, cwd=folder, env=env, text=True, stdout=-1, stderr=-2, check=False
            )
            codes.append(done.returncode)
            output += done.stdout

        file = (root / script.path).relative_to(folder)
        run("k8sjob", "init", "--from", str(file), ".", "--", *shlex.split(script.args))
        if packages := re.search(r"-m (pip install [^`]*)", output):
            run(*shlex.split(packages[1]))
        run("k8sjob", "run", *shlex.split(script.run))
        job = folder / "job.yaml"
        style = re.search(r"script: \S+ # (.*)", job.read_text() if job.exists() else "")
        processes = re.search(r"process(?:es)? of (\d+)", output)
        result = f"fails ({codes[-1]})" if codes[-1] else "runs"
        if re.search(LACKS[script.needs], output):
            result = f"needs {script.needs}"
        found = [one[1] if one else "?" for one in (style, processes)]
        return [script.name, *found, script.args, len(codes), result], output


def main() -> None:
    """Print the table, a row as soon as it is measured; outputs go to public-scripts/."""
    checkouts, words = Path(sys.argv[1]).resolve(), sys.argv[2:] or [""]
    logs = Path("public-scripts")
    logs.mkdir(exist_ok=True)
    print("| script | how it is started | processes | arguments | commands | result |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="home-") as home:
        scripts = list(map(Script.read, SCRIPTS.strip().splitlines()))
        chosen = [one for word in words for one in scripts if word in one.name]
        for script in dict.fromkeys(chosen):
            row, output = measure(script, checkouts, home)
            (logs / (script.name.replace("/", "-") + ".log")).write_text(output)
            print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
