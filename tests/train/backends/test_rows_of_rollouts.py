"""Rollouts of several rows on two data-parallel ranks: their gradient is that of the trees of tokens, wherever the rows
are, and optimizer steps have whole rollouts."""

import pytest
from reference import small_llama
from test_both_backends import DP2, FSDP2, called
from test_gradients import EXPOSED
from test_tree_gradients import of_trees, rollout_data, sessions
from train_helpers import distance, learn, whole_weights

from workers.data.rollout_data import of_rollouts, rows_of


@pytest.fixture(scope="module")
def made():
    return sessions()


@pytest.mark.parametrize(
    ("way", "options"),
    [
        (FSDP2, {"max_tokens_per_micro_batch": 40}),  # uneven numbers of micro-batches, so fillers
        (FSDP2, {"sequence_packing": False, "balance_data": True, "loss_aggregation": "sequence"}),
        pytest.param(DP2, {"loss_aggregation": "sequence"}, marks=pytest.mark.full("rows of rollouts on Megatron")),
    ],
    ids=called,
)
def test_gradient_is_that_of_the_trees(start, made, way, options):
    expected = of_trees(small_llama().double(), made, options.get("loss_aggregation", "token"))
    group = start(way, **EXPOSED, **options)
    before, data = whole_weights(group), rollout_data(made)
    metrics = learn(group, 0, data)
    after = whole_weights(group)
    assert distance({name: before[name] - after[name] for name in before}, expected) < 1e-5
    assert metrics["reward"] == pytest.approx(float(of_rollouts(data, "rewards").mean()))
    assert metrics["rows_per_rollout"] == pytest.approx(len(data) / len(made))


def test_steps_do_not_depend_on_where_the_rows_are(start, made):
    """Three steps of whole rollouts; a rank has no row of some step when the rows are not balanced."""
    data, found = rollout_data(made), []
    order = [3 * k % len(data) for k in range(len(data))]
    assert len({*order}) == len(data)
    for rows, balance in ((data, False), (rows_of(data, order), False), (rows_of(data, order), True)):
        options = {"num_steps_per_rollout": 3, "loss_aggregation": "sequence", "balance_data": balance}
        group = start(FSDP2, **EXPOSED, **options)
        metrics = learn(group, 0, rows)
        found.append((whole_weights(group), metrics["loss"]))
    before = whole_weights(start(FSDP2))
    for weights, loss in found[1:]:
        assert loss == pytest.approx(found[0][1], abs=1e-5)
        assert distance(weights, found[0][0]) < 1e-5
    assert distance(found[0][0], before) > 1e-2
