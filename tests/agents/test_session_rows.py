"""Rows of random sessions: what was sampled is trained once, what was given never, and all fields are aligned."""

import depth
import pytest
from rollout_helpers import kept_sets
from trees import paths, random_tree

from workers.rollout.agents.rows import completion_of, drop_retries, rows, sampled_leaves
from workers.rollout.agents.trajectory import Trajectory
from workers.rollout.engines.rollout_engine import Completion, Row


def masks_of(masks, count):
    """The set at each of ``count`` positions."""
    made = [[]] * count if masks is None else kept_sets(masks)
    assert len(made) == count and (masks is None or sum(masks.lengths) == len(masks.token_ids))
    return made


def expected_rows(tree, kept, rewards=None, discount=1.0):
    """Rows as lists, from the definition: (prompt, [(token, log-prob, version, mask, set, fingerprint, trained)])."""
    owner = {}
    for row, path in enumerate(kept):
        for number in path:
            owner.setdefault(number, row)
    made = []
    for row, path in enumerate(kept):
        prompt, behind = [], []
        for number in path:
            node = tree.nodes[number]
            sets = masks_of(node.sampling_mask, len(node.token_ids))
            for at, token in enumerate(node.token_ids):
                if node.sampled and owner[number] == row:
                    behind.append((token, node.log_probs[at], node.weight_versions[at], 1, sets[at], number))
                elif behind or any(tree.nodes[other].sampled for other in path[: path.index(number) + 1]):
                    behind.append((token, 0.0, -1, 0, [], number))
                else:
                    prompt.append(token)
        made.append((prompt, behind))
    return made


def as_lists(row):
    of = row.completion
    sets = masks_of(of.sampling_mask, len(of.token_ids))
    assert of.rows is None and of.session is None
    return row.prompt, [*zip(of.token_ids, of.log_probs, of.weight_versions, of.loss_mask, sets, strict=True)]


def check_tree(seed):
    tree = random_tree(seed)
    kept = paths(tree)
    assert sampled_leaves(tree) == [path[-1] for path in kept]
    found, expected = rows(tree), expected_rows(tree, kept)
    assert [as_lists(row) for row in found] == [(prompt, [one[:5] for one in of]) for prompt, of in expected]
    # Every sampled token exactly once, and no other.
    trained = sorted((number, token) for _, of in expected for token, *_, mask, _, number in of if mask)
    assert trained == sorted(
        (number, token) for number, node in enumerate(tree.nodes) if node.sampled for token in node.token_ids
    )
    assert sum(sum(row.completion.loss_mask) for row in found) == len(trained)
    for row, path in zip(found, kept, strict=True):
        assert [*row.prompt, *row.completion.token_ids] == tree.token_ids(path[-1])  # exactly what the engine saw
        assert row.prompt and row.completion.finish_reason == tree.nodes[path[-1]].finish_reason
        known = {of for number in path for of in (tree.nodes[number].fingerprints or {}).items()}
        assert set((row.completion.fingerprints or {}).items()) <= known
        for version, mask in zip(row.completion.weight_versions, row.completion.loss_mask, strict=True):
            assert not mask or version is None or row.completion.fingerprints[version] == 1000 + version
    # With some leaves left out, what they alone have is trained nowhere, and what they shared is still trained once.
    some = [path for at, path in enumerate(kept) if (seed >> at) & 1]
    part = rows(tree, [path[-1] for path in some])
    assert [as_lists(row) for row in part] == [
        (prompt, [one[:5] for one in of]) for prompt, of in expected_rows(tree, some)
    ]
    wanted = {number for path in some for number in path if tree.nodes[number].sampled}
    assert sum(sum(row.completion.loss_mask) for row in part) == sum(len(tree.nodes[of].token_ids) for of in wanted)
    check_rewards(tree, some, seed)
    return len(kept)


def check_rewards(tree, kept, seed):
    """The sum from any trained token to its row's end is the return of its turn."""
    turns = sorted({number for path in kept for number in path if tree.nodes[number].sampled})
    rewards = {number: ((seed + number) % 7) / 4 for number in turns if number % 3}
    discount = 1 - (seed % 3) / 4
    made = rows(tree, [path[-1] for path in kept], rewards=rewards, turn_discount=discount)
    for row, (_, behind) in zip(made, expected_rows(tree, kept), strict=True):
        for at, (*_, mask, _, number) in enumerate(behind):
            if mask:
                later = [rewards.get(turn, 0.0) * discount**k for k, turn in enumerate(turns[turns.index(number) :])]
                assert sum(row.completion.token_rewards[at:]) == pytest.approx(sum(later), abs=1e-9)


