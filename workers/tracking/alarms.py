"""Alarms: what a run's metrics say of a run that goes wrong. Pure: it gets numbers and times, and returns what to say.

An alarm is raised when its condition begins to hold, and again only after the condition has not held for `CALM` steps.
The rules compare a run with itself; their thresholds are constants of this file.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

CALM = 20
"""Number of steps without its condition after which an alarm can be raised again."""

WINDOW = 10
"""Number of steps of which a mean is taken."""

SOLVED = 0.95
"""A task is solved if the mean reward is this share of the way from the lowest to the highest reward of any row so far.
An entropy of zero is then what training should lead to."""

STALL_FACTOR, STALL_SECONDS = 10.0, 120.0
"""There is no progress if a step takes longer than both the median step times the factor, and the seconds."""

DISK_SHARE, DISK_BYTES = 0.02, 2 << 30
"""A disk is nearly full if less than the smaller of both is free."""


class Alarm(NamedTuple):
    """Something to look at.

    Attributes:
        name: of the rule.
        text: what was seen, with numbers.
        advice: what to look at.
    """

    name: str
    text: str
    advice: str


class Alarms:
    """The rules, and what they need to remember of a run.

    Args:
        max_staleness: the bound of an asynchronous run, in versions; 0 if there is none.
    """

    def __init__(self, max_staleness: int = 0) -> None:
        self._bound = max_staleness
        self._series: dict[str, deque[float]] = {}
        self._calm: dict[str, int] = {}  # name of a raised alarm -> steps for which its condition has not held
        self._times: deque[float] = deque(maxlen=21)
        self._at_bound = 0
        self._jumped = 0
        self._first_entropy: float | None = None
        self._lowest, self._highest = math.inf, -math.inf  # reward of any row

    def step(self, metrics: Mapping[str, float], now: float) -> list[Alarm]:
        """Return the alarms of a step that was logged.

        Args:
            metrics: the step's.
            now: in seconds.
        """
        self._times.append(now)
        found = {alarm.name: alarm for alarm in self._of_step(metrics)}
        for name in [name for name in self._calm if name not in ("no_progress", "disk_full")]:
            self._calm[name] = 0 if name in found else self._calm[name] + 1
            if self._calm[name] >= CALM:
                del self._calm[name]
        self._calm.pop("no_progress", None)
        return self._new(found)

    def tick(self, now: float, free: int, size: int) -> list[Alarm]:
        """Return the alarms that need no step. Call it every few seconds.

        Args:
            now: in seconds, of the clock of `step`.
            free: free bytes of the run folder's disk.
            size: of the disk.
        """
        found = {}
        if len(self._times) > 3:
            times = list(self._times)
            usual = median(later - before for before, later in pairwise(times))
            waited = now - times[-1]
            if waited > max(STALL_SECONDS, STALL_FACTOR * usual):
                found["no_progress"] = Alarm(
                    "no_progress",
                    f"no step was logged for {waited:.0f} s; steps took {usual:.1f} s",
                    "`python -m single_controller status` shows what each rank runs, `stacks GROUP` where it is",
                )
        least = min(DISK_SHARE * size, DISK_BYTES)
        if free < least:
            found["disk_full"] = Alarm(
                "disk_full",
                f"{free / 2**30:.2f} GiB of {size / 2**30:.1f} GiB are free on the run folder's disk",
                "delete old checkpoints (save_keep) or samples; without space, checkpoints fail",
            )
        elif free > 2 * least:
            self._calm.pop("disk_full", None)
        return self._new(found)

    def _new(self, found: Mapping[str, Alarm]) -> list[Alarm]:
        new = [alarm for name, alarm in found.items() if name not in self._calm]
        self._calm |= dict.fromkeys((alarm.name for alarm in new), 0)
        return new

    def _of_step(self, metrics: Mapping[str, float]) -> Iterator[Alarm]:
        if not math.isfinite(metrics.get("grad_norm", 0.0)):
            yield Alarm(
                "grad_norm",
                f"the gradient norm is {metrics['grad_norm']}; the optimizer step was skipped",
                "rewards and log-probabilities that are not finite, the learning rate, and clip_grad",
            )
        rewards = self._last("reward", metrics)
        yield from self._reward(rewards)
        self._lowest = min(self._lowest, metrics.get("reward/min", math.inf))
        self._highest = max(self._highest, metrics.get("reward/max", -math.inf))
        yield from self._entropy(self._last("entropy", metrics), rewards)
        yield from self._difference(self._last("rollout_log_prob_diff", metrics))
        yield from self._staleness(metrics)

    def _last(self, name: str, metrics: Mapping[str, float]) -> list[float]:
        """Return the latest values of a metric; [] if this step does not have it."""
        value = metrics.get(name)
        if value is None or not math.isfinite(value):
            return []
        series = self._series.setdefault(name, deque(maxlen=200))
        series.append(value)
        return list(series)

    def _reward(self, rewards: list[float]) -> Iterator[Alarm]:
        if len(rewards) < 3 * WINDOW:
            return
        sums = [sum(rewards[:WINDOW])]
        for later, before in zip(rewards[WINDOW:], rewards, strict=False):
            sums.append(sums[-1] + later - before)
        means = [one / WINDOW for one in sums]
        best = max(range(len(means) - WINDOW), key=means.__getitem__)
        drop = means[best] - means[-1]
        # Twice the variance of one step's noise is the mean square of what changes from step to step.
        noise = fmean((later - before) ** 2 for before, later in pairwise(rewards)) / 2
        error = math.sqrt(2 * noise / WINDOW)
        lowest = min(rewards[: best + WINDOW])
        if drop > max(6 * error, 0.5 * (means[best] - lowest), 0.3 * abs(means[best])):
            yield Alarm(
                "reward",
                f"the reward fell to {means[-1]:.3g}, the mean of {WINDOW} steps, from {means[best]:.3g}",
                "entropy, kl and grad_norm of the steps before; the samples of the last step; an earlier checkpoint",
            )

    def _solved(self, rewards: list[float]) -> bool:
        """Whether rows of the latest steps have the highest reward that any row ever had, but for a few.

        If no row was ever better than another, nothing is known of what the task gives, and it is not solved.
        """
        span = self._highest - self._lowest
        return (
            len(rewards) > 0
            and 0 < span < math.inf
            and (fmean(rewards[-WINDOW // 2 :]) >= self._lowest + SOLVED * span)
        )

    def _entropy(self, entropies: list[float], rewards: list[float]) -> Iterator[Alarm]:
        if len(entropies) == WINDOW:
            self._first_entropy = fmean(entropies)
        if self._first_entropy is None or len(entropies) < 2 * WINDOW:
            return
        latest = fmean(entropies[-WINDOW // 2 :])
        if latest < 0.02 * self._first_entropy and not self._solved(rewards):
            yield Alarm(
                "entropy",
                f"the entropy is {latest:.2g} nats, {latest / self._first_entropy:.1%} of that of the first steps",
                "completions of one prompt may all be equal, so that nothing more is learned; entropy_coef, the "
                "temperature and the learning rate",
            )

    def _difference(self, differences: list[float]) -> Iterator[Alarm]:
        if len(differences) <= WINDOW:
            return
        usual = median(differences[-51:-1])
        self._jumped = self._jumped + 1 if differences[-1] > max(5 * usual, 0.02) else 0
        if self._jumped >= 2:
            yield Alarm(
                "log_prob_difference",
                f"the log-probabilities of trainer and engine differ by {differences[-1]:.3g} nats, {usual:.3g} before",
                "the last weight update and its proof (update_weights_verify), the sampling parameters, and staleness",
            )

    def _staleness(self, metrics: Mapping[str, float]) -> Iterator[Alarm]:
        # With a bound of 1 all tokens are one version old: that is the mode, and no alarm.
        if self._bound < 2 or "staleness/mean" not in metrics:
            return
        self._at_bound = self._at_bound + 1 if metrics["staleness/mean"] >= 0.95 * self._bound else 0
        if self._at_bound >= CALM:
            yield Alarm(
                "staleness",
                f"for {self._at_bound} steps, tokens are {metrics['staleness/mean']:.2g} versions old, at the bound of "
                f"{self._bound}",
                "training is slower than the rollout, whose workers wait: move ranks from the rollout to training",
            )
