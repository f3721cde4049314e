"""Texts that took minutes: expressions that read the rest of a text again from each character."""

import re
from functools import partial

import click
import pytest

from k8sjob.cli import options
from k8sjob.image import inventory, layers
from k8sjob.image.registry import client as registry
from k8sjob.kube import capacity
from k8sjob.kube.client import kubectl
from k8sjob.observe.diagnose import containers, finding, output, pod_creation, queue, scheduling
from k8sjob.proving.rules import evaluation
from k8sjob.targets.pytorchjob import job


def selector(text):
    with pytest.raises(click.UsageError):
        options.selector(text)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (capacity.counts_gpus, "a.example" + "/mem" + "/" * 400_000),
        (selector, " \t" * 200_000),
        (kubectl._PLUGIN.search, "%a" * 1_000_000),
        (layers._SHEBANG.match, b"#!" + b"python" * 1_000_000),
        (partial(re.findall, registry._PARAMETER), "a" * 300_000),
        (queue._PREEMPTOR.search, "(UID: " * 400_000),
        (output._NCCL.search, "NCCL error " * 300_000),
        (output._BETWEEN_RANKS.search, "Dist" * 400_000),
        (scheduling._REASONS.findall, "0" * 400_000),
        (scheduling._REASONS.findall, "1 node(s)" + " " * 400_000 + "0" * 400_000 + "\n."),
        (pod_creation._QUOTA.search, "exceeded quota: a, requested: " + ", used: " * 200_000),
        (pod_creation._QUOTA.search, "exceeded quota: " * 200_000),
        (lambda text: containers._NAMES.sub("", text).strip('a"'), 'a"' * 200_000),
        (lambda text: finding.without_replica(text).strip("0"), "0" * 300_000),
        (evaluation._CLOCK.search, "1" + "a1" * 100_000),
        (partial(re.fullmatch, job._EXITED), "Pod: " + "a." * 200_000),
    ],
)
@pytest.mark.timeout(60)
def test_a_long_text_is_read_once(read, text):
    assert not read(text)


def test_a_challenge_and_a_plugin_are_still_understood():
    found = re.findall(registry._PARAMETER, r'realm="https://a/b",service = "c\"d" , scope=e')
    assert found == [("realm", "https://a/b", ""), ("service", r"c\"d", ""), ("scope", "", "e")]
    text = "not logged in\nE0 getting credentials: exec: exit status 1\nmore"
    found = kubectl._PLUGIN.search(text)
    assert (text[: found.start()], found["why"]) == ("not logged in\n", "exec: exit status 1")


@pytest.mark.timeout(60)
def test_many_files_that_a_layer_hides_are_looked_up():
    tree, count = inventory._Tree(), 200_000
    tree.add(inventory.LayerScan(marks={f"a{n}/b/c": "" for n in range(count)}))
    tree.add(inventory.LayerScan(hidden=[f"a{n}" for n in range(1, count)]))
    assert list(tree.marks) == ["a0/b/c"]


def test_what_a_layer_hides():
    tree = inventory._Tree()
    tree.add(inventory.LayerScan(marks=dict.fromkeys(["a", "a/b", "ab", "c", "c/d", "e/f/g"], "")))
    tree.add(inventory.LayerScan(hidden=["a", "c/", "e/f"]))
    assert list(tree.marks) == ["ab", "c"]
