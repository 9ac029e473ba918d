"""Rollout data: the schema of the TensorDict that a train group trains on.

B rows of T tokens: one row per completion, or several, see ``rollout_ids``. Per-token entries are aligned with their
token: the log-probability at t is that of token t given the tokens before it. Nothing predicts the token at position 0,
so entries there are ignored.

| key | shape, dtype | |
|---|---|---|
| ``input_ids`` | (B, T) int64 | prompt and completion |
| ``attention_mask`` | (B, T) integer or bool | 1 for real tokens, which are contiguous; padding on either side |
| ``loss_mask`` | (B, T) integer, bool or float | 1 for tokens that the policy generated and that count |
| ``rewards`` | (B,) float | of the whole completion; required without ``advantages`` |
| ``group_ids`` | (B,) int64 | shared by the completions of one prompt, see `unique_groups`; required for GRPO |
| ``rewards/NAME`` | (B,) float | one of several rewards of the completion; required for GDPO |
| ``reward_baselines`` | (B,) float | of the prompt's greedy completion; required for ReMax |
| ``rollout_ids`` | (B,) int64 | shared by the rows of one rollout; left out if each rollout is one row |
| ``token_rewards`` | (B, T) float | instead of ``rewards``, for estimators that go from token to token |
| ``truncated`` | (B,) bool | whether the completion has no stop token; required for ``overlong_filtering`` |
| ``advantages`` | (B,) or (B, T) float | instead of ``rewards``, used as they are |
| ``rollout_log_probs`` | (B, T) float | of the tokens, when they were sampled |
| ``sampling_mask`` | (B, jagged) int32 | the tokens that each token was drawn from, one position after the other |
| ``sampling_mask_lengths`` | (B, T) int32 | how many of them each position has; 0 for the whole vocabulary |
| ``routed_experts`` | (B, jagged, layers, k) int16 | of each real token, see `workers.data.routed_experts` |
| ``old_log_probs`` | (B, T) float | of the old policy; computed by default, always for DPO, see `TrainArgs` |
| ``ref_log_probs`` | (B, T) float | of the reference; computed by default |
| ``candidate_ids`` | (B, T, k) int64 | other tokens whose log-probabilities a policy loss reads, see `PolicyTokens` |
| ``candidate_log_probs`` | (B, T, k) float | those of a teacher, for example |
| ``values`` | (B, T) float | the critic's expected return before token t was chosen |
| ``sum_pi_squared`` | (B, T) float | sum of the squares of all tokens' probabilities; computed by default |
| ``weight_versions`` | (B, T) int64, or (B,) | of the weights that generated each token, -1 where none was generated |
| ``weight_fingerprints`` | (B, T) int64 | of these weights, as their engine held them; -1 where it is not known |
| ``min_weight_versions`` | (B,) int64 | the lowest of the row's generated tokens; -1 if there are none |
| ``max_weight_versions`` | (B,) int64 | the highest of them |
| ``record_rows`` | (B,) int64 | the row's number, for rows that `RunLog` records; -1 for others |
| ``record_step`` | (B,) int64 | the step of the run that `RunLog` records them under |
| ``position_ids`` | (B, T) integer | not used: positions count a row's real tokens from 0, and others are an error |

All log-probabilities are of the same distribution: with a ``sampling_mask``, normalized over the tokens that ``top_p``
and ``top_k`` left when the token was drawn, which is what the sampler drew from. The two entries come together, and
prompts and tokens that the policy did not choose have length 0.

A rollout that is several rows, such as a session with branches, has the same ``rewards``, ``rewards/NAME``,
``reward_baselines``, ``group_ids`` and ``truncated`` in each of them, and counts once in statistics of groups and in
the mean reward. Its rows go into the same optimizer step.

Numbers must be finite; per-token numbers only where ``loss_mask`` is not 0. Other entries are kept with their rows.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from dispatch import jagged
from dispatch.batch import share_rows
from single_controller import SingleControllerError
from workers.data.routed_experts import ROUTED_EXPERTS, RoutingShape, wrong_routes

if TYPE_CHECKING:
    import torch

PER_TOKEN = frozenset({"input_ids", "attention_mask", "loss_mask", "rollout_log_probs", "old_log_probs"}) | {
    "ref_log_probs",
    "values",
    "weight_fingerprints",
    "position_ids",
    "sum_pi_squared",
    "sampling_mask_lengths",
    "token_rewards",
}
PER_ROLLOUT = frozenset({"rewards", "reward_baselines", "group_ids", "truncated"})
"""Entries that are the same in all rows of a rollout, besides those of `REWARD_PART`."""
PER_ROW = PER_ROLLOUT | {
    "rollout_ids",
    "min_weight_versions",
    "max_weight_versions",
    "record_rows",
    "record_step",
}
EITHER = frozenset({"advantages", "weight_versions"})
"""Entries with one number per row, or one per token."""

FLOATS = frozenset({"rewards", "advantages", "rollout_log_probs", "old_log_probs", "ref_log_probs", "values"}) | {
    "reward_baselines",
    "sum_pi_squared",
    "token_rewards",
}
REWARD_PART = "rewards/"
"""Prefix of the entries with the single rewards of completions that have several."""

CANDIDATES = frozenset({"candidate_ids", "candidate_log_probs"})
"""Entries with k numbers per token."""
LARGEST_SET = 512
"""Up to how many tokens a set has that is read from the top log-probabilities of vLLM or a server."""
SAMPLING_MASK = ("sampling_mask", "sampling_mask_lengths")
NEEDED = ("input_ids", "attention_mask", "loss_mask")

RECORD_ROWS = "record_rows"
RECORD_STEP = "record_step"

_GROUPS = 2**24
"""How many numbers one result of `unique_groups` is for."""


class RolloutDataError(SingleControllerError, ValueError):
    """Rollout data lacks an entry, or an entry has the wrong shape, dtype or values. Nothing was computed."""


def unique_groups() -> int:
    """Return what to add to the numbers of groups, from 0 on, so that no other rollout has the same ``group_ids``: not
    another call, nor another process or run. Rollouts can then be joined, and their groups stay apart.

    It is random (39 bits), from the operating system and not from a seed that other runs have too. The numbers remain:
    see `group_numbers`.
    """
    return secrets.randbits(39) * _GROUPS


def group_numbers(group_ids: Any) -> Any:
    """Return the numbers of groups: of the prompt in its call of `RolloutManager.generate`, or in a `RolloutStream`'s
    run.

    Args:
        group_ids: of a manager's or a stream's rollout data, (B,) int64, or a list.
    """
    if isinstance(group_ids, (list, tuple)):
        return [number % _GROUPS for number in group_ids]
    return group_ids % _GROUPS


def rollout_numbers(rollout_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number rollouts by their ids, from 0 on, in ascending order.

    Args:
        rollout_ids: (N,) int64, of rows in any order.

    Returns:
        The number of each row's rollout, (N,) int64, and the first row of each rollout, (rollouts,) int64.
    """
    import torch

    ids, numbers = rollout_ids.unique(return_inverse=True)
    rows = torch.arange(len(rollout_ids))
    return numbers, rows.new_full((len(ids),), len(rows)).scatter_reduce(0, numbers, rows, "amin")


