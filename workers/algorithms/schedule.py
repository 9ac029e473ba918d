"""Numbers that change during a run: the learning rate of each step, by linear warm-up, then constant, linear or cosine
decay; and the adaptive KL coefficient of each rollout."""

from __future__ import annotations

import math
from typing import Literal

DecayStyle = Literal["constant", "linear", "cosine"]


def learning_rate(
    step: int,
    *,
    lr: float,
    warmup: int = 0,
    decay_style: DecayStyle = "constant",
    decay_steps: int | None = None,
    min_lr: float = 0.0,
) -> float:
    """Return the learning rate of a step.

    It rises linearly, from ``lr / warmup`` at step 0 to ``lr`` at step ``warmup - 1``. Then it decays to ``min_lr`` at
    step ``decay_steps``, and stays there.

    Args:
        step: number of the step, from 0.
        lr: maximum.
        warmup: number of warm-up steps.
        decay_style: "constant" does not decay.
        decay_steps: counted from step 0, warm-up included; at least 1 and ``warmup``, required unless constant.
        min_lr: minimum after the warm-up, at most ``lr``; ignored if constant.
    """
    if step < warmup:
        return lr * (step + 1) / warmup
    if decay_style == "constant" or decay_steps is None:
        return lr
    peak = max(warmup - 1, 0)
    done = min(1.0, (step - peak) / max(decay_steps - peak, 1))
    left = 1 - done if decay_style == "linear" else (1 + math.cos(math.pi * done)) / 2
    return min_lr + (lr - min_lr) * left


def adaptive_kl_coef(coef: float, kl: float, *, target: float, horizon: float, completions: int) -> float:
    """Return the KL coefficient of the next rollout (Ziegler et al. 2019, arXiv 1909.08593, section 2.2, in the form of
    verl and OpenRLHF): it grows while the KL divergence is above the target, and shrinks while it is below.

        coef * (1 + clip(kl / target - 1, -0.2, 0.2) * completions / horizon)

    Args:
        coef: coefficient of this rollout.
        kl: KL divergence of this rollout from the reference, in the same unit as ``target``.
        target: the divergence to keep, above 0.
        horizon: number of completions after which a divergence far from the target has changed the coefficient by 20 %,
            above 0.
        completions: of this rollout. More than ``horizon`` count as ``horizon``, so that the coefficient never changes
            its sign.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * min(completions / horizon, 1.0))
