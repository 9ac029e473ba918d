"""Random sessions: trees with tool results, retries, branches, subagents, truncations and compactions."""

import random

from workers.rollout.agents.trajectory import Trajectory
from workers.rollout.engines.rollout_engine import Completion, SamplingMask


def sampled(rng, count, finish_reason="stop", vocab=50, version=None):
    """A completion whose log-probabilities, versions and sampling masks differ at every token."""
    tokens = [rng.randrange(vocab) for _ in range(count)]
    masks = None
    if rng.random() < 0.5:
        masks = SamplingMask.whole(0)
        for token in tokens:
            masks.append([token, *rng.sample(range(vocab), rng.randrange(3))] if rng.random() < 0.8 else ())
    versions = [rng.randrange(9) if rng.random() < 0.9 else None for _ in tokens]
    return Completion(
        tokens,
        [-rng.random() for _ in tokens],
        finish_reason,
        versions if version is None else [version] * count,
        {version: 1000 + version for version in versions if version is not None} or None,
        sampling_mask=masks,
    )


def random_tree(seed, turns=8, vocab=50, prompt=()):
    """A session of up to ``turns`` turns. Some begin behind an older turn (a retry or a branch), behind a shorter
    history (a compaction, or a client that has edited it), or as a new root (a subagent). It begins with ``prompt``, or
    random tokens."""
    rng = random.Random(seed)
    tree = Trajectory()
    given = lambda: [rng.randrange(vocab) for _ in range(rng.randint(1, 4))]  # noqa: E731
    tree.give(None, prompt or given())
    for _ in range(rng.randint(0, turns)):
        kind = rng.random()
        ends = [number for number, node in enumerate(tree.nodes) if node.sampled]
        if kind < 0.5 or not ends:  # the newest path goes on
            at = len(tree.nodes) - 1
        elif kind < 0.75:  # a retry or a branch
            at = rng.randrange(len(tree.nodes))
        else:  # a subagent or a compaction: a new root, with text that may stand for earlier turns
            at = None
        if at is None or tree.nodes[at].sampled or rng.random() < 0.1:
            at = tree.give(at, given())
        if rng.random() < 0.95:  # else a tool's result that no turn follows
            reason = rng.choice(["stop", "stop", "stop", "length", "abort"])
            tree.sample(at, sampled(rng, rng.randint(0 if reason == "abort" else 1, 5), reason, vocab))
    return tree


def paths(tree):
    """By loops: the path to each node with sampled tokens that has no such descendant, oldest first."""

    def up(number):
        return [] if number is None else [*up(tree.nodes[number].parent), number]

    every = [up(number) for number in range(len(tree.nodes))]
    sampled_nodes = [number for number, node in enumerate(tree.nodes) if node.sampled and node.token_ids]
    return [
        every[number]
        for number in sampled_nodes
        if not any(number in every[other] for other in sampled_nodes if other != number)
    ]
