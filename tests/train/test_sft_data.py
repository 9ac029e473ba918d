"""SFTData: which tokens of a row are trained, bad rows, and continuing."""

import pytest
from byte_tokens import byte_tokenizer

from workers import DataError, SFTData, open_rows

END = 257
TOKENIZER = byte_tokenizer()


def data(rows, batch_size=None, **options):
    reading = {name: options.pop(name) for name in ("on_bad_row", "shuffle") if name in options}
    opened = open_rows(rows, **{"shuffle": False, **reading})
    return SFTData(opened, batch_size or len(rows), TOKENIZER, **options)


def trained(batch, row):
    """The whole row and its trained tokens, as lists."""
    real = batch["attention_mask"][row] != 0
    ids, counts = batch["input_ids"][row], batch["loss_mask"][row] != 0
    assert not (counts & ~real).any()
    return ids[real].tolist(), ids[counts].tolist()


def test_completion_is_trained_and_ended():
    rows = [{"prompt": "ab", "completion": "c"}, {"prompt": [1, 2, 3], "completion": [4]}]
    batch = data([*rows, {"prompt": (1, 2), "completion": (4,)}])(0)
    assert trained(batch, 0) == ([97, 98, 99, END], [99, END])
    assert trained(batch, 1) == ([1, 2, 3, 4], [4])  # token ids stay as they are
    assert trained(batch, 2) == ([1, 2, 4], [4])


def test_other_columns_may_be_chosen():
    batch = data([{"q": "a", "a": "b", "prompt": 5}], input_key="q", label_key="a")(0)
    assert trained(batch, 0) == ([97, 98, END], [98, END])


def test_all_messages_of_the_assistant_are_trained():
    user, assistant, system = TOKENIZER.convert_tokens_to_ids(["<|user|>", "<|assistant|>", "<|system|>"])
    messages = [("system", "s"), ("user", "u"), ("assistant", "xy"), ("user", "v"), ("assistant", "z")]
    talk = [{"role": role, "content": text} for role, text in messages]
    batch = data([{"prompt": talk}, {"prompt": tuple(talk)}])(0)
    whole, parts = trained(batch, 0)
    expected = [system, 115, END, user, 117, END, assistant, 120, 121, END, user, 118, END, assistant, 122, END]
    assert whole == expected and parts == [120, 121, END, 122, END]
    assert trained(batch, 1) == (whole, parts)


def test_prompt_of_messages_with_a_completion():
    assistant, user = (TOKENIZER.convert_tokens_to_ids(f"<|{role}|>") for role in ("assistant", "user"))
    rows = [{"prompt": [{"role": "user", "content": "u"}], "completion": "x"}]
    assert trained(data(rows)(0), 0) == ([user, 117, END, assistant, 120, END], [120, END])


def test_first_token_is_never_trained():
    assert trained(data([{"prompt": "", "completion": "ab"}])(0), 0) == ([97, 98, END], [98, END])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a"}, "has no 'completion' \\(label_key\\); it has 'prompt'"),
        ({"completion": "a"}, "has no 'prompt' \\(input_key\\)"),
        ({"prompt": "a", "completion": 3}, "'completion' is 3; expected a text or a list of token ids"),
        ({"prompt": "a", "completion": []}, "has no token to train"),
        ({"prompt": [], "completion": [4]}, "has no token to train"),
        ({"prompt": 3, "completion": "a"}, "'prompt' is 3"),
        ({"prompt": "a", "completion": None}, "'completion' is None"),
        ({"prompt": "a", "completion": "\ud800"}, "'completion' is not Unicode"),
    ],
)
def test_bad_rows(row, message):
    good = {"prompt": "a", "completion": "b"}
    with pytest.raises(DataError, match=f"row 2.*{message}"):
        data([good, row])(0)
    skipping = data([good, row, good], batch_size=2, on_bad_row="skip")
    assert len(skipping(0)) == 2 and skipping.metrics()["data/bad"] == 1


def test_long_rows_are_left_out_and_counted():
    rows = [{"prompt": "abc", "completion": "d"}, {"prompt": "a", "completion": "b"}]
    some = data(rows, batch_size=1, max_prompt_len=4)
    assert trained(some(0), 0)[0] == [97, 98, END] and some.metrics()["data/too_long"] == 1


def test_template_that_rewrites_messages_is_refused():
    """Qwen3's, for example, drops the reasoning of all answers but the last."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] if loop.last else m['content'] | upper }};{% endfor %}"
    )
    talk = [{"role": role, "content": "a"} for role in ("user", "assistant", "user", "assistant")]
    with pytest.raises(DataError, match="writes the messages before message 2 of 'prompt' in another way"):
        SFTData(open_rows([{"prompt": talk}]), 1, tokenizer)(0)


def test_a_run_continues_with_the_next_row():
    rows = [{"prompt": str(number), "completion": "x"} for number in range(23)]
    whole = data(rows, batch_size=3, shuffle=True)
    state = data(rows, batch_size=3, shuffle=True)
    saved = state.state_dict(4)
    again = data(rows, batch_size=3, shuffle=True)
    again.load_state_dict(saved)
    for step in range(5, 12):
        assert again(step)["input_ids"].tolist() == whole(step)["input_ids"].tolist()


def test_first_message_may_be_the_assistants():
    """Its header, and the template's own beginning, are not trained."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "S;{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    talk = [{"role": role, "content": text} for role, text in (("assistant", "x"), ("user", "u"), ("assistant", "y"))]
    batch = SFTData(open_rows([{"prompt": talk}]), 1, tokenizer)(0)
    assert trained(batch, 0) == ([*b"S;a:x;u:u;a:y;"], [*b"x;y;"])
