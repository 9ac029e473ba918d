"""Rollout data: what a train group is given to learn from, one TensorDict, and what it must look like.

B rows (one for each answer) of T tokens. What is per token stands at the token that it is about: the log-probability
at t is that of token t given those before it. Position 0 is never predicted, and means nothing there.

| key | shape, dtype | |
|---|---|---|
| ``input_ids`` | (B, T) int64 | prompt and answer |
| ``attention_mask`` | (B, T) integer or bool | 1 for real tokens, which stand together; padding on either side |
| ``loss_mask`` | (B, T) integer, bool or float | 1 for tokens that the policy chose and that count |
| ``rewards`` | (B,) float | of the whole answer; needed unless there are ``advantages`` |
| ``group_ids`` | (B,) int64 | answers to the same prompt share it; needed for GRPO |
| ``advantages`` | (B,) or (B, T) float | instead of ``rewards``, taken as they are |
| ``rollout_log_probs`` | (B, T) float | of the tokens, when they were sampled |
| ``old_log_probs`` | (B, T) float | of the policy that the ratio is to; by default it is computed, see `TrainArgs` |
| ``ref_log_probs`` | (B, T) float | of the reference; by default it is computed |
| ``values`` | (B, T) float | the critic's: what it expects before token t was chosen |
| ``weight_versions`` | (B,) int64 | of the weights that generated the row |

Numbers are finite, those per token where ``loss_mask`` counts them. Other entries stay with their rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from single_controller import SingleControllerError

if TYPE_CHECKING:
    import torch

PER_TOKEN = frozenset({"input_ids", "attention_mask", "loss_mask", "rollout_log_probs", "old_log_probs"}) | {
    "ref_log_probs",
    "values",
}
PER_ROW = frozenset({"rewards", "group_ids", "weight_versions"})
FLOATS = frozenset({"rewards", "advantages", "rollout_log_probs", "old_log_probs", "ref_log_probs", "values"})
NEEDED = ("input_ids", "attention_mask", "loss_mask")


class RolloutDataError(SingleControllerError, ValueError):
    """Rollout data lacks something, or has it in another shape than it should; nothing was computed."""


def rows_of(data: Any, which: Any) -> Any:
    """Some rows of a TensorDict or of a dict of tensors; ``which`` is a slice or a list of numbers."""
    if not isinstance(data, dict):
        return data[which]
    numbers = range(len(data["input_ids"]))[which] if isinstance(which, slice) else which

    def part(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [value[number] for number in numbers]
        return value[which] if _shape(value) else value  # None, a string, a single number: whole everywhere

    return {name: part(value) for name, value in data.items()}


def check_rollout_data(data: Mapping[str, Any], vocab_size: int | None = None) -> None:
    """Check what `TrainWorker.train` is about to learn from.

    Args:
        data: a TensorDict, or any mapping of tensors; see this file's docstring.
        vocab_size: token ids are below it, where it is given.

    Raises:
        RolloutDataError: an entry is missing, has another shape or dtype, or a mask does not make sense; the message
            names it.
    """
    import torch

    for name in NEEDED:
        if name not in data.keys():  # noqa: SIM118  (a TensorDict has no `in`)
            raise RolloutDataError(
                f"rollout data has no {name!r}, only {', '.join(map(str, data.keys())) or 'nothing'}"
            )
    ids = data["input_ids"]
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.dtype != torch.int64:
        raise RolloutDataError(f"rollout data: input_ids is (rows, tokens) of int64, got {_what(ids)}")
    for name in data.keys():  # noqa: SIM118
        value = data[name]
        if name in PER_TOKEN and _shape(value) != tuple(ids.shape):
            raise RolloutDataError(f"rollout data: {name} is {_what(value)}, input_ids {tuple(ids.shape)}: it is alike")
        if name in PER_ROW and _shape(value) != (len(ids),):
            raise RolloutDataError(
                f"rollout data: {name} is {_what(value)}; it has one number for each row: ({len(ids)},)"
            )
        if name not in PER_TOKEN | PER_ROW and _shape(value)[:1] not in ((), (len(ids),)):
            raise RolloutDataError(f"rollout data: {name} is {_what(value)}, and there are {len(ids)} rows")
        if name == "advantages" and _shape(value) not in ((len(ids),), tuple(ids.shape)):
            raise RolloutDataError(
                f"rollout data: advantages is {_what(value)}; it is ({len(ids)},) or {tuple(ids.shape)}"
            )
    if not len(ids):
        return
    if vocab_size is not None and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise RolloutDataError(
            f"rollout data: input_ids has tokens from {int(ids.min())} to {int(ids.max())}; vocab_size is {vocab_size}"
        )
    counts = data["loss_mask"] != 0
    _check_masks(data["attention_mask"].bool(), counts)
    for name in FLOATS & set(map(str, data.keys())):
        value = data[name]
        bad = ~value.isfinite() if value.dim() == 1 else (counts & ~value.isfinite()).any(1)
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            which = "is not finite" if value.dim() == 1 else "is not finite at a token that loss_mask counts"
            raise RolloutDataError(f"rollout data: {name} of row {row} {which}; one such number would spoil the model")


def _check_masks(real: torch.Tensor, counts: torch.Tensor) -> None:
    if not bool(real.any(1).all()):
        row = int((~real.any(1)).nonzero()[0])
        raise RolloutDataError(f"rollout data: row {row} has no real token: its attention_mask is all 0")
    begins = real[:, :1].int() + (real[:, 1:] & ~real[:, :-1]).sum(1, keepdim=True)
    if bool((begins > 1).any()):
        row = int((begins > 1).nonzero()[0, 0])
        raise RolloutDataError(f"rollout data: row {row} has padding between its tokens; padding stands on either side")
    if bool((counts & ~real).any()):
        row = int((counts & ~real).any(1).nonzero()[0])
        raise RolloutDataError(f"rollout data: the loss_mask of row {row} counts padding")
    first = counts.gather(1, real.int().argmax(1, keepdim=True))[:, 0]
    if bool(first.any()):
        raise RolloutDataError(
            f"rollout data: the loss_mask of row {int(first.nonzero()[0])} counts the row's first token, which nothing "
            "predicts: begin one later"
        )


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))


def _what(value: Any) -> str:
    return f"{getattr(value, 'dtype', type(value).__name__)} {_shape(value)}"
