"""Rows: what a session's tree of tokens becomes in the rollout data. Pure: it imports neither torch nor Ray.

A row is the path from a root to a leaf. Each sampled token of a kept path is trained in exactly one row, and given
tokens in none. `workers.data.collate` makes rollout data of the rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from workers.rollout.agents.trajectory import Trajectory
from workers.rollout.engines.rollout_engine import Completion, FinishReason, RoutedExperts, Row, SamplingMask

Picker = Callable[[Trajectory, Sequence[int]], Sequence[int]]
"""(trajectory, its leaves, oldest first) -> the leaves to keep."""


def sampled_leaves(trajectory: Trajectory) -> list[int]:
    """Return the sampled nodes behind which nothing was sampled, oldest first. Given tokens behind them, such as the
    result of a tool that no turn followed, are in no row, nor are completions without a token: nothing would be trained
    on them."""
    inner: set[int] = set()
    found = []
    for number in range(len(trajectory.nodes) - 1, -1, -1):  # children come after their parents
        node = trajectory.nodes[number]
        some = node.sampled and len(node.token_ids) > 0
        if some and number not in inner:
            found.append(number)
        if node.parent is not None and (some or number in inner):
            inner.add(node.parent)
    return found[::-1]


def drop_retries(trajectory: Trajectory, leaves: Sequence[int]) -> list[int]:
    """A picker that drops leaves that a retry has replaced: one with a later sibling, which is a turn that began at the
    same place. That is behind the same sampled node, whatever was given in between; the first turns of a session are
    siblings if they have the same prompt."""
    latest: dict[int | None, int] = {}
    for number, node in enumerate(trajectory.nodes):
        if node.sampled and node.token_ids:
            latest[_begin(trajectory, number)] = number
    return [leaf for leaf in leaves if latest[_begin(trajectory, leaf)] == leaf]


def _begin(trajectory: Trajectory, sampled: int) -> int | None:
    """Return the last sampled node before one; for a first turn, its parent."""
    first = here = trajectory.nodes[sampled].parent
    while here is not None:
        if trajectory.nodes[here].sampled:
            return here
        here = trajectory.nodes[here].parent
    return first


def rows(
    trajectory: Trajectory,
    leaves: Sequence[int] | Picker | None = None,
    *,
    rewards: Mapping[int, float] | None = None,
    turn_discount: float = 1.0,
) -> list[Row]:
    """Return one row per kept leaf, oldest first.

    A sampled node on several kept paths is trained in the row of the oldest of them. Elsewhere it is like a given node:
    ``loss_mask`` and log-probability 0, weight version -1, and no entry in the sampling mask. A token of any node has
    the same experts in each row.

    Args:
        trajectory: the tree.
        leaves: which of `sampled_leaves` to keep: their numbers, or a picker; None keeps all.
        rewards: sampled node -> reward of this turn; missing ones are 0. With them, the rows have `token_rewards`:
            behind each turn stands what makes the sum from any of its tokens to the end of the row the turn's return,
            its reward + ``turn_discount`` times the return of the next turn. Turns are in the order in which they were
            sampled, also across rows. Rewards of turns that are not kept do not count.
        turn_discount: of the reward of the next turn.

    Raises:
        ValueError: a leaf is none of `sampled_leaves`, or ``rewards`` has a node that was not sampled.
    """
    known = sampled_leaves(trajectory)
    kept = known if leaves is None else sorted({*(leaves(trajectory, known) if callable(leaves) else leaves)})
    if unknown := {*kept} - {*known}:
        raise ValueError(f"rows(): {min(unknown)} is not one of the sampled leaves, {known}")
    paths = [trajectory.path(leaf) for leaf in kept]
    experts = _experts_of_nodes(trajectory)
    returns = None if rewards is None else _returns(trajectory, paths, rewards, turn_discount)
    trained: set[int] = set()
    made = []
    for path in paths:
        own = {number for number in path if trajectory.nodes[number].sampled} - trained
        trained |= own
        row = _row(trajectory, path, own, returns)
        if experts is not None:
            row = replace(row, completion=replace(row.completion, routed_experts=_joined(experts, path)))
        made.append(row)
    return made


def _experts_of_nodes(trajectory: Trajectory) -> list[RoutedExperts] | None:
    """Return the experts of each node's tokens: those that computed them first, in whichever branch. None if no engine
    has said any."""
    nodes = trajectory.nodes
    first = next((node.routed_experts for node in nodes if node.routed_experts is not None), None)
    if first is None:
        return None
    found = [RoutedExperts.unknown(len(node.token_ids), first.layers, first.k) for node in nodes]
    for number, node in enumerate(nodes):
        if (experts := node.routed_experts) is None:
            continue
        begin = trajectory.length(number) - len(experts)
        for at in reversed(trajectory.path(number)):
            end = trajectory.length(at)
            start = max(begin, end - len(nodes[at].token_ids))
            found[at].fill(len(nodes[at].token_ids) - (end - start), experts.of_tokens(start - begin, end - begin))
            if start == begin:
                break
    return found


def _joined(experts: Sequence[RoutedExperts], path: Sequence[int]) -> RoutedExperts:
    ids = array("h")
    for number in path:
        ids.extend(experts[number].ids)
    return replace(experts[path[0]], ids=ids)


def completion_of(
    trajectory: Trajectory,
    prompt: Sequence[int],
    finish_reason: FinishReason,
    *,
    info: Mapping[str, Any] | None = None,
    rewards: Mapping[int, float] | None = None,
    turn_discount: float = 1.0,
) -> Completion:
    """Return a session as what an engine returns for a prompt.

    If the session is one row that begins with the prompt, the completion is what follows the prompt, and has no
    ``rows``. Otherwise it has `rows`, and its tokens are those of the newest of them. If nothing was sampled, it has no
    tokens: its reward still counts in its group.

    Args:
        trajectory: the tree.
        prompt: the rollout's.
        finish_reason: of the session.
        info: of the session.
        rewards: as for `rows`.
        turn_discount: as for `rows`.
    """
    made = rows(trajectory, rewards=rewards, turn_discount=turn_discount)
    if not made:
        return Completion([], [], finish_reason, info=info)
    last = made[-1]
    if len(made) > 1 or last.prompt[: len(prompt)] != list(prompt):
        return replace(last.completion, finish_reason=finish_reason, info=info, rows=made)
    more, of = last.prompt[len(prompt) :], last.completion
    if more:
        count, masks = len(more), of.sampling_mask
        unknown: list[int | None] = [-1] * count
        of = replace(
            of,
            token_ids=[*more, *of.token_ids],
            log_probs=[0.0] * count + of.log_probs,
            weight_versions=unknown + (of.weight_versions or []),
            loss_mask=[0] * count + [*(of.loss_mask or ())],
            sampling_mask=masks and SamplingMask(masks.token_ids, array("i", [0]) * count + masks.lengths),
            token_rewards=None if of.token_rewards is None else [0.0] * count + [*of.token_rewards],
        )
    return replace(of, finish_reason=finish_reason, info=info)


def _returns(
    trajectory: Trajectory, paths: Sequence[Sequence[int]], rewards: Mapping[int, float], discount: float
) -> dict[int, float]:
    """Return the return of each sampled node of the paths."""
    if wrong := [number for number in rewards if not trajectory.nodes[number].sampled]:
        raise ValueError(f"rows(): rewards has node {wrong[0]}, which was not sampled; a turn's reward is its action's")
    returns: dict[int, float] = {}
    after = 0.0
    for number in sorted({number for path in paths for number in path}, reverse=True):
        if trajectory.nodes[number].sampled:
            after = returns[number] = rewards.get(number, 0.0) + discount * after
    return returns


def _row(trajectory: Trajectory, path: Sequence[int], own: set[int], returns: Mapping[int, float] | None) -> Row:
    """Return the row of a path, in which the nodes ``own`` are trained."""
    nodes = trajectory.nodes
    begin = next(at for at, number in enumerate(path) if nodes[number].sampled)
    behind = path[begin:]
    token_ids: list[int] = []
    log_probs: list[float] = []
    versions: list[int | None] = []
    loss_mask: list[int] = []
    kept = SamplingMask.whole(0)
    fingerprints: dict[int, int] = {}
    for number in behind:
        node, count, trained = nodes[number], len(nodes[number].token_ids), number in own
        token_ids += node.token_ids
        log_probs += node.log_probs if trained else [0.0] * count
        versions += node.weight_versions if trained else [-1] * count
        loss_mask += [int(trained)] * count
        sets = (node.sampling_mask if trained else None) or SamplingMask.whole(count)
        kept.token_ids.extend(sets.token_ids)
        kept.lengths.extend(sets.lengths)
        if trained:
            fingerprints |= node.fingerprints or {}
    masked = any(nodes[number].sampling_mask is not None for number in own)
    return Row(
        [token for number in path[:begin] for token in nodes[number].token_ids],
        Completion(
            token_ids,
            log_probs,
            nodes[path[-1]].finish_reason or "stop",
            versions,
            fingerprints=fingerprints or None,
            loss_mask=loss_mask,
            sampling_mask=kept if masked else None,
            token_rewards=None if returns is None else _token_rewards(trajectory, behind, own, returns),
        ),
    )


def _token_rewards(
    trajectory: Trajectory, behind: Sequence[int], own: set[int], returns: Mapping[int, float]
) -> list[float]:
    """Return rewards whose sum from a token of ``own`` on is the return of its turn."""
    made: list[float] = []
    turns: list[tuple[int, float]] = []  # where each trained turn ends, and its return
    for number in behind:
        made.extend([0.0] * len(trajectory.nodes[number].token_ids))
        if number in own and trajectory.nodes[number].token_ids:
            turns.append((len(made) - 1, returns[number]))
    for (at, of), (_, after) in pairwise([*turns, (0, 0.0)]):
        made[at] = of - after
    return made
