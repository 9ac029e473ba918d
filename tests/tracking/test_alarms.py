"""Series of metrics that must raise an alarm, and others that must not."""

import math
import random

import pytest

from workers.tracking.alarms import CALM, Alarms

GIB = 2**30


def raised(series, *, bound=0, name="reward", every=1.0):
    """The alarms of a series: (step, name)."""
    alarms = Alarms(bound)
    return [
        (step, alarm.name)
        for step, value in enumerate(series)
        for alarm in alarms.step(value if isinstance(value, dict) else {name: value}, step * every)
    ]


def noisy(values, sigma, seed=0):
    draw = random.Random(seed)
    return [value + draw.gauss(0, sigma) for value in values]


LEARNS = [0.9 * (1 - math.exp(-step / 40)) for step in range(150)]


@pytest.mark.parametrize("sigma", [0.0, 0.02, 0.1])
def test_reward_that_collapses_raises_one_alarm(sigma):
    for seed in range(10):
        found = raised(noisy([*LEARNS, *([0.05] * 60)], sigma, seed))
        assert [name for _, name in found] == ["reward"] and 150 < found[0][0] < 165, seed


@pytest.mark.parametrize(
    "series",
    [
        [0.5] * 300,
        LEARNS,
        [0.0] * 200,
        [0.9 * math.sin(step / 100 * math.pi / 2) for step in range(100)],
        [*LEARNS, *[0.9 - 0.002 * step for step in range(75)]],  # it declines slowly, by a sixth
        [-1 + 0.005 * step for step in range(200)],
    ],
    ids=["constant", "learns", "zero", "rises", "declines", "negative"],
)
def test_reward_without_a_collapse_raises_none(series):
    assert [raised(noisy(series, 0.1, seed)) for seed in range(10)] == [[]] * 10


def test_single_bad_step_raises_none():
    series = [*LEARNS, 0.0, *([0.88] * 30)]
    assert raised(series) == []


def test_entropy():
    assert raised([2.0] * 30 + [0.01] * 30, name="entropy") == [(34, "entropy")]
    assert raised([2.0 * 0.99**step for step in range(200)], name="entropy") == []
    assert raised([0.5] * 100, name="entropy") == []


def collapsed(rewards, rows=lambda reward: (0.0, 1.0)):
    """The alarms of entropy, of a run whose entropy falls to 0.5 % from step 30 on."""
    series = []
    for step, reward in enumerate(rewards):
        series.append({"entropy": 2.0 if step < 30 else 0.01, "reward": reward})
        if rows is not None:
            series[-1] |= zip(("reward/min", "reward/max"), rows(reward), strict=True)
    return [found for found in raised(series) if found[1] == "entropy"]


LEARNED = [min(1.0, step / 30) for step in range(60)]


def test_entropy_of_a_solved_task_raises_none():
    assert collapsed(LEARNED) == []
    assert collapsed([0.98 * reward for reward in LEARNED]) == []  # but for a few rows
    assert collapsed([reward - 1 for reward in LEARNED], lambda reward: (-1.0, 0.0)) == []
    assert collapsed(LEARNED, lambda reward: (reward, reward) if reward == 1 else (0.0, 1.0)) == []


@pytest.mark.parametrize(
    ("rewards", "rows"),
    [
        ([min(0.5, step / 30) for step in range(60)], lambda reward: (0.0, 1.0)),  # at half of what some rows got
        ([0.0] * 60, lambda reward: (0.0, 0.0)),  # no row was ever better than another
        ([0.0] * 60, lambda reward: (0.0, 1.0)),
        (LEARNED, None),  # rewards of rows are not known
        ([*LEARNED[:30], *([0.9] * 30)], lambda reward: (reward, reward) if reward == 0.9 else (0.0, 1.0)),
    ],
    ids=["half", "nothing", "low", "unknown", "equal"],
)
def test_entropy_collapses_below_the_best_reward(rewards, rows):
    assert collapsed(rewards, rows) == [(34, "entropy")]


def test_reward_that_falls_after_the_task_was_solved_raises_the_alarm():
    assert [step for step, _ in collapsed([*LEARNED, *([0.2] * 30)])] == [60]


def test_log_prob_difference():
    assert raised([0.01] * 40 + [0.5] * 40, name="rollout_log_prob_diff") == [(41, "log_prob_difference")]
    assert raised([0.01] * 40 + [0.5] + [0.01] * 40, name="rollout_log_prob_diff") == []  # once is chance
    assert raised([1e-7] * 40 + [1e-3] * 40, name="rollout_log_prob_diff") == []  # still tiny
    grows = [0.01 * 1.02**step for step in range(150)]
    assert raised(grows, name="rollout_log_prob_diff") == []


def test_staleness_at_its_bound_for_long():
    at_bound = [{"staleness/mean": 4.0}] * 30
    assert raised(at_bound, bound=4) == [(CALM - 1, "staleness")]
    assert raised([{"staleness/mean": 3.0}] * 100, bound=4) == []
    assert raised([*at_bound[:15], {"staleness/mean": 2.0}, *at_bound[:15]], bound=4) == []
    assert raised([{"staleness/mean": 1.0}] * 100, bound=1) == []  # one step off is what that mode does
    assert raised(at_bound, bound=0) == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gradient_norm_that_is_not_finite(value):
    assert raised([1.0, value, 1.0], name="grad_norm") == [(1, "grad_norm")]
    assert raised([1.0] * 100, name="grad_norm") == []


def test_no_storm():
    """An alarm whose condition comes and goes is raised once, and again after it was quiet for long."""
    flapping = [math.nan, 1.0] * 100
    assert raised(flapping, name="grad_norm") == [(0, "grad_norm")]
    again = [math.nan, *([1.0] * (CALM + 1)), math.nan]
    assert raised(again, name="grad_norm") == [(0, "grad_norm"), (CALM + 2, "grad_norm")]


def test_no_progress():
    alarms = Alarms()
    for step in range(10):
        assert alarms.step({}, 30.0 * step) == []
    ticks = [(now, alarm.name) for now in range(270, 900, 2) for alarm in alarms.tick(now, GIB * 100, GIB * 1000)]
    assert ticks == [(572, "no_progress")]  # ten times 30 s after the last step, once
    assert alarms.step({}, 900.0) == []
    assert alarms.tick(1000, GIB * 100, GIB * 1000) == []
    assert [alarm.name for alarm in alarms.tick(1300, GIB * 100, GIB * 1000)] == ["no_progress"]  # the next stall


def test_short_steps_may_pause():
    """Steps of a second that stop for a minute, as for a checkpoint, are no alarm."""
    alarms = Alarms()
    for step in range(50):
        alarms.step({}, float(step))
    assert not [alarm for now in range(50, 165) for alarm in alarms.tick(now, GIB * 100, GIB * 1000)]
    assert [alarm.name for alarm in alarms.tick(200, GIB * 100, GIB * 1000)] == ["no_progress"]


def test_a_run_that_has_not_begun_is_no_alarm():
    assert Alarms().tick(1e6, GIB * 100, GIB * 1000) == []


def test_disk_nearly_full():
    alarms = Alarms()
    free = [100, 10, 3, 1.5, 1.4, 2.1, 1.9, 1, 5, 1]
    found = [value for value in free if alarms.tick(0.0, int(value * GIB), 1000 * GIB)]
    assert found == [1.5, 1]  # again only after there was twice as much
    assert [alarm.name for alarm in Alarms().tick(0.0, GIB // 10, 10 * GIB)] == ["disk_full"]  # a small disk: 2 %
    assert Alarms().tick(0.0, GIB, 10 * GIB) == []
