"""Collate completions into rollout data: one TensorDict in the schema of `workers.data.rollout_data`."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dispatch import jagged
from workers.data.rollout_data import REWARD_PART, group_numbers, unique_groups
from workers.data.routed_experts import ROUTED_EXPERTS
from workers.rollout.engines.rollout_engine import Completion, RoutedExperts, Row

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict


def collate(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    *,
    group_ids: Sequence[int] | None = None,
    weight_versions: Sequence[int | None] | None = None,
    rewards: Sequence[float] | None = None,
    reward_baselines: Sequence[float] | None = None,
    pad_token_id: int = 0,
) -> TensorDict:
    """Build one row per completion: the left-padded prompt, then the right-padded completion. All completions begin at
    the same column. A completion with `Completion.rows` becomes these rows instead, one after the other; they have its
    group, reward, baseline and ``truncated``.

    A completion with the finish reason "error" keeps its reward, but is not trained: its ``loss_mask`` is 0, and it is
    in another group, so that it does not count in the statistics of its own.

    Args:
        prompts: token ids of each completion's prompt.
        completions: of each prompt. For data that no engine generated, such as demonstrations, write
            ``Completion(token_ids, [0.0] * len(token_ids), "stop")``, and drop ``rollout_log_probs`` from what is
            returned.
        group_ids: of each completion; those for the same prompt share it. None leaves them out.
        weight_versions: of the worker that generated each completion, for tokens of which the engine does not say the
            version. None: they are not known.
        rewards: of each completion, if there are any. If some are several (`Reward`), each of these is an entry too; a
            plain number among them, such as that of a timeout, counts for each.
        reward_baselines: of each completion: the reward of the prompt's greedy completion.
        pad_token_id: the padding token.

    Returns:
        ``input_ids`` and ``attention_mask`` (int64), ``loss_mask`` (int64; float32 if some `Completion.loss_mask` has
        fractions), ``rollout_log_probs`` (float32), each (rows, longest prompt + longest completion), and of the same
        shape ``weight_versions`` (int64), -1 where the policy generated nothing, and ``weight_fingerprints`` (int64),
        -1 where they are not known. ``group_ids``, ``min_weight_versions``, ``max_weight_versions``,
        ``prompt_lengths``, ``completion_lengths`` (int64), ``truncated`` (bool: no stop token), ``rewards``,
        ``rewards/NAME`` and ``reward_baselines`` (float32), each (rows,). If some completion has a `SamplingMask`:
        ``sampling_mask`` (jagged int32) and ``sampling_mask_lengths`` (int32), see `workers.data.rollout_data`. If some
        has `RoutedExperts`: ``routed_experts`` (jagged int16), see `workers.data.routed_experts`. If some
        completion is several rows: ``rollout_ids`` (int64), (rows,), which differ from those of all other calls. If
        some has `Completion.token_rewards`: ``token_rewards`` (float32), where a row without them has its reward at the
        last token that counts.

    Raises:
        ValueError: an argument has not one entry per row, or a completion not one number per token; the message says
            which.
    """
    import torch
    from tensordict import TensorDict

    given: dict[str, Sequence[Any] | None] = {"group_ids": group_ids, "weight_versions": weight_versions}
    given |= {"rewards": rewards, "reward_baselines": reward_baselines}
    for name, values in {"prompts": prompts, **given}.items():
        if values is not None and len(values) != len(completions):
            raise ValueError(f"collate(): {len(values)} {name} for {len(completions)} completions; expected one each")
    for number, one in enumerate(completions):
        if not isinstance(one, Completion):
            raise TypeError(f"collate(): completion {number} is {one!r:.80}; pass Completion(ids, log_probs, 'stop')")
        if wrong := not_per_token(one):
            raise ValueError(f"collate(): the completion of row {number} has {wrong}; expected one number per token")
    if any(one.rows is not None for one in completions):
        return _of_rows(prompts, completions, given, pad_token_id)
    completions, group_ids = _without_failed(completions, group_ids)
    rows = len(completions)
    begin = max(map(len, prompts), default=0)
    width = begin + max((len(completion.token_ids) for completion in completions), default=0)
    input_ids = torch.full((rows, width), pad_token_id)
    attention_mask, loss_mask = torch.zeros_like(input_ids), torch.zeros_like(input_ids)
    log_probs, versions = torch.zeros(rows, width), torch.full((rows, width), -1)
    fingerprints = torch.full((rows, width), -1)
    masks = [[1] * len(one.token_ids) if one.loss_mask is None else list(one.loss_mask) for one in completions]
    if any(value != int(value) for mask in masks for value in mask):
        loss_mask = loss_mask.float()
    of_tokens = [
        [version if counts else -1 for version, counts in zip(token_versions(one, worker), mask, strict=True)]
        for one, worker, mask in zip(completions, weight_versions or [None] * rows, masks, strict=True)
    ]
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        end = begin + len(completion.token_ids)
        input_ids[row, begin - len(prompt) : end] = torch.tensor([*prompt, *completion.token_ids])
        attention_mask[row, begin - len(prompt) : end] = 1
        loss_mask[row, begin:end] = torch.tensor(masks[row])
        log_probs[row, begin:end] = torch.tensor(completion.log_probs)
        versions[row, begin:end] = torch.tensor(of_tokens[row])
        known = completion.fingerprints or {}
        fingerprints[row, begin:end] = torch.tensor([known.get(version, -1) for version in of_tokens[row]])
    data = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "loss_mask": loss_mask,
        "rollout_log_probs": log_probs,
        "weight_versions": versions,
        "weight_fingerprints": fingerprints,
        "min_weight_versions": torch.tensor(
            [min((version for version in of if version >= 0), default=-1) for of in of_tokens], dtype=torch.int64
        ),
        "max_weight_versions": torch.tensor([max(of, default=-1) for of in of_tokens], dtype=torch.int64),
        "prompt_lengths": torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64),
        "completion_lengths": torch.tensor([len(one.token_ids) for one in completions], dtype=torch.int64),
        "truncated": torch.tensor([one.finish_reason == "length" for one in completions], dtype=torch.bool),
    }
    if any(one.sampling_mask is not None for one in completions):
        data |= _sampling_mask(completions, begin, width)
    if any(one.routed_experts is not None for one in completions):
        data[ROUTED_EXPERTS] = _routed_experts(prompts, completions)
    if any(one.token_rewards is not None for one in completions):
        earned = data["token_rewards"] = torch.zeros(rows, width)
        for row, one in enumerate(completions):
            if one.token_rewards is not None:
                earned[row, begin : begin + len(one.token_ids)] = torch.tensor(one.token_rewards)
            elif rewards is not None and any(masks[row]):
                last = max(at for at, counts in enumerate(masks[row]) if counts)
                earned[row, begin + last] = float(rewards[row])
    if group_ids is not None:
        data["group_ids"] = torch.tensor(group_ids, dtype=torch.int64)
    if rewards is not None:
        data["rewards"] = torch.tensor(rewards, dtype=torch.float32)
        for name, parts in reward_parts(rewards).items():
            data[REWARD_PART + name] = torch.tensor(parts, dtype=torch.float32)
    if reward_baselines is not None:
        data["reward_baselines"] = torch.tensor(reward_baselines, dtype=torch.float32)
    return TensorDict(data, batch_size=[rows])


def _of_rows(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    given: Mapping[str, Sequence[Any] | None],
    pad_token_id: int,
) -> TensorDict:
    """`collate` completions of which some are several rows. ``given``: its arguments with an entry for each."""
    import torch

    several = [one.rows or [Row(list(prompt), one)] for prompt, one in zip(prompts, completions, strict=True)]
    of_row = [number for number, rows in enumerate(several) for _ in rows]
    rows = [row for rows in several for row in rows]
    repeated = {name: [values[number] for number in of_row] for name, values in given.items() if values is not None}
    data = collate(
        [row.prompt for row in rows],
        [_row_of(completions[number], row.completion) for row, number in zip(rows, of_row, strict=True)],
        pad_token_id=pad_token_id,
        **repeated,
    )
    data["truncated"] = torch.tensor([completions[number].finish_reason == "length" for number in of_row])
    if len(rows) > len(completions):
        data["rollout_ids"] = unique_groups() + torch.tensor(of_row)
    return data


def _row_of(rollout: Completion, row: Completion) -> Completion:
    failed = rollout.finish_reason == "error"
    return replace(row, rows=None, finish_reason="error" if failed else row.finish_reason)


def _without_failed(
    completions: Sequence[Completion], group_ids: Sequence[int] | None
) -> tuple[list[Completion], list[int] | None]:
    """Mask the completions that failed, and move them out of their groups. The numbers of the groups remain."""
    made, groups = list(completions), None if group_ids is None else list(group_ids)
    moved: dict[int, int] = {}
    for number, one in enumerate(completions):
        if one.finish_reason == "error":
            made[number] = replace(one, loss_mask=[0] * len(one.token_ids))
            if groups is not None:
                group = groups[number]
                groups[number] = moved.setdefault(group, unique_groups() + group_numbers(group))
    return made, groups


def reward_parts(rewards: Sequence[float]) -> dict[str, list[float]]:
    """Return name -> one reward per completion, of those with several; a `ValueError` if their names differ."""
    names = sorted({name for reward in rewards for name in getattr(reward, "parts", ())})
    for row, reward in enumerate(rewards):
        if missing := set(names) - set(getattr(reward, "parts", names)):
            raise ValueError(
                f"collate(): the rewards of row {row} lack {min(missing)!r}, which other rows have; return the same "
                "names for every completion"
            )
    return {name: [getattr(reward, "parts", {name: reward})[name] for reward in rewards] for name in names}


def _sampling_mask(completions: Sequence[Completion], begin: int, width: int) -> dict[str, torch.Tensor]:
    import torch

    lengths = torch.zeros(len(completions), width, dtype=torch.int32)
    kept, offsets = array("i"), [0]
    for row, one in enumerate(completions):
        if one.sampling_mask is not None:
            kept.extend(one.sampling_mask.token_ids)
            lengths[row, begin : begin + len(one.token_ids)] = torch.tensor(one.sampling_mask.lengths)
        offsets.append(len(kept))
    # A copy: the memory of an array moves when it grows.
    values = torch.frombuffer(kept, dtype=torch.int32).clone() if kept else torch.zeros(0, dtype=torch.int32)
    return {"sampling_mask": jagged.build(values, torch.tensor(offsets), 0), "sampling_mask_lengths": lengths}


def _routed_experts(prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> torch.Tensor:
    import torch

    known = [one.routed_experts for one in completions if one.routed_experts is not None]
    sizes = {(of.layers, of.k) for of in known}
    if len(sizes) > 1:
        raise ValueError(f"collate(): completions have routed_experts of {sorted(sizes)} layers and experts per token")
    ((layers, k),) = sizes
    ids, offsets = array("h"), [0]
    for row, (prompt, one) in enumerate(zip(prompts, completions, strict=True)):
        count = len(prompt) + len(one.token_ids)
        of = one.routed_experts or RoutedExperts.unknown(count, layers, k)
        if len(of) != count:
            raise ValueError(
                f"collate(): the completion of row {row} has routed_experts of {len(of)} tokens; expected those of its "
                f"prompt and its token_ids, {count}"
            )
        ids.extend(of.ids)
        offsets.append(offsets[-1] + count)
    values = torch.frombuffer(ids, dtype=torch.int16).clone() if ids else torch.zeros(0, dtype=torch.int16)
    return jagged.build(values.view(-1, layers, k), torch.tensor(offsets), 0)


def not_per_token(completion: Completion) -> str | None:
    """What is wrong with the lengths of a completion's fields; None if nothing is."""
    tokens, log_probs = len(completion.token_ids), len(completion.log_probs)
    if tokens != log_probs:
        return f"{tokens} token_ids and {log_probs} log_probs"
    mask = completion.loss_mask
    if mask is not None and len(mask) != tokens:
        return f"{tokens} token_ids and a loss_mask of {len(mask)}"
    kept = completion.sampling_mask
    if kept is not None and (len(kept.lengths) != tokens or sum(kept.lengths) != len(kept.token_ids)):
        return (
            f"{tokens} token_ids and a sampling_mask of {len(kept.lengths)} lengths, which count {sum(kept.lengths)} "
            f"of its {len(kept.token_ids)} tokens"
        )
    said = completion.weight_versions
    if said and len(said) != tokens:
        return f"{tokens} token_ids and {len(said)} weight_versions"
    earned = completion.token_rewards
    if earned is not None and len(earned) != tokens:
        return f"{tokens} token_ids and {len(earned)} token_rewards"
    if completion.rows is not None:
        return _not_rows(completion.rows)
    return None


