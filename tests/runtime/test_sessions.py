import importlib
import sys
from contextlib import nullcontext

import pytest
import torch

from k8sjob import runtime
from k8sjob.contract import RuntimeConfig
from k8sjob.runtime import sessions
from k8sjob.runtime.base.errors import EnvError

OF_TWO = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def test_a_torch_that_is_too_old_is_refused_before_ranks_meet(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = RuntimeConfig(strategy="fsdp").encode()
    for name, value in {**OF_TWO, "K8SJOB_CONFIG": config}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EnvError) as refused, runtime.session():
        pytest.fail("it began")
    assert "2.6.0 is too old for strategy.kind: fsdp on CPUs" in str(refused.value)


@pytest.mark.parametrize("loaded", [True, False])
def test_triton_comes_before_tensorflow(monkeypatch, tmp_path, loaded):
    for name in ("triton", "tensorflow"):
        (tmp_path / f"{name}.py").touch()
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    if loaded:
        importlib.import_module("tensorflow")
    config = RuntimeConfig(strategy="keras_mesh")
    with pytest.raises(EnvError, match="write `import triton` above") if loaded else nullcontext():
        sessions._check_keras(config)
    assert ("triton" in sys.modules) is not loaded
