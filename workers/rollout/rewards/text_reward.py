"""text_reward: makes a reward function of texts one of token ids, as `RolloutManager` calls it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

from workers.rollout.rewards.reward_calls import RewardFunction
from workers.rollout.rewards.reward_runner import is_async
from workers.train.args_checks import READY_REWARDS, TrainArgsError, function_at

_OWN = ("prompt", "completion", "prompt_ids", "completion_ids", "info")


def text_reward(function: Callable[..., Any], tokenizer: Any) -> RewardFunction:
    """Return a reward function that decodes, and calls ``function`` by keyword with what its parameters name:
    ``prompt`` and ``completion``, the texts; ``prompt_ids`` and ``completion_ids``, their tokens; ``info``, see
    `Completion.info`; and columns of the data, such as ``label``. With ``**columns`` it gets all.

        manager = RolloutManager(group, how, text_reward(number_match, tokenizer))

    The completion is without special tokens, such as the one that ended it; the prompt is with them. A column with the
    name of an option, such as ``tolerance``, sets it for its row, unless it is null there.

    Args:
        function: plain or ``async def``; it returns what a `RewardFunction` returns. Set options of a ready function
            with `functools.partial`.
        tokenizer: a Hugging Face tokenizer.

    Raises:
        TypeError: it is no function, or has no parameter for the completion; or the tokenizer cannot decode.
    """
    usable = {"function": callable(function), "tokenizer": hasattr(tokenizer, "decode")}
    for name, given in (("function", function), ("tokenizer", tokenizer)):
        if not usable[name]:
            raise TypeError(f"text_reward(): {name}={given!r:.80}; pass text_reward(number_match, tokenizer)")
    parameters = [*inspect.signature(function).parameters.values()]
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    names = {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    optional = {one.name for one in parameters if one.default is not one.empty}
    if not takes_all and not names & {"completion", "completion_ids"}:
        raise TypeError(
            f"text_reward(): {function!r} has no parameter `completion` or `completion_ids`; it has "
            f"{', '.join(sorted(names)) or 'none'}"
        )

    def plain(prompt: Sequence[int], completion: Sequence[int], /, *, info: Any = None, **columns: Any) -> Any:
        values = {name: value for name, value in columns.items() if value is not None or name not in optional}
        values |= {"info": info, "prompt_ids": list(prompt), "completion_ids": list(completion)}
        if takes_all or "prompt" in names:
            values["prompt"] = tokenizer.decode(list(prompt))
        if takes_all or "completion" in names:
            values["completion"] = tokenizer.decode(list(completion), skip_special_tokens=True)
        return function(**(values if takes_all else {name: value for name, value in values.items() if name in names}))

    async def awaited(*ids: Sequence[int], **columns: Any) -> Any:
        return await plain(*ids, **columns)

    # What `RewardRunner` reads: two positional parameters without a name that a column could have, then columns.
    columns = [one for one in parameters if one.name in names and one.name not in _OWN]
    signature = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in ("prompt", "completion")]
        + [one.replace(kind=one.KEYWORD_ONLY) for one in columns]
        + [inspect.Parameter("info", inspect.Parameter.KEYWORD_ONLY, default=None)]
        + [one for one in parameters if one.kind is one.VAR_KEYWORD]
    )
    made: Any = awaited if is_async(function) else plain
    made.__signature__ = signature
    return cast(RewardFunction, made)


def reward_of(args: Any, tokenizer: Any) -> RewardFunction:
    """Return the reward function that a training run's configuration names, as one of token ids.

    Args:
        args: the configuration, from `read_args`.
        tokenizer: a Hugging Face tokenizer.

    Raises:
        TrainArgsError: it names none, or one that cannot be imported.
        TypeError: see `text_reward`.
    """
    name = args.reward_function
    if name is None:
        raise TrainArgsError(
            f"args.reward_function is not set; choose {', '.join(READY_REWARDS)} or the dotted path of a function"
        )
    return text_reward(function_at(READY_REWARDS.get(name, name), "reward_function"), tokenizer)