def _not_rows(rows: Sequence[Row]) -> str | None:
    if not rows:
        return "no rows (an empty list, where None stands for one row)"
    for number, row in enumerate(rows):
        if row.completion.rows is not None or not row.prompt:
            return f"in its row {number} {'no prompt' if not row.prompt else 'rows again'}"
        if wrong := not_per_token(row.completion):
            return f"in its row {number} {wrong}"
    return None


def with_versions(completion: Completion, worker: int | None) -> Completion:
    """Write the weight versions of all tokens into a completion and its rows; see `token_versions`."""
    rows = completion.rows and [
        replace(row, completion=with_versions(row.completion, worker)) for row in completion.rows
    ]
    return replace(completion, weight_versions=[*token_versions(completion, worker)], rows=rows)


def trained_versions(completion: Completion) -> list[int]:
    """Return the weight versions of the tokens that are trained, in all rows of a rollout; -1 where it is not known."""
    return [
        version
        for one in ([completion] if completion.rows is None else [row.completion for row in completion.rows])
        for at, version in enumerate(token_versions(one, None))
        if one.loss_mask is None or one.loss_mask[at]
    ]


def with_fingerprints(
    completion: Completion, known: Mapping[int, int], worker: int | None, before: Mapping[int, int] | None = None
) -> Completion:
    """Add the fingerprints of the weights that generated a completion.

    Args:
        completion: as the engine returns it.
        known: weight version -> fingerprint, of a worker.
        worker: see `token_versions`.
        before: those of the completion that this one continues.
    """
    # Look up each version once: engine threads call this while the worker's thread adds and drops versions.
    looked_up = {version: known.get(version) for version in {*token_versions(completion, worker)}}
    of_worker = {version: fingerprint for version, fingerprint in looked_up.items() if fingerprint is not None}
    rows = completion.rows and [
        replace(row, completion=with_fingerprints(row.completion, known, worker, before)) for row in completion.rows
    ]
    found = {**(before or {}), **(completion.fingerprints or {}), **of_worker}
    return replace(completion, fingerprints=found or None, rows=rows)


def token_versions(completion: Completion, worker: int | None) -> list[int]:
    """Return each token's weight version: the ``worker``'s if the engine does not say it, -1 if nobody does."""
    said = completion.weight_versions or [None] * len(completion.token_ids)
    return [-1 if version is None else version for version in (worker if of is None else of for of in said)]