def test_each_sampled_token_is_trained_once_and_no_given_one():
    counts = [check_tree(seed) for seed in range(10_000 if depth.full else 2_000)]
    assert counts.count(0) and max(counts) >= 5  # sessions without a turn, and with many branches


def test_a_linear_session_is_its_prompt_and_completion():
    """Whatever is given between the prompt and the first turn is behind the prompt, with mask 0."""
    tree = Trajectory()
    at = tree.give(tree.give(None, [1, 2]), [3])
    at = tree.sample(at, Completion([10, 11], [-0.1, -0.2], "stop", [4, 5]))
    at = tree.give(at, [20])
    tree.give(tree.sample(at, Completion([12], [-0.3], "length", [5])), [21, 22])  # a result that no turn followed
    made = completion_of(tree, [1, 2], "stop", info={"reward": 1.0}, rewards={2: 1.0, 4: 2.0}, turn_discount=0.5)
    assert made.rows is None and made.info == {"reward": 1.0} and made.finish_reason == "stop"
    assert made.token_ids == [3, 10, 11, 20, 12] and made.loss_mask == [0, 1, 1, 0, 1]
    assert made.log_probs == [0.0, -0.1, -0.2, 0.0, -0.3] and made.weight_versions == [-1, 4, 5, -1, 5]
    assert made.token_rewards == [0.0, 0.0, 0.0, 0.0, 2.0]  # 1 + 0.5 * 2 = 2 from the first turn on, and 2


def test_completion_has_the_rows_of_the_session():
    for seed in range(200):
        tree = random_tree(seed)
        prompt = list(tree.nodes[0].token_ids)
        made, expected = completion_of(tree, prompt, "stop"), rows(tree)
        if made.rows is not None:
            assert list(made.rows) == expected, seed
        elif not expected:
            assert made.token_ids == [], seed
        else:
            of = Row(prompt, made)
            tokens, mask = [*of.prompt, *made.token_ids], [0] * len(prompt) + list(made.loss_mask)
            whole = Row(expected[0].prompt, expected[0].completion)
            assert len(expected) == 1 and tokens == [*whole.prompt, *whole.completion.token_ids], seed
            assert mask == [0] * len(whole.prompt) + list(whole.completion.loss_mask), seed
            assert len(masks_of(made.sampling_mask, len(made.token_ids))) == len(made.token_ids)


def test_drop_retries():
    """A turn that was sampled again, after the same history or after another result of the tool, replaces the older."""
    tree = Trajectory()
    prompt = tree.give(None, [1])
    once = lambda at: tree.sample(at, Completion([9], [-1.0], "stop", [0]))  # noqa: E731
    first, again = once(prompt), once(prompt)  # the first turn, tried twice
    lost = once(tree.give(again, [2]))
    kept = once(tree.give(again, [3]))  # behind another result of the tool
    subagent = once(tree.give(None, [1, 7]))
    assert sampled_leaves(tree) == [first, lost, kept, subagent]
    assert drop_retries(tree, sampled_leaves(tree)) == [kept, subagent]
    made = rows(tree, drop_retries)
    assert [row.completion.loss_mask for row in made] == [[1, 0, 1], [1]]
    on = once(tree.give(lost, [4]))  # the older one went on after all: its end is no leaf that a retry replaced
    assert drop_retries(tree, sampled_leaves(tree)) == [kept, subagent, on]


def test_bad_leaves_and_rewards():
    tree = Trajectory()
    node = tree.sample(tree.give(None, [1]), Completion([2], [-1.0], "stop", [0]))
    with pytest.raises(ValueError, match=r"0 is not one of the sampled leaves, \[1\]"):
        rows(tree, [0])
    with pytest.raises(ValueError, match="node 0, which was not sampled"):
        rows(tree, rewards={0: 1.0})
    assert rows(tree, []) == [] and node == 1
