import copy
import pickle
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from k8sjob.runtime.strategies.blocks import find_blocks, prepare_layers, tied


class Language(nn.Module):
    def __init__(self, *, tie=False):
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)])
        self.head = nn.Linear(4, 9, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_the_members_of_containers_are_blocks():
    assert list(find_blocks(Language())) == ["layers.0.0", "layers.1.0", "layers.2.0"]
    assert list(find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))) == [
        "0",
        "2",
    ]
    assert find_blocks(nn.Linear(2, 2)) == {}


def test_patterns_are_names_or_match_whole_names():
    model = Language()
    assert list(find_blocks(model, [r"layers\.\d", "head"])) == [
        "layers.0",
        "layers.1",
        "layers.2",
        "head",
    ]


@pytest.mark.parametrize(
    ("patterns", "detail"),
    [
        (["layer"], "'layer' matches no layer; valid layers: embed, layers, layers.0, "),
        (["layers", r"layers\.1"], "'layers.1' is inside 'layers', which is a block too"),
        (["head"], "embed.weight and head.weight are one parameter and must be in one block"),
    ],
)
def test_blocks_that_cannot_be(patterns, detail):
    with pytest.raises(ValueError, match=re.escape(detail)):
        find_blocks(Language(tie=True), patterns)


def test_a_layer_that_shares_a_parameter_is_no_block_by_itself():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    assert tied(model) == [["0.weight", "2.weight"]]
    assert list(find_blocks(model)) == ["1"]


def gradients(model):
    torch.manual_seed(0)
    model.zero_grad()
    model(torch.arange(8)).square().mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_recomputed_layers_have_the_same_gradients_and_keep_less():
    torch.manual_seed(1)
    model = Language()
    model.layers.append(nn.Dropout(0.5))
    plain, names, kept = gradients(model), list(model.state_dict()), saved(model)
    chosen = {"blocks": [r"layers\.\d"], "checkpoint_activations": True, "compile": False}
    prepare_layers(model, chosen)
    assert torch.equal(gradients(model), plain)
    assert saved(model) < kept
    assert list(model.state_dict()) == names


def saved(model):
    """Bytes that autograd keeps between forward and backward."""
    total = 0

    def pack(tensor):
        nonlocal total
        total += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.arange(800) % 9)
    return total


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_of_compiled_layers_has_weights_of_its_own(monkeypatch, copied, recomputed):
    def compiled(forward):
        return lambda *inputs: forward(*inputs)  # noqa: PLW0108 - a closure, as torch's

    monkeypatch.setattr(torch, "compile", compiled)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    settings = {"blocks": [], "checkpoint_activations": recomputed, "compile": True}
    names = list(model.state_dict())
    prepare_layers(model, settings)
    assert list(model.state_dict()) == names
    other = copied(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert other(torch.ones(2)).tolist() == [0, 0]
    assert model(torch.ones(2)).tolist() != [0, 0]


# Without the generated C++, which takes most of the time and is in tests/dist/test_strategies.py.
COMPILED = """
import functools
import torch
from torch import nn
from k8sjob.runtime.strategies.blocks import prepare_layers

torch.compile = functools.partial(torch.compile, backend="aot_eager")
inputs = torch.randn(5, 4)

def gradients(model):
    model.zero_grad()
    model(inputs).square().mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

for as_one, graphs in {True: 1, False: 10}.items():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(*(nn.Linear(width, width + 2) for width in range(4, 24, 2)))
    plain = gradients(model)
    settings = {"blocks": [], "checkpoint_activations": True, "compile": True}
    prepare_layers(model, settings, as_one=as_one)
    torch.testing.assert_close(gradients(model), plain)
    found = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert found == graphs, (as_one, found)
"""


@pytest.mark.slow
def test_compiled_layers_have_the_same_gradients():
    """As one graph, and as a graph for each block."""
    of_torch = "ignore:The .grad attribute"  # met where a block's input is no leaf
    argv = [sys.executable, "-W", "error", "-W", of_torch, "-c", COMPILED]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
