"""SFTData: the rows of each step of supervised fine-tuning, as a batch for `RayTrainGroup.async_train`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workers.data.prompt_data import PromptData
from workers.data.row_files import DataError

if TYPE_CHECKING:
    from tensordict import TensorDict


class SFTData(PromptData):
    """Batches from data, as a function of the step's number, for ``policy_loss_type="sft"``:

        ray.get(group.async_train(step, data(step)))

    A row is either a prompt, as for `PromptData`, with a completion in the column ``label_key``: a text, which the
    tokenizer's end-of-text token ends, or token ids, which are taken as they are. Or its prompt is a list of messages
    of which the last one is the assistant's: then all messages of the assistant are trained, each from where the chat
    template's ``add_generation_prompt`` ends to where the message ends in the text.

    Args and state are those of `PromptData`. ``label_key`` is by default ``completion``, and ``max_prompt_len`` limits
    the whole row.
    """

    def batch(self, rows: Sequence[tuple[list[int], Any]]) -> TensorDict:
        """See `PromptData.batch`. The entries are ``input_ids``, ``attention_mask`` and ``loss_mask``, (rows, tokens)
        int64, padded on the right."""
        import torch
        from tensordict import TensorDict
        from torch.nn.utils.rnn import pad_sequence

        columns = (
            ("input_ids", [ids for ids, _ in rows]),
            ("attention_mask", [[1] * len(ids) for ids, _ in rows]),
            ("loss_mask", [mask for _, mask in rows]),
        )
        padded = {
            name: pad_sequence([torch.tensor(value) for value in values], batch_first=True) for name, values in columns
        }
        return TensorDict(padded, [len(rows)])

    # --- one row ----------------------------------------------------------------------------------------------------

    def _prepared(self, row: Mapping[str, Any]) -> tuple[list[int], list[int]] | None:
        prompt = self._entry(row, self._input_key, "input_key")
        if isinstance(prompt, (list, tuple)) and prompt and _is_assistant(prompt[-1]):
            ids, mask = self._conversation(prompt)
        else:
            label_key = self._label_key or "completion"
            given = self._ids(prompt)
            made = self._completion(self._entry(row, label_key, "label_key"), label_key)
            ids, mask = given + made, [0] * len(given) + [1] * len(made)
        if not any(mask[1:]):
            raise ValueError(f"has no token to train: {self._input_key!r} and its completion have {len(ids)} tokens")
        mask[0] = 0  # no output predicts a row's first token
        return None if self._max_prompt_len is not None and len(ids) > self._max_prompt_len else (ids, mask)

    def _completion(self, value: Any, label_key: str) -> list[int]:
        if isinstance(value, (list, tuple)) and all(type(one) is int and one >= 0 for one in value):
            return list(value)
        if not isinstance(value, str):
            raise ValueError(f"{label_key!r} is {value!r:.60}; expected a text or a list of token ids")
        ids = self._encoded(value, add_special_tokens=False, name=label_key)
        if self._tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no end-of-text token (eos_token) to put after a completion")
        return [*ids, self._tokenizer.eos_token_id]

    def _conversation(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
        """Tokenize the parts between the borders of the assistant's messages, so that tokens end there."""
        ids: list[int] = []
        mask: list[int] = []
        done = ""
        for number, message in enumerate(messages, 1):
            if not _is_assistant(message):
                continue
            whole = self._text(messages[:number], add_generation_prompt=False)
            # Up to where the message begins, and up to where it ends.
            for text, trained in ((self._before(messages[: number - 1], whole), 0), (whole, 1)):
                if not text.startswith(done):
                    raise ValueError(
                        f"the chat template writes the messages before message {number} of {self._input_key!r} in "
                        "another way once it follows, so which tokens are trained cannot be told; give one answer per "
                        "row, the messages before it as the prompt and its text as the completion (label_key)"
                    )
                part = self._encoded(text[len(done) :], add_special_tokens=False)
                ids, mask, done = ids + part, mask + [trained] * len(part), text
        return ids, mask

    def _before(self, messages: Sequence[Mapping[str, Any]], whole: str) -> str:
        """Return the text up to where the answer to messages begins; ``whole`` has the answer, too."""
        if messages:
            return self._text(messages)
        asked = [{"role": "user", "content": "-"}]  # templates cannot render no messages at all
        header = self._text(asked).removeprefix(self._text(asked, add_generation_prompt=False))
        if header not in whole:
            raise ValueError(
                f"the chat template writes the assistant's message at the beginning of {self._input_key!r} in another "
                "way than an answer, so which tokens are trained cannot be told; begin with a user's message"
            )
        return whole[: whole.index(header) + len(header)]


def _is_assistant(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"
