"""RowReader and PromptData: what rows become, that a run continues with the next row, and what is left out."""

import json
import pickle
import random
import re
import threading
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from byte_tokens import byte_tokenizer
from waits import wait_until

from workers import DataError, PromptData, TrainArgsError, open_rows, read_args

ROWS = [{"prompt": f"{number} + {number}?", "label": str(2 * number), "level": number % 3} for number in range(30)]


def write_jsonl(path, rows=ROWS, end="\n"):
    path.write_text("".join(json.dumps(row) + end for row in rows), newline="")
    return str(path)


def write_parquet(path, rows=ROWS):
    pa = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    return str(path)


def every(reader):
    rows = []
    while batch := reader.take(7):
        rows += batch
    return rows


# --- formats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".json"])
def test_json_lines_are_the_rows(suffix, tmp_path):
    path = write_jsonl(tmp_path / f"a{suffix}")
    assert every(open_rows(path, shuffle=False, epochs=1)) == ROWS
    assert every(open_rows(Path(path), shuffle=False, epochs=2)) == 2 * ROWS


@pytest.mark.parametrize(
    "content",
    [
        b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}\n',  # a byte order mark
        b'{"prompt": "a"}\r\n{"prompt": "b"}\r\n',
        b'{"prompt": "a"}\n\n\r\n{"prompt": "b"}',  # empty lines, and none at the end
        b'\n\n {"prompt": "a"} \n\n{"prompt":\t"b"}\n\n\n',
    ],
)
def test_harmless_differences_between_files(content, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(content)
    reader = open_rows(tmp_path / "a.jsonl", shuffle=False, epochs=1)
    assert every(reader) == [{"prompt": "a"}, {"prompt": "b"}]
    lines = content.split(b"\n")
    assert [reader.files[0].number(row) for row in range(2)] == [
        1 + next(place for place, line in enumerate(lines) if name in line) for name in (b'"a"', b'"b"')
    ]


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
def test_lines_are_found_wherever_a_block_ends(block, tmp_path, monkeypatch):
    monkeypatch.setattr("workers.data.row_files._BLOCK_BYTES", block)
    for end in ("\n", "\r\n", "\n\n"):
        path = write_jsonl(tmp_path / "a.jsonl", ROWS[:9], end)
        assert every(open_rows(path, shuffle=False, epochs=1)) == ROWS[:9]


def test_separators_of_unicode_end_no_line(tmp_path):
    rows = [{"prompt": "a\u2028b\x0bc\u0085d"}, {"prompt": "e"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    assert every(open_rows(tmp_path / "a.jsonl", shuffle=False, epochs=1)) == rows


def test_parquet_has_the_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("workers.data.row_files._BATCH_ROWS", 4)
    rows = [{**row, "messages": [{"role": "user", "content": row["prompt"]}], "n": None} for row in ROWS]
    reader = open_rows(write_parquet(tmp_path / "a.parquet", rows), shuffle=False, epochs=1)
    assert every(reader) == rows
    assert [reader[place] for place in (29, 0, 13)] == [rows[29], rows[0], rows[13]]


def test_parquet_with_categories_that_differ_between_row_groups(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    import pyarrow.parquet as pq

    words = [str(number % 5 + number // 10 * 10) for number in range(30)]
    pq.write_table(pa.table({"prompt": pa.array(words).dictionary_encode()}), tmp_path / "a.parquet", row_group_size=10)
    reader = open_rows(tmp_path / "a.parquet", shuffle=False, epochs=1)
    assert [row["prompt"] for row in every(reader)] == words


def test_parquet_leaves_no_temporary_file(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "a.parquet")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    reader = open_rows(path, epochs=1)
    assert [one.name for one in tmp_path.iterdir()] == ["a.parquet"]
    assert len(every(reader)) == 30


def test_datasets_have_the_rows(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="the extra `data` is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.save_to_disk(tmp_path / "saved")
    (tmp_path / "hub").mkdir()
    write_jsonl(tmp_path / "hub" / "train.jsonl")
    write_jsonl(tmp_path / "hub" / "test.jsonl", ROWS[:3])
    for source in (dataset, str(tmp_path / "saved"), f"hf:{tmp_path / 'hub'}"):
        assert every(open_rows(source, shuffle=False, epochs=1)) == ROWS
    assert every(open_rows(f"hf:{tmp_path / 'hub'}?split=test", shuffle=False, epochs=1)) == ROWS[:3]
    both = f"hf:{tmp_path / 'hub'}?split=train+test[:2]"
    assert every(open_rows(both, shuffle=False, epochs=1)) == ROWS + ROWS[:2]


def test_datasets_that_have_no_rows_by_number_are_refused(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="the extra `data` is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    dataset = datasets.Dataset.from_list(ROWS)
    with pytest.raises(DataError, match="'a', 'b'; pass one of them"):
        open_rows(datasets.DatasetDict(a=dataset, b=dataset))
    datasets.DatasetDict(a=dataset, b=dataset).save_to_disk(tmp_path / "splits")
    with pytest.raises(DataError, match="is a folder, but not one of Dataset"):
        open_rows(tmp_path / "splits")
    with pytest.raises(DataError, match="has no length"):
        open_rows(dataset.to_iterable_dataset())
    with pytest.raises(DataError, match=r"hf:no/such\?split=test: cannot be loaded: "):
        open_rows("hf:no/such?split=test")


def test_sources_of_all_kinds_together(tmp_path):
    paths = [write_jsonl(tmp_path / "a.jsonl", ROWS[:5]), write_parquet(tmp_path / "b.parquet", ROWS[5:12])]
    reader = open_rows([*paths, ROWS[12:]], epochs=2, seed=1)
    found = every(reader)
    key = json.dumps
    assert found != 2 * ROWS and Counter(map(key, found[:30])) == Counter(map(key, found[30:])) == Counter(
        map(key, ROWS)
    )
    assert found == every(open_rows([*paths, ROWS[12:]], epochs=2, seed=1))
    assert found != every(open_rows([*paths, ROWS[12:]], epochs=2, seed=2))


def test_two_stars_of_a_pattern_are_folders_of_any_depth(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    for number, folder in enumerate(("a/b", "a", "")):
        write_jsonl(tmp_path / folder / f"{number}.jsonl", ROWS[number : number + 1])
    assert len(every(open_rows(str(tmp_path / "**" / "*.jsonl"), epochs=1))) == 3


def test_pattern_is_its_files_in_order_of_name(tmp_path):
    for number in (2, 0, 1):
        write_jsonl(tmp_path / f"part-{number}.jsonl", ROWS[10 * number : 10 * number + 10])
    write_jsonl(tmp_path / "other.jsonl")
    assert every(open_rows(str(tmp_path / "part-*.jsonl"), shuffle=False, epochs=1)) == ROWS
    write_jsonl(tmp_path / "a[1].jsonl", ROWS[:2])  # a name, not a pattern
    assert every(open_rows(str(tmp_path / "a[1].jsonl"), shuffle=False, epochs=1)) == ROWS[:2]


def test_a_large_file_is_not_loaded(tmp_path):
    path = tmp_path / "a.jsonl"
    line = json.dumps({"prompt": "x" * 1000}) + "\n"
    with open(path, "w") as file:
        for _ in range(40):
            file.write(line * 1000)
    tracemalloc.start()
    try:
        reader = open_rows(path, seed=1)
        for _ in range(100):
            reader.take(1)
        used, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 40e6
    assert used < 8.5 * 40_000 + 100_000  # 8 bytes for each row
    assert most < 16e6


# --- continuing -------------------------------------------------------------------------------------------------------


def spoiled(path, share=0.2):
    """A file with rows that are bad or too long, and the prompts that are neither."""
    draw = random.Random(3)
    lines, good = [], []
    for number in range(60):
        kind = draw.random()
        if kind < share:
            lines.append("{")
        else:
            prompt = f"{number}" if kind > 2 * share else f"{number}" + "x" * 20
            lines.append(json.dumps({"prompt": prompt, "label": number}))
            good += [prompt] if kind > 2 * share else []
    path.write_text("\n".join(lines))
    return str(path), good


def read_spoiled(path, batch_size=3, **options):
    rows = open_rows(path, on_bad_row="skip", seed=5, **options)
    return PromptData(rows, batch_size, byte_tokenizer(), label_key="label", max_prompt_len=10)


def rollouts(data, begin, end):
    return [data(rollout_id) for rollout_id in range(begin, end)]


@pytest.mark.parametrize("weights", [None, [2, 1]])
@pytest.mark.parametrize("cut", [0, 1, 7, 16, 17, 49])
def test_run_that_continues_from_a_state_gets_the_rows_of_the_run_without(cut, weights, tmp_path):
    path, _ = spoiled(tmp_path / "a.jsonl")
    sources = path if weights is None else [path, ROWS]
    whole = read_spoiled(sources, weights=weights)
    expected = rollouts(whole, 0, 60)
    first = read_spoiled(sources, weights=weights)
    assert rollouts(first, 0, cut + 1) == expected[: cut + 1]
    rollouts(first, cut + 1, cut + 4)  # a stream is ahead of what is trained
    state = pickle.loads(pickle.dumps(first.state_dict(cut)))
    second = read_spoiled(sources, weights=weights)
    second.load_state_dict(state)
    assert rollouts(second, cut + 1, 60) == expected[cut + 1 :]
    assert rollouts(second, 0, cut + 1) == expected[: cut + 1]  # prompts in flight may be of earlier rollouts
    assert second.metrics() == whole.metrics()


def test_rows_of_an_epoch_come_once_across_rollouts_and_what_is_left_out_is_counted(tmp_path):
    path, good = spoiled(tmp_path / "a.jsonl")
    data = read_spoiled(path, batch_size=1)
    epochs = [[bytes(data(epoch * len(good) + row)[0][0]).decode() for row in range(len(good))] for epoch in range(3)]
    assert all(sorted(epoch) == sorted(good) for epoch in epochs) and len(set(map(tuple, epochs))) == 3
    counts = data.metrics()
    assert counts["data/bad"] + counts["data/too_long"] + 3 * len(good) == counts["data/read"]
    assert 2.8 < counts["data/epoch"] <= 3 and counts["data/bad"] > 20 and counts["data/too_long"] > 20


def test_state_saves_reading_what_was_left_out(tmp_path, monkeypatch):
    path, _ = spoiled(tmp_path / "a.jsonl")
    first = read_spoiled(path)
    expected = rollouts(first, 0, 12)
    second = read_spoiled(path)
    second.load_state_dict(first.state_dict(9))
    read = []
    monkeypatch.setattr("workers.data.row_files.JsonLines.read", lambda self, row: read.append(row) or json.loads("{"))
    with pytest.raises(ValueError):
        second(10)
    assert len(read) == 1
    monkeypatch.undo()
    assert rollouts(second, 10, 12) == expected[10:]


def test_number_of_a_rollout_may_be_one_of_numpy():
    data = PromptData(open_rows([{"prompt": [n, 1]} for n in range(8)], seed=0), 2)
    expected = [data(rollout_id) for rollout_id in range(3)]
    assert [data(np.int64(rollout_id)) for rollout_id in range(3)] == expected


def test_another_batch_size_continues_with_the_next_row(tmp_path):
    path, _ = spoiled(tmp_path / "a.jsonl")
    one = read_spoiled(path, batch_size=1)
    expected = [one(row)[0][0] for row in range(60)]
    first = read_spoiled(path, batch_size=3)
    rollouts(first, 0, 5)
    second = read_spoiled(path, batch_size=4)
    second.load_state_dict(first.state_dict(4))
    assert [ids for prompts, _ in rollouts(second, 5, 15) for ids in prompts] == expected[15:55]
    with pytest.raises(ValueError, match="rollout 1 is before the data; rollout 5 begins at row 15"):
        second(1)


@pytest.mark.parametrize("cut", [0, 5, 29, 30, 31, 58])
def test_take_continues_at_any_row_and_ends_with_the_last_epoch(cut):
    whole = every(open_rows(ROWS, epochs=2, seed=9))
    first = open_rows(ROWS, epochs=2, seed=9)
    assert (first.take(cut) if cut else []) == whole[:cut]
    second = open_rows(ROWS, epochs=2, seed=9)
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    assert second.position == cut
    assert every(second) == whole[cut:] and second.take(3) == []
    assert len(whole) == 60


@pytest.mark.parametrize(
    "change, said",
    [
        ({"sources": ROWS[:29]}, "the size of the sources was 30 rows, and is 29 rows"),
        ({"sources": [ROWS[:10], ROWS[10:]]}, "the size of the sources was 30 rows, and is 10 rows, 20 rows"),
        ({"seed": 1}, "seed was 0, and is 1"),
        ({"shuffle": False}, "shuffle was True, and is False"),
        ({"weights": [1]}, r"their share was None, and is \[1\]"),
    ],
)
def test_state_of_other_data_is_refused(change, said):
    state = open_rows(ROWS).state_dict()
    with pytest.raises(DataError, match=said):
        open_rows(**{"sources": ROWS, **change}).load_state_dict(state)
    with pytest.raises(DataError, match="no state of the data"):
        PromptData(open_rows(ROWS), 1).load_state_dict(None)


def test_changed_file_is_noticed(tmp_path):
    state = open_rows(write_jsonl(tmp_path / "a.jsonl")).state_dict()
    open_rows(write_jsonl(tmp_path / "moved.jsonl")).load_state_dict(state)
    changed = write_jsonl(tmp_path / "a.jsonl", [*ROWS[:-1], {"prompt": "another"}])
    with pytest.raises(DataError, match="30 rows in"):
        open_rows(changed).load_state_dict(state)


def test_bad_row_can_be_left_out_when_a_run_goes_on(tmp_path):
    """A run that has ended with the error of a row continues with on_bad_row="skip"."""
    path, _ = spoiled(tmp_path / "a.jsonl", share=0.03)
    first = PromptData(open_rows(path, seed=5), 1, byte_tokenizer())
    rollout_id = 0
    with pytest.raises(DataError, match="not valid JSON"):
        while True:
            first(rollout_id)
            rollout_id += 1
    second = PromptData(open_rows(path, seed=5, on_bad_row="skip"), 1, byte_tokenizer())
    second.load_state_dict(first.state_dict(rollout_id - 1))
    expected = PromptData(open_rows(path, seed=5, on_bad_row="skip"), 1, byte_tokenizer())
    assert rollout_id and rollouts(second, rollout_id, rollout_id + 9) == rollouts(expected, rollout_id, rollout_id + 9)


def test_state_is_consistent_while_another_thread_reads(tmp_path):
    path, _ = spoiled(tmp_path / "a.jsonl")
    expected = rollouts(read_spoiled(path), 0, 40)
    data, states = read_spoiled(path), []
    thread = threading.Thread(target=lambda: rollouts(data, 0, 40))
    thread.start()
    while thread.is_alive():
        states.append(data.state_dict(3))
    wait_until(lambda: not thread.is_alive())
    for state in states[:: max(1, len(states) // 20)]:
        other = read_spoiled(path)
        other.load_state_dict(state)
        assert rollouts(other, 4, 40) == expected[4:]


# --- prompts ----------------------------------------------------------------------------------------------------------


def one_prompt(row, **options):
    return PromptData(open_rows([row]), 1, byte_tokenizer(), **options)(0)


def test_prompt_is_text_messages_or_ids():
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2?"}]
    assert one_prompt({"prompt": "2+2é"}) == ([[*"2+2é".encode()]], {})
    assert one_prompt({"prompt": [5, 0, 7]}) == ([[5, 0, 7]], {})
    assert one_prompt({"prompt": chat})[0] == [[260, *b"Add.", 257, 258, *b"2+2?", 257, 259]]
    assert one_prompt({"prompt": "2+2?"}, apply_chat_template=True)[0] == [[258, *b"2+2?", 257, 259]]
    assert one_prompt({"question": "a"}, input_key="question") == ([[97]], {})
    data = PromptData(open_rows([{"prompt": [1]}]), 1)
    data(0)[0][0].append(2)  # the list is the caller's
    assert data(0) == ([[1]], {})


def test_beginning_of_text_is_there_once():
    """Templates write it themselves; plain text gets what the tokenizer adds."""
    from tokenizers import processors

    tokenizer = byte_tokenizer()
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<|pad|> $A", pair=None, special_tokens=[("<|pad|>", 256)]
    )
    tokenizer.chat_template = "<|pad|>{{ messages[0]['content'] }}"
    rows = [{"prompt": "a"}, {"prompt": [{"role": "user", "content": "a"}]}]
    assert PromptData(open_rows(rows, shuffle=False), 2, tokenizer)(0)[0] == [[256, 97], [256, 97]]


def test_variables_of_the_template():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if think %}T{% endif %}"
    data = PromptData(
        open_rows([{"prompt": "a"}]), 1, tokenizer, apply_chat_template=True, apply_chat_template_kwargs={"think": True}
    )
    assert data(0)[0] == [[*b"aT"]]


def test_messages_of_parquet_lack_the_keys_that_are_not_their_own(tmp_path):
    """Parquet returns them with null, which only later versions of transformers leave out."""
    tokenizer, given = byte_tokenizer(), []
    tokenizer.apply_chat_template = lambda messages, **options: given.append(messages) or "text"
    calls = [{"function": {"arguments": {name: "b"}}} for name in ("city", "unit")]
    answer = {"role": "assistant", "content": None, "tool_calls": calls}
    messages = [{"role": "user", "content": "a", "name": "Al"}, answer]
    rows = [{"prompt": messages}]
    for path in (write_jsonl(tmp_path / "a.jsonl", rows), write_parquet(tmp_path / "a.parquet", rows)):
        assert PromptData(open_rows(path), 1, tokenizer)(0)[0] == [[*b"text"]]
        assert given.pop() == messages
    calls[0]["function"]["arguments"]["city"] = None  # meant, as in JSON Lines
    PromptData(open_rows(rows), 1, tokenizer)(0)
    assert given.pop() == messages


def test_template_and_ids_equal_those_of_the_tokenizer():
    tokenizer = byte_tokenizer()
    chat = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "?"},
    ]
    expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert one_prompt({"prompt": chat})[0] == [expected]


def test_other_columns_reach_the_reward_function():
    rows = [{"prompt": "a", "answer": 1, "level": 2}, {"prompt": "b", "answer": 3, "tests": ["x"]}]
    data = PromptData(open_rows(rows, shuffle=False), 2, byte_tokenizer(), label_key="answer")
    assert data(0)[1] == {"label": [1, 3], "level": [2, None], "tests": [None, ["x"]]}
    data = PromptData(open_rows(rows, shuffle=False), 2, byte_tokenizer())
    assert data(0)[1] == {"answer": [1, 3], "level": [2, None], "tests": [None, ["x"]]}
    data = PromptData(open_rows([[row] for row in rows], shuffle=False), 1, byte_tokenizer())  # a source each
    assert data(0)[1] == {"answer": [1], "level": [2], "tests": [None]}
    assert data(1)[1] == {"answer": [3], "level": [None], "tests": [["x"]]}
    data = PromptData(open_rows(rows, shuffle=False), 2, byte_tokenizer(), columns=["answer"])
    assert data(0)[1] == {"answer": [1, 3]}
    data = PromptData(open_rows(rows, shuffle=False), 2, byte_tokenizer(), columns=["level"])
    with pytest.raises(DataError, match=r"row 2: has no 'level' \(columns\); it has 'prompt', 'answer', 'tests'"):
        data(0)


def test_length_is_in_tokens_and_the_longest_is_allowed():
    rows = [{"prompt": "é" * length} for length in range(1, 6)]
    data = PromptData(open_rows(rows, shuffle=False), 1, byte_tokenizer(), max_prompt_len=6)
    assert [len(data(rollout_id)[0][0]) for rollout_id in range(6)] == [2, 4, 6, 2, 4, 6]
    assert data.metrics()["data/too_long"] == 2
    shorter = PromptData(open_rows(rows, shuffle=False), 1, byte_tokenizer(), max_prompt_len=3)
    shorter.load_state_dict(data.state_dict(0))
    with pytest.raises(DataError, match=r"row 2: was kept before .* and is too long now; set max_prompt_len as before"):
        shorter(1)


# --- arguments --------------------------------------------------------------------------------------------------------


def test_from_args(tmp_path):
    rows = [{"q": "é" * (1 + number % 4), "a": number} for number in range(20)]
    path = write_jsonl(tmp_path / "a.jsonl", [*rows, {"q": None}])
    args = {"rollout_data": path, "input_key": "q", "label_key": "a", "apply_chat_template": True,
            "rollout_max_prompt_len": 9, "on_bad_row": "skip", "rollout_batch_size": 15, "seed": 3}  # fmt: skip
    byte_tokenizer().save_pretrained(tmp_path / "model")
    one = PromptData.from_args(args, byte_tokenizer())
    other = PromptData.from_args({**args, "hf_checkpoint": str(tmp_path / "model")})
    prompts, extras = one(0)
    assert (prompts, extras) == other(0)
    assert sorted(extras["label"]) == [number for number in range(20) if number % 4 < 3]
    for ids, label in zip(prompts, extras["label"], strict=True):
        assert ids == [258, *rows[label]["q"].encode(), 257, 259]
    one(1)
    assert one.metrics()["data/bad"] >= 1 and one.metrics()["data/too_long"] >= 5
    in_order = PromptData.from_args({**args, "rollout_shuffle": False}, byte_tokenizer())
    assert in_order(0)[1]["label"] == [number for number in range(20) if number % 4 < 3]


def test_lists_and_dicts_of_the_template_in_the_arguments(tmp_path):
    """Such as tools: transformers takes no others than plain ones."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for tool in tools %}{{ tool['name'] }};{% endfor %}{{ messages[0]['content'] }}"
    tools = [{"name": "f"}, {"name": "g"}]
    args = {"rollout_data": write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}]), "rollout_batch_size": 1,
            "apply_chat_template": True, "apply_chat_template_kwargs": {"tools": tools}}  # fmt: skip
    assert PromptData.from_args(args, tokenizer)(0)[0] == [[*b"f;g;a"]]


def test_arguments_of_several_files(tmp_path):
    paths = [write_jsonl(tmp_path / f"{number}.jsonl", ROWS[15 * number :][:15]) for number in range(2)]
    args = read_args({"rollout_data": paths, "rollout_data_weights": [3, 1], "rollout_batch_size": 40})
    _, extras = PromptData.from_args(args, byte_tokenizer())(0)
    assert sum(int(label) < 30 for label in extras["label"]) == 30


@pytest.mark.parametrize(
    "given, said",
    [
        ({"rollout_data": []}, "an empty list"),
        ({"rollout_data_weights": [1]}, "needs rollout_data"),
        ({"rollout_data": ["a", "b"], "rollout_data_weights": [1]}, "has 2 entries"),
        ({"rollout_data": "a", "rollout_data_weights": [0]}, "0.0 is not a number above 0"),
        ({"rollout_data": "a", "on_bad_row": "warn"}, "expected one of 'error', 'skip'"),
        ({"rollout_data": "a", "rollout_max_prompt_len": 0}, "at least 1"),
        ({"rollout_data": 7}, "expected list"),
        ({"eval_data": []}, "args.eval_data is an empty list"),
        ({"reward_function": "exact_mach"}, "expected exact_match, number_match"),
        ({"reward_function": "json.no_such"}, "cannot be imported"),
    ],
)
def test_arguments_are_checked(given, said):
    with pytest.raises(TrainArgsError, match=re.escape(said)):
        read_args(given)


def test_arguments_without_data_are_reported():
    with pytest.warns(UserWarning, match="label_key, rollout_max_prompt_len have no effect without rollout_data"):
        read_args({"label_key": "a", "rollout_max_prompt_len": 4})
    with pytest.raises(DataError, match="rollout_data is not set"):
        PromptData.from_args({})


def test_evaluation_has_each_row_once_and_in_order(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [*ROWS, {"prompt": None}, {"prompt": "x" * 30}])
    args = {"eval_data": path, "on_bad_row": "skip", "rollout_max_prompt_len": 20, "input_key": "prompt"}
    data = PromptData.from_args(args, byte_tokenizer(), key="eval_data")
    prompts, extras = data.all()
    assert data.all() == (prompts, extras)  # at each evaluation
    assert [bytes(ids).decode() for ids in prompts] == [row["prompt"] for row in ROWS]
    assert extras == {name: [row[name] for row in ROWS] for name in ("label", "level")}
    with pytest.raises(DataError, match="none of the last 32 rows can be used"):
        PromptData.from_args({**args, "rollout_max_prompt_len": 1}, byte_tokenizer(), key="eval_data").all()
    with pytest.raises(ValueError, match="epochs=1"):
        PromptData(open_rows(ROWS), 1, byte_tokenizer()).all()
