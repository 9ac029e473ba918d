"""PromptData: the prompts of each rollout, as token ids, and the columns for the reward function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, Self

from dispatch.checks import check_count
from workers.data.row_files import DataError, FilledRow
from workers.data.row_reader import RowReader, open_rows

_TEXT_OF = "a text, a list of messages ({'role': ..., 'content': ...}) or a list of token ids"


class PromptData:
    """Prompts from data, as a function of the rollout's number: pass it to `RolloutStream`, or call it yourself.

        prompts, extras = data(rollout_id)
        manager.generate(prompts, rollout_id=rollout_id, extras=extras)

    The same rollout always has the same prompts. If a rollout is generated again, after a death or from a checkpoint,
    its prompts are read again; the state in the checkpoint has the position.

    A prompt is a text, a list of messages, or a list of token ids. Messages become a text by the tokenizer's chat
    template, with the beginning of the answer (``add_generation_prompt``) and without further special tokens. Of a
    message, keys other than ``content`` that are null are left out; in Parquet and datasets, also those inside of its
    values, which have the keys of all rows. A text that is no message gets the special tokens that the tokenizer adds
    by itself.

    Args:
        rows: from `open_rows`, without ``prepare``, and preferably without ``epochs``, because a run has a number of
            rollouts. Do not use the rows elsewhere.
        batch_size: number of prompts of a rollout.
        tokenizer: a Hugging Face tokenizer; None if all prompts are token ids.
        input_key: name of the column with the prompt.
        label_key: name of the column that the reward function gets as ``label``. By default columns keep their names.
        columns: names of the columns that the reward function gets, besides ``label``; a row without one of them is
            bad. By default all except the prompt; a row that lacks a column gets None if another row of the rollout,
            or the first row of a source, has it.
        apply_chat_template: whether a text is the message of a user.
        apply_chat_template_kwargs: further variables of the template, such as ``{"enable_thinking": False}``.
        max_prompt_len: rows with more tokens are left out and counted; None for no limit.

    Raises:
        DataError: there is no chat template, or no tokenizer for it.
        ValueError: a number is out of range, or the rows have a ``prepare``.
    """

    def __init__(
        self,
        rows: RowReader,
        batch_size: int,
        tokenizer: Any = None,
        *,
        input_key: str = "prompt",
        label_key: str | None = None,
        columns: Sequence[str] | None = None,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: Mapping[str, Any] | None = None,
        max_prompt_len: int | None = None,
    ) -> None:
        if not isinstance(rows, RowReader):
            raise TypeError(f"{type(self).__name__}: rows={rows!r:.80}; pass open_rows(...) of a file or a list")
        if rows.prepare is not None:
            raise ValueError("PromptData: the rows have a function `prepare` already; open them without")
        if max_prompt_len is not None:
            check_count("max_prompt_len", max_prompt_len)
        self.rows = rows
        self.batch_size = check_count("batch_size", batch_size)
        self._tokenizer = tokenizer
        self._input_key, self._label_key = input_key, label_key
        self._columns = None if columns is None else list(columns)
        self._names: dict[str, None] = {}
        """Columns of all sources, so that what a row gets does not depend on whose rows are in its rollout."""
        for file in rows.files if columns is None else ():
            with suppress(ValueError):  # a bad row
                self._names |= dict.fromkeys(name for name in file.read(0) if name not in (input_key, label_key))
        self._as_message = apply_chat_template
        self._template_kwargs = dict(apply_chat_template_kwargs or {})
        self._max_prompt_len = max_prompt_len
        self._first = (0, 0)
        """A rollout, and the position of its first row; others are counted from it."""
        if apply_chat_template:
            self._check_template()
        rows.prepare = self._prepared

    @classmethod
    def from_args(
        cls, args: Any, tokenizer: Any = None, *, key: Literal["rollout_data", "eval_data"] = "rollout_data"
    ) -> Self:
        """Open data as a training run's configuration says; see `workers.train.args`.

        Args:
            args: the configuration.
            tokenizer: by default that of ``hf_checkpoint``, if it has one.
            key: which data. ``eval_data`` is for `all`: its rows come in their order, and once.

        Raises:
            TrainArgsError: the configuration is invalid.
            DataError: see `open_rows`; or the key is not set.
        """
        from omegaconf import OmegaConf

        from workers.hf_files import read_tokenizer
        from workers.train.args import read_args

        args = read_args(args)
        if args[key] is None:
            raise DataError(f"args.{key} is not set; it names the files with the prompts")
        trains = key == "rollout_data"
        # Plain lists and dicts, the only ones that transformers takes for `tools` and shows to templates.
        template_kwargs: Any = OmegaConf.to_container(args.apply_chat_template_kwargs, resolve=True)
        rows = open_rows(
            list(args[key]),
            weights=list(args.rollout_data_weights) if trains and args.rollout_data_weights is not None else None,
            shuffle=trains and args.rollout_shuffle,
            seed=args.seed,
            epochs=None if trains else 1,
            on_bad_row=args.on_bad_row,
        )
        return cls(
            rows,
            args.rollout_batch_size,
            read_tokenizer(args) if tokenizer is None else tokenizer,
            input_key=args.input_key,
            label_key=args.label_key,
            apply_chat_template=args.apply_chat_template,
            apply_chat_template_kwargs=template_kwargs,
            max_prompt_len=args.rollout_max_prompt_len,
        )

    def __call__(self, rollout_id: int) -> Any:
        """Return the prompts of a rollout, ``batch_size`` lists of token ids, and the columns for the reward function,
        each with one value per prompt.

        Raises:
            DataError: a row cannot be used, see `RowReader`; or the last epoch ends before the rollout does.
            ValueError: the rollout would begin before the first row.
        """
        first = self._position(rollout_id)
        try:
            rows = [self.rows[first + index] for index in range(self.batch_size)]
        except IndexError:
            raise DataError(
                f"rollout {rollout_id} goes beyond the last row of the last epoch; open the rows without `epochs`, or "
                "end before it: in a RolloutStream, which reads ahead, with SampleBuffer(num_batches=...)"
            ) from None
        return self.batch(rows)

    def batch(self, rows: Sequence[tuple[list[int], Any]]) -> Any:
        """Put what was made of some rows together, as a call returns it."""
        names = self._names | dict.fromkeys(name for _, columns in rows for name in columns)
        return [list(ids) for ids, _ in rows], {name: [columns.get(name) for _, columns in rows] for name in names}

    def all(self) -> Any:
        """Return all rows, as a call returns those of a rollout. For an evaluation.

        Raises:
            DataError: a row cannot be used, or none can.
            ValueError: the rows were not opened with ``epochs=1``.
        """
        if self.rows.order.length != self.rows.order.total:
            raise ValueError(f"{type(self).__name__}.all(): open the rows with open_rows(..., epochs=1)")
        rows: list[Any] = []
        with suppress(IndexError):  # after the last one
            while True:
                rows.append(self.rows[len(rows)])
        return self.batch(rows)

    def _position(self, rollout_id: int) -> int:
        rollout, position = self._first
        if rollout_id < rollout and (rollout - rollout_id) * self.batch_size > position:
            raise ValueError(f"rollout {rollout_id} is before the data; rollout {rollout} begins at row {position}")
        return position + (rollout_id - rollout) * self.batch_size

    def metrics(self) -> dict[str, float]:
        """See `RowReader.metrics`."""
        return self.rows.metrics()

    def state_dict(self, rollout_id: int) -> dict[str, Any]:
        """Return the state for a checkpoint.

        Args:
            rollout_id: the last rollout that was trained on, as for `RayTrainGroup.save_model`.
        """
        return {"next": (rollout_id + 1, self._position(rollout_id + 1)), "rows": self.rows.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a state, also with another ``batch_size``: the next rollout begins with the row after the last
        one that was trained.

        Raises:
            DataError: the state is of other data, or None.
        """
        if state is None:
            raise DataError("the checkpoint has no state of the data: save_model() got no driver_state with it")
        self.rows.load_state_dict(state["rows"])
        self._first = state["next"]

    # --- one row ----------------------------------------------------------------------------------------------------

    def _prepared(self, row: Mapping[str, Any]) -> tuple[list[int], Any] | None:
        prompt, columns = self._entry(row, self._input_key, "input_key"), self._columns_of(row)
        ids = self._ids(prompt)
        if not ids:
            raise ValueError(f"{self._input_key!r} is empty")
        return None if self._max_prompt_len is not None and len(ids) > self._max_prompt_len else (ids, columns)

    def _entry(self, row: Mapping[str, Any], name: str, key: str) -> Any:
        if name not in row:
            raise ValueError(f"has no {name!r} ({key}); it has {_names(row)}")
        return _own_keys(row[name]) if isinstance(row, FilledRow) and key == "input_key" else row[name]

    def _columns_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        names = [name for name in row if name != self._input_key] if self._columns is None else self._columns
        if missing := [name for name in names if name not in row]:
            raise ValueError(f"has no {missing[0]!r} (columns); it has {_names(row)}")
        columns = {name: row[name] for name in names if name != self._label_key}
        if self._label_key is None:
            return columns
        label = self._entry(row, self._label_key, "label_key")
        if label is None:
            raise ValueError(f"has no {self._label_key!r} (label_key): it is null")
        if "label" in columns:
            raise DataError(
                f"the data has a column 'label', and {self._label_key!r} is to become the reward function's 'label' "
                "(label_key); choose the other columns with `columns`"
            )
        return {"label": label, **columns}

    def _ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            if self._as_message:
                return self._ids([{"role": "user", "content": prompt}])
            return self._encoded(prompt, add_special_tokens=True)
        if not isinstance(prompt, (list, tuple)):
            raise ValueError(f"{self._input_key!r} is {prompt!r:.60}; expected {_TEXT_OF}")
        if all(type(one) is int and one >= 0 for one in prompt):
            return list(prompt)
        for one in prompt:
            if not isinstance(one, Mapping) or not isinstance(one.get("role"), str) or "content" not in one:
                raise ValueError(f"{self._input_key!r} has {one!r:.60}; expected {_TEXT_OF}")
        return self._encoded(self._text(prompt), add_special_tokens=False)

    def _text(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        import jinja2

        self._check_template()
        try:
            # In Parquet and datasets, each message has the keys of all, with null for those that are not its own.
            # Only later versions of transformers leave these out.
            plain = [
                {name: value for name, value in dict(one).items() if value is not None or name == "content"}
                for one in messages
            ]
            text: str = self._tokenizer.apply_chat_template(
                plain,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._template_kwargs,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:  # such as roles in another order
            raise ValueError(f"the chat template refuses {self._input_key!r}: {error}") from error
        return text

    def _encoded(self, text: str, *, add_special_tokens: bool, name: str | None = None) -> list[int]:
        name = name or self._input_key
        if self._tokenizer is None:
            raise DataError(
                f"{name!r} is a text, but there is no tokenizer: set hf_checkpoint to a model that has one, or pass it"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can name half of a surrogate pair, which is no text
            raise ValueError(f"{name!r} is not Unicode: {error.reason} (character {error.start + 1})") from None
        ids: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def _check_template(self) -> None:
        if not getattr(self._tokenizer, "chat_template", None):
            lacks = "there is no tokenizer" if self._tokenizer is None else "the tokenizer has no chat template"
            raise DataError(
                f"{self._input_key!r} is messages, or to become one (apply_chat_template), but {lacks}; set "
                "hf_checkpoint to a model with one, or write the prompts as text"
            )


def _own_keys(value: Any, depth: int = 0) -> Any:
    """Leave out null keys inside of the values of messages. `PromptData._text` leaves out those of the messages."""
    if isinstance(value, Mapping):
        return {name: _own_keys(one, depth + 1) for name, one in value.items() if one is not None or not depth}
    return [_own_keys(one, depth) for one in value] if isinstance(value, list) else value


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, row)) or "no columns"
