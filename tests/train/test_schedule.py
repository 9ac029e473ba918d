"""Learning rates at the steps that matter, and compared with torch's schedulers; and the bounds of the adaptive KL
coefficient, whose numbers test_peers.py compares with those of other libraries."""

import pytest
import torch

from workers.algorithms.schedule import adaptive_kl_coef, learning_rate


def test_constant_after_warmup():
    rates = [learning_rate(step, lr=1.0, warmup=4) for step in range(6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert learning_rate(0, lr=0.5) == 0.5


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_decay_matches_torch(style):
    """Four warm-up steps; the last one is also the first of 16 decay steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.2)
    if style == "linear":
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=16)
    else:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=16, eta_min=0.02)
    options = {"lr": 0.2, "warmup": 4, "decay_style": style, "decay_steps": 19, "min_lr": 0.02}
    assert [learning_rate(step, **options) for step in range(3)] == pytest.approx([0.05, 0.1, 0.15])
    for step in range(3, 20):
        assert learning_rate(step, **options) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6)
        optimizer.step()
        scheduler.step()
    assert learning_rate(19, **options) == pytest.approx(0.02) == learning_rate(1000, **options)


def test_decay_without_warmup_starts_at_the_maximum():
    rates = [learning_rate(step, lr=1.0, decay_style="linear", decay_steps=4) for step in range(6)]
    assert rates == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


def test_warmup_as_long_as_the_decay():
    rates = [learning_rate(s, lr=1.0, warmup=2, decay_style="cosine", decay_steps=2, min_lr=0.5) for s in range(4)]
    assert rates == [0.5, 1.0, 0.5, 0.5]


def test_adaptive_kl_coef_stays_above_zero():
    """A rollout has more completions than the horizon, in which a multiple of -20 % would change the sign."""
    assert adaptive_kl_coef(1.0, 0.0, target=0.1, horizon=10, completions=1000) == pytest.approx(0.8)
    assert adaptive_kl_coef(1.0, 9.0, target=0.1, horizon=10, completions=1000) == pytest.approx(1.2)
    assert adaptive_kl_coef(1.0, 0.1, target=0.1, horizon=10, completions=1000) == 1.0
