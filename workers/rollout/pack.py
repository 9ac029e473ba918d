"""Answers as rollout data: one TensorDict, in the schema of `workers.train.rollout_data`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from workers.rollout.engine import Answer

if TYPE_CHECKING:
    from tensordict import TensorDict


def pack_answers(
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Answer],
    *,
    group_ids: Sequence[int],
    weight_versions: Sequence[int],
    rewards: Sequence[float] | None = None,
    pad_token_id: int = 0,
) -> TensorDict:
    """One row for each answer: the prompt, padded on the left, then the answer, padded on the right, so that all
    answers begin at the same column.

    Args:
        prompts: token ids of the prompt of each row.
        answers: of each row.
        group_ids: of each row; answers to one prompt share it.
        weight_versions: of each row.
        rewards: of each row, if there are any.
        pad_token_id: stands where nothing is.

    Returns:
        ``input_ids``, ``attention_mask`` and ``loss_mask`` (int64), ``rollout_log_probs`` (float32), each
        (rows, longest prompt + longest answer). ``group_ids``, ``weight_versions``, ``prompt_lengths``,
        ``answer_lengths`` (int64), ``truncated`` (bool: no stop token) and ``rewards`` (float32), each (rows,).
    """
    import torch
    from tensordict import TensorDict

    rows = len(answers)
    begin = max(map(len, prompts), default=0)
    width = begin + max((len(answer.token_ids) for answer in answers), default=0)
    input_ids = torch.full((rows, width), pad_token_id)
    attention_mask, loss_mask = torch.zeros_like(input_ids), torch.zeros_like(input_ids)
    log_probs = torch.zeros(rows, width)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = begin + len(answer.token_ids)
        input_ids[row, begin - len(prompt) : end] = torch.tensor([*prompt, *answer.token_ids])
        attention_mask[row, begin - len(prompt) : end] = 1
        loss_mask[row, begin:end] = 1
        log_probs[row, begin:end] = torch.tensor(answer.log_probs)
    data = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "loss_mask": loss_mask,
        "rollout_log_probs": log_probs,
        "group_ids": torch.tensor(group_ids, dtype=torch.int64),
        "weight_versions": torch.tensor(weight_versions, dtype=torch.int64),
        "prompt_lengths": torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64),
        "answer_lengths": loss_mask.sum(1),
        "truncated": torch.tensor([answer.finish_reason == "length" for answer in answers], dtype=torch.bool),
    }
    if rewards is not None:
        data["rewards"] = torch.tensor(rewards, dtype=torch.float32)
    return TensorDict(data, batch_size=[rows])
