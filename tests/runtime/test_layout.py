import re

import pytest
from torch import nn

from k8sjob.runtime.strategies.layout import outputs, parameters


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc11, self.act = nn.Linear(4, 8), nn.Linear(8, 8), nn.ReLU()


def test_a_key_is_a_name_or_matches_a_whole_name():
    assert parameters(Net(), {"fc1.weight": ["model", None]}) == {"fc1.weight": 0}
    found = parameters(Net(), {r"fc\d+\.weight": [None, "model"], r"fc1+\.bias": ["model"]})
    assert found == {"fc1.weight": 1, "fc11.weight": 1, "fc1.bias": 0, "fc11.bias": 0}


def test_a_name_comes_before_regular_expressions():
    layout = {r".*\.weight": [None, "model"], "fc1.weight": ["model", None]}
    assert parameters(Net(), layout) == {"fc1.weight": 0, "fc11.weight": 1}


def test_outputs_of_layers_have_layouts_too():
    layout = {r"(fc1|act)\.output": ["data", "model"], "fc1.bias": [None]}
    assert outputs(Net(), layout) == {"fc1": ["data", "model"], "act": ["data", "model"]}
    assert parameters(Net(), layout) == {}


def test_a_tied_parameter_is_divided_under_all_its_names():
    net = Net()
    net.fc1 = nn.Linear(8, 8)
    net.fc11.weight = net.fc1.weight
    assert parameters(net, {"fc11.weight": ["model", None]}) == {"fc1.weight": 0, "fc11.weight": 0}
    with pytest.raises(ValueError, match=r"fc1.weight and fc11.weight are one parameter"):
        parameters(net, {"fc1.weight": ["model", None], "fc11.weight": [None, "model"]})


@pytest.mark.parametrize(
    ("layout", "detail"),
    [
        (
            {r"fc1\..*t": ["model", None], r"fc.*\.weight": ["model", None]},
            r"'fc1\\..*t' and 'fc.*\\.weight' both match fc1.weight",
        ),
        ({"fc2.weight": ["model", None]}, "'fc2.weight' matches no parameter and no output; valid"),
        ({"fc1.weight": ["model"]}, "fc1.weight has 2 dimensions, and its layout ['model'] has 1"),
        ({"fc1.weight": ["data", None]}, "fc1.weight is a parameter, and those are the same along"),
    ],
)
def test_a_layout_that_does_not_fit_the_model(layout, detail):
    with pytest.raises(ValueError, match=re.escape(detail)):
        parameters(Net(), layout)