def sizes_of_steps(before: int, size: int, steps: int) -> list[int]:
    """Return how many rows of a rank are in each optimizer step. Over all ranks, steps have equally many rows, or one
    more, the first ones first.

    Args:
        before: rows of the ranks before.
        size: rows of the rank.
        steps: number of steps.
    """
    every, rest = divmod(size, steps)
    return [every + ((step - before) % steps < rest) for step in range(steps)]


def step_numbers(numbers: torch.Tensor, rollouts: int, steps: int, order: torch.Tensor | None = None) -> torch.Tensor:
    """Return the number of the optimizer step that each row belongs to: steps get equally many rollouts, or one more,
    the first ones first.

    Args:
        numbers: (B,), of each row's rollout; see `rollout_numbers`.
        rollouts: how many rollouts there are, on all ranks.
        steps: number of steps.
        order: the rollouts in another order, (rollouts,) int64.
    """
    import torch

    sizes = [share.rows for share in share_rows(rollouts, steps, "ragged")]
    of_rollouts = torch.arange(steps).repeat_interleave(torch.tensor(sizes))
    if order is not None:
        of_rollouts = torch.zeros_like(of_rollouts).scatter(0, order, of_rollouts)
    return of_rollouts[numbers]


def of_rollouts(data: Mapping[str, Any], name: str) -> torch.Tensor:
    """Return an entry of `PER_ROLLOUT` once for each rollout of rows that are all there, (rollouts,).

    Args:
        data: the rows.
        name: of the entry.
    """
    value: torch.Tensor = data[name]
    if "rollout_ids" not in data.keys():  # noqa: SIM118  (a TensorDict has no `in`)
        return value
    return value[rollout_numbers(data["rollout_ids"])[1]]


