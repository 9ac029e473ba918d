"""What an optimizer was made with stays, whatever a checkpoint was written with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import optim

SETTINGS = ("lr", "betas", "eps", "weight_decay")


@contextmanager
def own_settings(*optimizers: optim.Optimizer) -> Iterator[None]:
    """Inside, states of optimizers are loaded; afterwards their groups have the settings that they had before."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    before = [{name: group[name] for name in SETTINGS if name in group} for group in groups]
    yield
    after = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group, own in zip(after, before, strict=True):
        group.update(own)
