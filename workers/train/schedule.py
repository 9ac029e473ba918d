"""The learning rate of each step: warm-up, then constant, or down by a line or a cosine."""

from __future__ import annotations

import math
from typing import Literal, get_args

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
    """The learning rate of a step.

    It rises by a line, ``lr / warmup`` in the first step and ``lr`` in step number ``warmup - 1``; from there it falls
    until it is ``min_lr`` in step ``decay_steps``, and stays there.

    Args:
        step: the step's number, from 0.
        lr: the highest.
        warmup: steps of the rise; 0 for none.
        decay_style: "constant" does not fall.
        decay_steps: counted from step 0, the warm-up included; needed unless it is constant.
        min_lr: the lowest, after the rise; not used if it is constant.

    Raises:
        ValueError: a number makes no sense, is missing, or there is no such style.
    """
    if step < 0 or warmup < 0:
        raise ValueError(f"learning_rate: step={step!r} and warmup={warmup!r} are from 0")
    if decay_style not in get_args(DecayStyle):
        raise ValueError(f"learning_rate: decay_style={decay_style!r}; it is one of {', '.join(get_args(DecayStyle))}")
    if not 0 <= min_lr <= lr and decay_style != "constant":
        raise ValueError(f"learning_rate: min_lr={min_lr!r} is not from 0 to lr={lr!r}")
    if decay_style != "constant" and (decay_steps is None or decay_steps < max(warmup, 1)):
        raise ValueError(
            f"learning_rate: decay_steps={decay_steps!r}: with decay_style={decay_style!r} it is from 1, and from "
            f"warmup={warmup!r}, which it includes"
        )
    if step < warmup:
        return lr * (step + 1) / warmup
    if decay_style == "constant" or decay_steps is None:
        return lr
    peak = max(warmup - 1, 0)
    done = min(1.0, (step - peak) / max(decay_steps - peak, 1))
    left = 1 - done if decay_style == "linear" else (1 + math.cos(math.pi * done)) / 2
    return min_lr + (lr - min_lr) * left
