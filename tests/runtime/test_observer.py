"""What is seen of a process from within, without its help."""

from __future__ import annotations

import torch

from k8sjob.runtime.observer import Observer


def test_steps_count_on_from_the_checkpoint_that_was_resumed(monkeypatch):
    """Else a start that got further would look like the one before it, ended at the same step."""
    seer = Observer(None, 1, 0)
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight])
    assert seer.seen.step == -1
    monkeypatch.setattr(Observer, "resumed", 40)
    assert seer.seen.step == -1
    optimizer.step()
    assert seer.seen.step == 40
