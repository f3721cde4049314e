"""What public scripts would download, tiny: data sets of noise, models of random weights."""

from __future__ import annotations

import json
import os
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

PARTS = ("train", "validation", "test")
WORDS = [f"word{i}" for i in range(64)]


def mnist(folder: Path) -> None:
    """64 images of noise in MNIST's files."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for part in ("train", "t10k"):
        images = struct.pack(">IIII", 0x803, 64, 28, 28) + os.urandom(64 * 28 * 28)
        labels = struct.pack(">II", 0x801, 64) + bytes(i % 10 for i in range(64))
        (raw / f"{part}-images-idx3-ubyte").write_bytes(images)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(labels)


def images(folder: Path) -> None:
    """16 images of noise in two classes, as ImageFolder reads them."""
    from PIL import Image

    for i in range(32):
        file = folder / ("train", "val")[i % 2] / f"class{i // 2 % 2}" / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.frombytes("RGB", (64, 64), os.urandom(64 * 64 * 3)).save(file)


def text(file: Path) -> None:
    """A text of 64 different words."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(" ".join(WORDS) for _ in range(40)) + "\n")


def tokens(folder: Path) -> None:
    """Numbers for nanoGPT."""
    for part in ("train", "val"):
        (folder / f"{part}.bin").write_bytes(bytes(64) * 1024)


def _tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "user", "assistant"]
    words = {word: i for i, word in enumerate([*special, *WORDS])}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    chat = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", eos_token="[SEP]", chat_template=chat
    ).save_pretrained(folder)


def bert(folder: Path) -> None:
    """A BERT of 2 layers, random weights."""
    from transformers import BertConfig, BertForSequenceClassification

    layout = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=128, hidden_size=32, **layout)
    BertForSequenceClassification(config).save_pretrained(folder)
    _tokenizer(folder)


def llama(folder: Path) -> None:
    """A Llama of 2 layers, random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layout = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = LlamaConfig(vocab_size=128, hidden_size=32, eos_token_id=3, pad_token_id=0, **layout)
    LlamaForCausalLM(config).save_pretrained(folder)
    _tokenizer(folder)


def _table(folder: Path, names: Iterable[str], rows: list[dict[str, object]]) -> None:
    folder.mkdir(parents=True)
    for name in names:
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def glue(folder: Path) -> None:
    """Pairs of sentences under the names of MRPC."""
    pairs = [(" ".join(WORDS[i : i + 9]), " ".join(WORDS[i : i + 7]), i % 2) for i in range(48)]
    keys = ("sentence1", "sentence2", "label", "idx")
    rows = [dict(zip(keys, (*pair, i), strict=True)) for i, pair in enumerate(pairs)]
    _table(folder, PARTS, rows)
    files = "".join(f"\n  - {{split: {name}, path: {name}.jsonl}}" for name in PARTS)
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: mrpc\n  data_files:{files}\n---\n"
    )


def metric(folder: Path) -> None:
    """GLUE's metric, which evaluate.load would download as a script."""
    folder.mkdir(parents=True)
    (folder / "glue.py").write_text(METRIC)


def chats(folder: Path) -> None:
    """Conversations for SFT."""
    turns = [{"role": "user", "content": "word1 word2"}, {"role": "assistant", "content": "word3"}]
    _table(folder, ("train", "test"), [{"messages": turns}] * 32)


def pairs(folder: Path) -> None:
    """Preferences for DPO."""
    row = {"prompt": "word1 word2", "chosen": " word3", "rejected": " word4"}
    _table(folder, ("train", "test"), [row] * 32)


METRIC = """
import datasets
import evaluate
class Glue(evaluate.Metric):
    def _info(self):
        number = datasets.Value("int64")
        features = datasets.Features({"predictions": number, "references": number})
        return evaluate.MetricInfo(description="", citation="", features=features)
    def _compute(self, predictions, references):
        same = sum(int(a == b) for a, b in zip(predictions, references))
        return {"accuracy": same / len(references)}
"""