def inputs_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that log-probabilities of the tokens are computed from."""
    names = ("input_ids", "attention_mask", *SAMPLING_MASK, ROUTED_EXPERTS)
    return {name: data[name] for name in names if name in data.keys()}  # noqa: SIM118


def rows_of(data: Any, which: Any) -> Any:
    """Return some rows of a TensorDict or of a dict of tensors; ``which`` is a slice or a list of indices.

    Raises:
        RolloutDataError: an entry has another number of rows than ``input_ids``.
    """
    count = len(data["input_ids"])
    numbers = range(count)[which] if isinstance(which, slice) else which

    def part(name: Any, value: Any) -> Any:
        if isinstance(value, dict):  # several entries, such as what a method of another group has returned
            return {key: part(key, entry) for key, entry in value.items()}
        held = len(value) if isinstance(value, (list, tuple, range)) else next(iter(_shape(value)), count)
        if held != count:
            raise RolloutDataError(f"rollout data: {name} has {held} rows, but input_ids has {count}")
        if isinstance(value, (list, tuple, range)):
            return [value[number] for number in numbers]
        if getattr(value, "is_nested", False):
            return jagged_rows(value, numbers)
        return value[which] if _shape(value) else value  # None, a string, a scalar: not per row

    if isinstance(data, dict):
        return {name: part(name, value) for name, value in data.items()}
    apart = {name: part(name, value) for name, value in data.items() if getattr(value, "is_nested", False)}
    rows = data.exclude(*apart)[which] if apart else data[which]
    return rows.update(apart) if apart else rows


def jagged_rows(value: Any, numbers: Sequence[int]) -> Any:
    """Return some rows of a jagged tensor whose ragged dim is 1. Torch itself would import its compiler for that."""
    import torch

    value = jagged.compact(value, {})
    values, offsets = value.values(), value.offsets().tolist()
    parts = [values[offsets[number] : offsets[number + 1]] for number in numbers]
    ends = [0, *accumulate(map(len, parts))]
    return jagged.build(torch.cat([values[:0], *parts]), torch.tensor(ends, device=values.device), 0)


def is_tensor(name: str) -> bool:
    """Whether an entry of this name is a tensor. Others may be anything, and are not sent to the model."""
    return name in PER_TOKEN | PER_ROW | EITHER | CANDIDATES | {*SAMPLING_MASK} or name.startswith(REWARD_PART)


def require_entries(data: Any, names: Sequence[str] = ()) -> None:
    """Raise a `RolloutDataError` unless data is a mapping that has these entries."""
    if not hasattr(data, "keys"):
        raise RolloutDataError(f"rollout data must be a TensorDict or a dict of tensors, got {type(data).__name__}")
    has = [str(name) for name in data.keys()]  # noqa: SIM118  (a TensorDict iterates over its rows)
    for name in names:
        if name not in has:
            raise RolloutDataError(f"rollout data has no {name!r}; it has {', '.join(has) or 'no entries'}")


def entries_of(data: Any) -> dict[str, Any]:
    """Return rollout data as a dict. An entry that is a dict itself, such as what a method of another group has
    returned, is replaced by its entries.

    Raises:
        RolloutDataError: it is no mapping, or an entry is there twice.
    """
    require_entries(data)
    entries: dict[str, Any] = {}
    for name in data.keys():  # noqa: SIM118  (a TensorDict iterates over its rows)
        entry = data[name]
        several = {str(one): entry[one] for one in entry.keys()} if hasattr(entry, "keys") else {str(name): entry}  # noqa: SIM118
        if twice := entries.keys() & several.keys():
            raise RolloutDataError(f"rollout data has {', '.join(sorted(twice))} twice: also in {str(name)!r}")
        entries |= several
    return entries


def check_rollout_data(
    data: Mapping[str, Any], vocab_size: int | None = None, routing: RoutingShape | None = None
) -> None:
    """Check rollout data against the schema.

    Args:
        data: a TensorDict, or any mapping of tensors; see the module's docstring.
        vocab_size: token ids must be below it; None skips the check.
        routing: what the model chooses experts from; None skips the check of the experts themselves.

    Raises:
        RolloutDataError: an entry is missing or has the wrong shape or dtype, or a mask is invalid; the message names
            it.
    """
    import torch

    require_entries(data)
    data = {str(name): data[name] for name in data.keys()}  # noqa: SIM118  (a TensorDict has no `in`)
    for name, value in data.items():
        if getattr(value, "is_nested", False) and name not in ("sampling_mask", ROUTED_EXPERTS):
            raise RolloutDataError(
                f"rollout data: {name} is a jagged tensor, but train groups take padded ones: for each jagged entry, "
                f"pass torch.nested.to_padded_tensor(data[{name!r}], 0), and an attention_mask that is 1 at real tokens"
            )
    require_entries(data, NEEDED)
    ids = data["input_ids"]
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.dtype != torch.int64:
        raise RolloutDataError(f"rollout data: input_ids must be int64 of shape (rows, tokens), got {_what(ids)}")
    for name, value in data.items():
        if name in PER_TOKEN and _shape(value) != tuple(ids.shape):
            raise RolloutDataError(
                f"rollout data: {name} is {_what(value)}; expected the shape of input_ids, {tuple(ids.shape)}"
            )
        if name in CANDIDATES and (_shape(value)[:2] != tuple(ids.shape) or len(_shape(value)) != 3):
            raise RolloutDataError(
                f"rollout data: {name} is {_what(value)}; expected k numbers per token, {(*ids.shape, 'k')}"
            )
        if (name in PER_ROW or name.startswith(REWARD_PART)) and _shape(value) != (len(ids),):
            raise RolloutDataError(
                f"rollout data: {name} is {_what(value)}; expected one number per row, ({len(ids)},)"
            )
        if name not in PER_TOKEN | PER_ROW and _shape(value)[:1] not in ((), (len(ids),)):
            raise RolloutDataError(f"rollout data: {name} is {_what(value)}, but there are {len(ids)} rows")
        if name in EITHER and _shape(value) not in ((len(ids),), tuple(ids.shape)):
            raise RolloutDataError(
                f"rollout data: {name} is {_what(value)}; expected shape ({len(ids)},) or {tuple(ids.shape)}"
            )
        if is_tensor(name) and not isinstance(value, torch.Tensor):
            raise RolloutDataError(
                f"rollout data: {name} is of type {type(value).__name__}; pass torch.as_tensor() of it"
            )
    if not len(ids):
        return
    counts, real = data["loss_mask"] != 0, data["attention_mask"].bool()
    _check_masks(real, counts)  # first: rows without tokens have no lowest id
    if vocab_size is not None and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise RolloutDataError(
            f"rollout data: input_ids has token ids from {int(ids.min())} to {int(ids.max())}, but vocab_size is "
            f"{vocab_size}"
        )
    if bool((wrong := ~(data["loss_mask"] >= 0) | data["loss_mask"].isinf()).any()):  # NaN too
        row, column = wrong.nonzero()[0].tolist()
        raise RolloutDataError(
            f"rollout data: the loss_mask of row {row} has {data['loss_mask'][row, column].item()}, by which the loss "
            "of that token would be multiplied; expected 0, 1, or a fraction"
        )
    _check_sampling_mask(data, real, vocab_size)
    if ROUTED_EXPERTS in data and (wrong := wrong_routes(data[ROUTED_EXPERTS], real, routing)) is not None:
        raise RolloutDataError(f"rollout data: {ROUTED_EXPERTS} {wrong}")
    if "candidate_ids" in data:
        candidates = data["candidate_ids"]
        if candidates.is_floating_point() or not (
            int(candidates.min()) >= 0 and (vocab_size is None or int(candidates.max()) < vocab_size)
        ):
            raise RolloutDataError(
                f"rollout data: candidate_ids are {_what(candidates)} from {candidates.min()} to {candidates.max()}; "
                f"expected token ids at every position, below {vocab_size or 'the size of the vocabulary'}"
            )
    if "candidate_log_probs" in data and bool(data["candidate_log_probs"][counts].isnan().any()):
        raise RolloutDataError("rollout data: candidate_log_probs has NaN at tokens that count")
    if "position_ids" in data:
        other = real & (data["position_ids"] != real.cumsum(1) - 1)
        if bool(other.any()):
            raise RolloutDataError(
                f"rollout data: position_ids of row {int(other.nonzero()[0, 0])} do not count its real tokens from 0. "
                "Train groups compute positions from attention_mask and use no others; leave position_ids out, and "
                "give each sequence a row of its own"
            )
    if "rollout_ids" in data:
        numbers, first = rollout_numbers(data["rollout_ids"])
        for name in sorted(name for name in data if name in PER_ROLLOUT or name.startswith(REWARD_PART)):
            other = data[name] != data[name][first[numbers]]
            if bool(other.any()):
                row = int(other.nonzero()[0])
                before = int(first[numbers[row]])
                raise RolloutDataError(
                    f"rollout data: {name} of row {row} is {data[name][row].item()}, but that of row {before}, another "
                    f"of this rollout (rollout_ids), is {data[name][before].item()}"
                )
    for name in (FLOATS & data.keys()) | {name for name in data if name.startswith(REWARD_PART)}:
        value = data[name]
        bad = ~value.isfinite() if value.dim() == 1 else (counts & ~value.isfinite()).any(1)
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            which = "is not finite" if value.dim() == 1 else "is not finite at a token that loss_mask counts"
            raise RolloutDataError(f"rollout data: {name} of row {row} {which}, which would make the weights NaN")


def _check_sampling_mask(data: Mapping[str, Any], real: torch.Tensor, vocab_size: int | None) -> None:
    import torch

    given = [name for name in SAMPLING_MASK if name in data]
    if not given:
        return
    if len(given) < len(SAMPLING_MASK):
        raise RolloutDataError(f"rollout data has {given[0]!r} alone; {' and '.join(SAMPLING_MASK)} come together")
    kept, lengths = data["sampling_mask"], data["sampling_mask_lengths"]
    if not kept.is_nested or kept.dim() != 2 or kept.is_floating_point() or lengths.is_floating_point():
        raise RolloutDataError(
            f"rollout data: sampling_mask is {_what(kept)} and sampling_mask_lengths {_what(lengths)}; expected a "
            "jagged tensor with the token ids of each row, and integers"
        )
    kept = jagged.compact(kept, {})
    counted, held = lengths.sum(1), kept.offsets().diff()
    if bool((counted != held).any()) or bool((lengths < 0).any()):
        row = int(((counted != held) | (lengths < 0).any(1)).nonzero()[0])
        raise RolloutDataError(
            f"rollout data: the sampling_mask of row {row} has {int(held[row])} tokens, but its sampling_mask_lengths "
            f"are {int(lengths[row].min())} to {int(lengths[row].max())} and sum to {int(counted[row])}"
        )
    predicted = real & (real.cumsum(1) > 1)
    if bool((lengths * ~predicted).any()):
        row = int((lengths * ~predicted).any(1).nonzero()[0])
        raise RolloutDataError(
            f"rollout data: row {row} has a sampling_mask at padding or at its first token, which was not drawn; set "
            "its sampling_mask_lengths to 0 there"
        )
    values, ends = kept.values(), kept.offsets().tolist()
    if not len(values):
        return
    if int(values.min()) < 0 or (vocab_size is not None and int(values.max()) >= vocab_size):
        raise RolloutDataError(
            f"rollout data: sampling_mask has token ids from {int(values.min())} to {int(values.max())}; expected 0 to "
            f"below {vocab_size or 'the size of the vocabulary'}"
        )
    for row, ids in enumerate(data["input_ids"]):  # one by one: the places of all tokens would be twice the column
        places = torch.arange(len(ids)).repeat_interleave(lengths[row])
        own = lengths[row] == 0
        own[places[values[ends[row] : ends[row + 1]] == ids[places]]] = True
        if not bool(own.all()):
            column = int((~own).nonzero()[0])
            raise RolloutDataError(
                f"rollout data: the token at position {column} of row {row}, {int(ids[column])}, is not in its own "
                "sampling_mask, so it cannot have been drawn from it"
            )


def token_versions(data: Mapping[str, Any]) -> Any:
    """Return ``weight_versions`` per token, (B, T), whichever shape it has; None if the data has none."""
    versions = data.get("weight_versions")
    if versions is None or versions.dim() == 2:
        return versions
    return versions[:, None].expand(data["input_ids"].shape)


def _check_masks(real: torch.Tensor, counts: torch.Tensor) -> None:
    if not bool(real.any(1).all()):
        row = int((~real.any(1)).nonzero()[0])
        raise RolloutDataError(f"rollout data: row {row} has no real token; its attention_mask is all 0")
    begins = real[:, :1].int() + (real[:, 1:] & ~real[:, :-1]).sum(1, keepdim=True)
    if bool((begins > 1).any()):
        row = int((begins > 1).nonzero()[0, 0])
        raise RolloutDataError(
            f"rollout data: row {row} has padding between its tokens; padding may only come before and after them"
        )
    if bool((counts & ~real).any()):
        row = int((counts & ~real).any(1).nonzero()[0])
        raise RolloutDataError(f"rollout data: the loss_mask of row {row} counts padding; set loss_mask to 0 there")
    first = counts.gather(1, real.int().argmax(1, keepdim=True))[:, 0]
    if bool(first.any()):
        raise RolloutDataError(
            f"rollout data: the loss_mask of row {int(first.nonzero()[0])} counts the row's first token, which no "
            "output predicts; set loss_mask to 0 there"
        )


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))


def _what(value: Any) -> str:
    return f"{getattr(value, 'dtype', type(value).__name__)} {_shape(value)}"
