"""Collate completions into rollout data: one TensorDict in the schema of `workers.train.rollout_data`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from workers.rollout.engine import Completion

if TYPE_CHECKING:
    from tensordict import TensorDict


def collate_completions(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    *,
    group_ids: Sequence[int],
    weight_versions: Sequence[int],
    rewards: Sequence[float] | None = None,
    pad_token_id: int = 0,
) -> TensorDict:
    """Build one row per completion: the left-padded prompt, then the right-padded completion. All completions begin at
    the same column.

    Args:
        prompts: token ids of each row's prompt.
        completions: of each row.
        group_ids: of each row; completions for the same prompt share it.
        weight_versions: of each row.
        rewards: of each row, if there are any.
        pad_token_id: the padding token.

    Returns:
        ``input_ids``, ``attention_mask`` and ``loss_mask`` (int64), ``rollout_log_probs`` (float32), each
        (rows, longest prompt + longest completion). ``group_ids``, ``weight_versions``, ``prompt_lengths``,
        ``completion_lengths`` (int64), ``truncated`` (bool: no stop token) and ``rewards`` (float32), each (rows,).
    """
    import torch
    from tensordict import TensorDict

    rows = len(completions)
    begin = max(map(len, prompts), default=0)
    width = begin + max((len(completion.token_ids) for completion in completions), default=0)
    input_ids = torch.full((rows, width), pad_token_id)
    attention_mask, loss_mask = torch.zeros_like(input_ids), torch.zeros_like(input_ids)
    log_probs = torch.zeros(rows, width)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        end = begin + len(completion.token_ids)
        input_ids[row, begin - len(prompt) : end] = torch.tensor([*prompt, *completion.token_ids])
        attention_mask[row, begin - len(prompt) : end] = 1
        loss_mask[row, begin:end] = 1
        log_probs[row, begin:end] = torch.tensor(completion.log_probs)
    data = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "loss_mask": loss_mask,
        "rollout_log_probs": log_probs,
        "group_ids": torch.tensor(group_ids, dtype=torch.int64),
        "weight_versions": torch.tensor(weight_versions, dtype=torch.int64),
        "prompt_lengths": torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64),
        "completion_lengths": loss_mask.sum(1),
        "truncated": torch.tensor([one.finish_reason == "length" for one in completions], dtype=torch.bool),
    }
    data["answer_lengths"] = data["completion_lengths"].clone()  # the old name, kept for one release
    if rewards is not None:
        data["rewards"] = torch.tensor(rewards, dtype=torch.float32)
    return TensorDict(data, batch_size=[rows])
