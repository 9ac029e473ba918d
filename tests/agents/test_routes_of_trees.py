"""Experts in the tree of a session: each token has those of its own path, in every row and branch."""

import pickle
import zlib
from array import array

import pytest

from workers.data.collate import collate
from workers.rollout.agents.gateway.gateway import read_node, write_node
from workers.rollout.agents.rows import completion_of, rows
from workers.rollout.agents.trajectory import Trajectory
from workers.rollout.engines.rollout_engine import Completion, RoutedExperts

LAYERS, K = 2, 2


def experts_of(path):
    """What a deterministic model chooses for the last token of a path."""
    number = zlib.crc32(array("i", path).tobytes())
    return [number >> 3 * place & 7 for place in range(LAYERS * K)]


def completion_after(path, token_ids):
    """What an engine returns: experts of all tokens but the last, which it has not computed."""
    whole = [*path, *token_ids]
    ids = [one for end in range(1, len(whole)) for one in experts_of(whole[:end])] + [-1] * LAYERS * K
    return Completion(
        token_ids, [-0.5] * len(token_ids), "stop", routed_experts=RoutedExperts(array("h", ids), LAYERS, K)
    )


def grow(tree, parent, given, *sampled):
    node = tree.give(parent, given)
    return [tree.sample(node, completion_after(tree.token_ids(node), tokens)) for tokens in sampled]


@pytest.fixture
def tree():
    """A prompt, two first turns, of which the first has two second turns, one behind the other's tool result."""
    tree = Trajectory()
    first, _ = grow(tree, None, [1, 2, 3], [4, 5, 6], [4, 9])
    second, _ = grow(tree, first, [7, 8], [10, 11], [12])
    grow(tree, second, [13], [14, 15])
    grow(tree, first, [20], [21])
    return tree


def check(row):
    path, found = row.prompt + row.completion.token_ids, row.completion.routed_experts
    assert len(found) == len(path)
    for at in range(len(path) - 1):
        assert list(found.of_tokens(at, at + 1).ids) == experts_of(path[: at + 1])
    return list(found.of_tokens(len(path) - 1).ids) == [-1] * LAYERS * K


def test_rows_have_the_experts_of_their_tokens(tree):
    made = rows(tree)
    assert len(made) == 4 and all(map(check, made))
    assert all(map(check, rows(tree, leaves=lambda tree, leaves: leaves[1:])))
    data = collate([row.prompt for row in made], [row.completion for row in made])
    assert data["routed_experts"].offsets().diff().tolist() == data["attention_mask"].sum(1).tolist()


def test_nodes_keep_no_experts_twice(tree):
    held = [0 if node.routed_experts is None else len(node.routed_experts) for node in tree.nodes]
    # The first turns have the prompt's, later ones those since the last token that was sampled before.
    assert [length for length in held if length] == [6, 5, 1 + 2 + 2, 1 + 2 + 1, 1 + 1 + 2, 1 + 1 + 1]


def test_trees_travel_with_their_experts(tree):
    for other in (pickle.loads(pickle.dumps(tree)), Trajectory([read_node(write_node(node)) for node in tree.nodes])):
        assert other.nodes == tree.nodes and rows(other) == rows(tree)


def test_session_of_one_row_is_a_completion_with_experts():
    tree = Trajectory()
    grow(tree, None, [1, 2, 3], [4, 9])
    for prompt in ([1, 2, 3], [1]):
        made = completion_of(tree, prompt, "stop")
        assert made.rows is None and len(made.routed_experts) == len(prompt) + len(made.token_ids)
        assert collate([prompt], [made])["routed_experts"].values().shape == (5, LAYERS, K)


def test_a_token_has_the_first_experts_that_computed_it():
    """Two branches behind one given node, which an engine with noise computed differently."""
    tree = Trajectory()
    _, other = grow(tree, None, [1, 2], [3], [4])
    noisy = tree.nodes[other].routed_experts
    noisy.ids[0] = 99
    first, second = rows(tree)
    assert first.completion.routed_experts.ids[0] == second.completion.routed_experts.ids[0] == experts_of([1])[0]


def test_branches_without_experts_leave_the_choice_to_the_router():
    tree = Trajectory()
    node = tree.give(None, [1, 2])
    tree.sample(node, completion_after([1, 2], [3, 4]))
    tree.sample(tree.give(None, [5]), Completion([6, 7], [0.0, 0.0], "stop"))
    assert rows(tree)[1].completion.routed_experts == RoutedExperts.unknown(3, LAYERS, K)


def test_experts_of_another_path_are_refused():
    tree = Trajectory()
    node = tree.give(None, [1, 2])
    with pytest.raises(ValueError, match="experts of all 4 tokens of its path, and got those of 3"):
        tree.sample(node, completion_after([1], [3, 4]))
    with pytest.raises(ValueError, match=r"row 0 has routed_experts of 3 tokens; .* its prompt and its token_ids, 4"):
        collate([[1, 2]], [completion_after([1], [3, 4])])
