"""Data that cannot be used: each kind is one clear `DataError`, which has the file and the row."""

import gzip
import json
import os
import pickle
import re
import sys
from pathlib import Path

import pytest
from byte_tokens import byte_tokenizer

from workers import DataError, PromptData, open_rows

GOOD = {"prompt": "2+2?", "label": "4"}
MESSAGES = [{"role": "user", "content": "2+2?"}]


def line(**row):
    return json.dumps({**GOOD, **row}) + "\n"


LINE = line()


def lines(*of):
    """A file of JSON Lines."""
    return "".join(of).encode()


def third(text):
    """A file whose third line is this one."""
    return lines(LINE, LINE, text if text.endswith("\n") else text + "\n", LINE)


def long_line(path):
    """A third line of 100 MB."""
    with open(path, "wb") as file:
        file.write(lines(LINE, LINE, '{"prompt": "'))
        file.seek(100 * 2**20, os.SEEK_CUR)
        file.write(lines('"}\n', LINE))


def parquet(rows=None, cut=None, **columns):
    """A Parquet file of columns, of which ``cut`` bytes are kept."""

    def make(path):
        pa = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
        import pyarrow.parquet as pq

        table = pa.table(columns) if rows is None else pa.Table.from_pylist(rows)
        pq.write_table(table, path)
        if cut is not None:
            os.truncate(path, cut(path.stat().st_size))

    return make


def damaged_page(path):
    """The footer says what the file has, but the bytes are others."""
    parquet(prompt=[f"{number} + 1?" for number in range(2000)], label=["4"] * 2000)(path)
    content = bytearray(path.read_bytes())
    content[4:2000] = bytes(1996)
    path.write_bytes(content)


def two_columns_of_one_name(path):
    pa = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"]), path)


def no_permission(path):
    os.symlink(path.name, path)  # a loop: root may read every file


FILES = {
    # whole files
    "missing": ("a.jsonl", None, "does not exist"),
    "missing parquet": ("a.parquet", None, "does not exist"),
    "folder": ("a.jsonl", Path.mkdir, "is a folder"),
    "folder of files": ("data", lambda path: (path.mkdir(), (path / "a.jsonl").write_text(LINE)), "pass its files"),
    "pipe": ("a.jsonl", os.mkfifo, "is not a regular file"),
    "unreadable": ("a.jsonl", no_permission, "cannot be read"),
    "pattern without files": ("*.jsonl", None, "matches no file"),
    "empty": ("a.jsonl", b"", "is empty"),
    "empty parquet": ("a.parquet", b"", "is empty"),
    "empty lines": ("a.jsonl", b"\n\r\n\n", "has no rows"),
    "byte order mark alone": ("a.jsonl", b"\xef\xbb\xbf", "has no rows"),
    "utf-16": ("a.jsonl", LINE.encode("utf-16"), "UTF-16"),
    "utf-16 without mark": ("a.jsonl", LINE.encode("utf-16-le"), "UTF-16"),
    "utf-16 big": ("a.jsonl", LINE.encode("utf-16-be"), "UTF-16"),
    "utf-32": ("a.jsonl", LINE.encode("utf-32"), "UTF-32"),
    "gzip": ("a.jsonl", gzip.compress(LINE.encode()), "compressed (gzip)"),
    "gzip by name": ("a.jsonl.gz", gzip.compress(LINE.encode()), "compressed (gzip)"),
    "zstd": ("a.jsonl.zst", b"\x28\xb5\x2f\xfd" + bytes(9), "compressed (zstd)"),
    "zip": ("a.jsonl", b"PK\x03\x04" + bytes(9), "ZIP archive"),
    "parquet named jsonl": ("a.jsonl", parquet([GOOD]), "name it .parquet"),
    "jsonl named parquet": ("a.parquet", LINE.encode(), "name it .jsonl"),
    "csv": ("a.csv", b"prompt,label\n2+2?,4\n", "has the suffix '.csv'"),
    "no suffix": ("data", LINE.encode(), "has the suffix ''"),
    "json array": ("a.json", json.dumps([GOOD, GOOD]).encode(), "one JSON array"),
    "json array with a mark": ("a.json", json.dumps([GOOD]).encode("utf-8-sig"), "one JSON array"),
    "html": ("a.jsonl", b"<!DOCTYPE html><title>404</title>", "HTML"),
    "pointer of git lfs": ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS"),
    "url": ("https://host/a.jsonl", None, "is a URL"),
    "truncated parquet": ("a.parquet", parquet([GOOD] * 100, cut=lambda size: size - 9), "truncated or damaged"),
    "half a parquet": ("a.parquet", parquet([GOOD] * 100, cut=lambda size: size // 2), "truncated or damaged"),
    "damaged parquet": ("a.parquet", damaged_page, "truncated or damaged"),
    "parquet without rows": ("a.parquet", parquet(prompt=[], label=[]), "has no rows"),
    "parquet with a column twice": ("a.parquet", two_columns_of_one_name, "two columns 'prompt'"),
}
ROWS = {
    # the third of four rows
    "truncated line": ("a.jsonl", lines(LINE, LINE, LINE[:20]), "not valid JSON"),
    "truncated at the end": ("a.jsonl", lines(LINE, LINE, LINE[:-2]), "the file may be truncated"),
    "no json": ("a.jsonl", third("2+2? 4"), "not valid JSON"),
    "single quotes": ("a.jsonl", third("{'prompt': '2+2?', 'label': '4'}"), "not valid JSON"),
    "comma at the end": ("a.jsonl", third('{"prompt": "2+2?", "label": "4",}'), "not valid JSON"),
    "object over several lines": ("a.jsonl", third("{"), "write each object on one line"),
    "two objects": ("a.jsonl", third(LINE.strip() + LINE), "Extra data (character 33)"),
    "blank line of spaces": ("a.jsonl", third("    "), "not valid JSON"),
    "nan": ("a.jsonl", third('{"prompt": "2+2?", "label": NaN}'), "NaN is not JSON"),
    "key twice": ("a.jsonl", third('{"prompt": "a", "label": "4", "prompt": "b"}'), "the key 'prompt' is there twice"),
    "nested key twice": ("a.jsonl", third('{"prompt": "a", "label": {"x": 1, "x": 2}}'), "the key 'x' is there twice"),
    "deep nesting": ("a.jsonl", third('{"prompt": ' + "[" * 100_000), "nested too deeply"),
    "number of 5000 digits": ("a.jsonl", third('{"prompt": "a", "label": ' + "1" * 5000 + "}"), "4300 digits"),
    "latin-1": ("a.jsonl", LINE.encode() * 2 + '{"prompt": "é", "label": "4"}\n'.encode("latin-1"), "0xe9) is not"),
    "cut character": ("a.jsonl", LINE.encode() * 2 + '{"prompt": "é'.encode()[:-1], "is not UTF-8"),
    "byte 0": ("a.jsonl", third('{"prompt": "a\0b", "label": "4"}'), "Invalid control character"),
    "zeros": ("a.jsonl", LINE.encode() * 2 + bytes(4096), "not valid JSON"),
    "line of 100 MB": ("a.jsonl", long_line, "the line has 104,857,615 bytes"),
    "list": ("a.jsonl", third('["2+2?", "4"]'), "is not a JSON object, but an array"),
    "text": ("a.jsonl", third('"2+2?"'), "but a string"),
    "null": ("a.jsonl", third("null"), "but null"),
    "without prompt": ("a.jsonl", third('{"question": "2+2?", "label": "4"}'), "has no 'prompt' (input_key); it has '"),
    "without label": ("a.jsonl", third('{"prompt": "2+2?", "answer": "4"}'), "has no 'label' (label_key)"),
    "no columns": ("a.jsonl", third("{}"), "it has no columns"),
    "null as prompt": ("a.jsonl", third(line(prompt=None)), "'prompt' is None; expected a text"),
    "null as label": ("a.jsonl", third(line(label=None)), "has no 'label'"),
    "number as prompt": ("a.jsonl", third(line(prompt=4)), "'prompt' is 4; expected a text"),
    "object as prompt": ("a.jsonl", third(line(prompt={"role": "user"})), "expected a text, a list of messages"),
    "empty prompt": ("a.jsonl", third(line(prompt="")), "'prompt' is empty"),
    "no messages": ("a.jsonl", third(line(prompt=[])), "'prompt' is empty"),
    "mixed ids": ("a.jsonl", third(line(prompt=[1, "2"])), "'prompt' has 1; expected"),
    "negative id": ("a.jsonl", third(line(prompt=[1, -1])), "'prompt' has 1; expected"),
    "fractional id": ("a.jsonl", third(line(prompt=[1.5])), "'prompt' has 1.5; expected"),
    "message without role": ("a.jsonl", third(line(prompt=[{"content": "2+2?"}])), "'prompt' has {'content'"),
    "message without content": ("a.jsonl", third(line(prompt=[{"role": "user"}])), "'prompt' has {'role'"),
    "null in messages": ("a.jsonl", third(line(prompt=[*MESSAGES, None])), "'prompt' has None"),
    "half a surrogate pair": ("a.jsonl", third('{"prompt": "\\ud800", "label": "4"}'), "is not Unicode"),
    "null in parquet": ("a.parquet", parquet([GOOD, GOOD, {**GOOD, "prompt": None}]), "'prompt' is None"),
    "nested null in parquet": (
        "a.parquet",
        parquet([{**GOOD, "prompt": MESSAGES}] * 2 + [{**GOOD, "prompt": [{"role": None, "content": "a"}]}]),
        "'prompt' has {",
    ),
}  # fmt: skip


def made(folder, name, content):
    """The path of a data file."""
    path = folder / name if "://" not in name else name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        content(path)
    return str(path)


def data_of(path, **options):
    return PromptData(open_rows(path, shuffle=False, epochs=1, **options), 1, byte_tokenizer(), label_key="label")


def test_there_are_fifty():
    assert len(FILES) + len(ROWS) >= 50


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_bad_file_is_an_error(kind, on_bad_row, tmp_path):
    name, content, said = FILES[kind]
    path = made(tmp_path, name, content)
    with pytest.raises(DataError, match=re.escape(said)) as raised:
        data_of(path, on_bad_row=on_bad_row)
    assert raised.value.path == path and path in str(raised.value) and raised.value.row is None


@pytest.mark.parametrize("kind", ROWS)
def test_bad_row_is_an_error_with_its_number_or_is_counted(kind, tmp_path):
    name, content, said = ROWS[kind]
    path = made(tmp_path, name, content)
    data = data_of(path)
    for rollout_id in range(2):
        assert data(rollout_id) == ([[*b"2+2?"]], {"label": ["4"]}) or kind.startswith("nested null")
    unit = "line" if name == "a.jsonl" else "row"
    with pytest.raises(DataError, match=re.escape(said)) as raised:
        data(2)
    assert str(raised.value).startswith(f"{path}, {unit} 3: ") and len(str(raised.value)) < 400
    assert (raised.value.path, raised.value.row) == (path, 3)
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (str(copy), copy.path, copy.row) == (str(raised.value), path, 3)

    reader = data_of(path, on_bad_row="skip").rows
    assert reader.metrics()["data/bad"] == 0
    good = len(reader.take(10))
    assert reader.metrics()["data/bad"] == 1 and good == reader.order.total - 1


def test_template_that_refuses_a_row_is_a_bad_row(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    path = made(tmp_path, "a.jsonl", lines(line(prompt=MESSAGES)))
    data = PromptData(open_rows(path), 1, tokenizer)
    with pytest.raises(DataError, match=r"a.jsonl, line 1: the chat template refuses 'prompt': roles must alternate"):
        data(0)


@pytest.mark.parametrize("prompt, tokenizer", [("text", None), (MESSAGES, None), (MESSAGES, "without template")])
def test_what_no_row_can_do_without_is_an_error_also_with_skip(prompt, tokenizer, tmp_path):
    if tokenizer:
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = None
    path = made(tmp_path, "a.jsonl", lines(line(prompt=prompt)))
    data = PromptData(open_rows(path, on_bad_row="skip"), 1, tokenizer)
    with pytest.raises(DataError, match="set hf_checkpoint"):
        data(0)


def test_template_is_looked_for_at_once(tmp_path):
    path = made(tmp_path, "a.jsonl", lines(LINE))
    with pytest.raises(DataError, match="no tokenizer"):
        PromptData(open_rows(path), 1, apply_chat_template=True)


def test_data_without_a_row_that_can_be_used_is_an_error_and_no_endless_search(tmp_path):
    path = made(tmp_path, "a.jsonl", lines(LINE, "no\n", LINE))
    data = PromptData(open_rows(path, on_bad_row="skip"), 1, byte_tokenizer(), max_prompt_len=3)
    with pytest.raises(DataError, match="none of the last 3 rows can be used; since the beginning 2 too long, 1 bad"):
        data(0)


@pytest.mark.parametrize("weights", [None, [2, 1]])
def test_one_row_that_can_be_used_is_enough_wherever_it_is_in_each_epoch(weights):
    """Up to four of the other two are between it and itself."""
    rows = open_rows([[{"prompt": "long"}] * 2, [{"prompt": "a"}]], weights=weights)
    data = PromptData(rows, 1, byte_tokenizer(), max_prompt_len=3)
    assert [data(step)[0] for step in range(50)] == [[[97]]] * 50


def test_only_the_first_bad_rows_are_logged(tmp_path, caplog):
    path = made(tmp_path, "a.jsonl", lines(*["no\n"] * 20, LINE))
    reader = data_of(path, on_bad_row="skip").rows
    assert len(reader.take(1)) == 1
    assert [record.message.split(":")[0] for record in caplog.records] == [f"{path}, line {n}" for n in range(1, 6)]
    assert reader.metrics()["data/bad"] == 20


def test_file_that_shrinks_while_it_is_used_is_an_error(tmp_path):
    path = made(tmp_path, "a.jsonl", lines(LINE, LINE))
    data = data_of(path, on_bad_row="skip")
    os.truncate(path, len(LINE) + 5)
    with pytest.raises(DataError, match="was truncated since it was opened"):
        data.rows.take(2)


def test_disk_that_fails_while_it_is_used_is_an_error(tmp_path, monkeypatch):
    data = data_of(made(tmp_path, "a.jsonl", lines(LINE)), on_bad_row="skip")

    def failing(*given):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", failing)
    with pytest.raises(DataError, match="cannot be read: Input/output error"):
        data.rows.take(1)


@pytest.mark.parametrize(
    "given, said",
    [
        ([], "the list is empty"),
        (None, "pass a path"),
        (7, "pass a path"),
        ({"train": [GOOD], "test": [GOOD]}, "'train', 'test'; pass one of them"),
        (iter([GOOD]), "pass a path"),
        ("hf:some/data?config=x", "'config' is none of the options"),
        ([[GOOD, 3]], "row 2: the row is a int, not a dict"),
    ],
)
def test_what_is_no_source_is_an_error(given, said):
    with pytest.raises(DataError, match=re.escape(said)):
        open_rows(given, shuffle=False).take(2)


def test_options_are_checked():
    for options, said in (
        ({"on_bad_row": "warn"}, "on_bad_row='warn'"),
        ({"epochs": 0}, "epochs=0"),
        ({"max_line_bytes": 0}, "max_line_bytes=0"),
        ({"weights": [1, 2]}, "1 sources"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            open_rows([GOOD], **options)
    with pytest.raises(ValueError, match="max_prompt_len=0"):
        PromptData(open_rows([GOOD]), 1, max_prompt_len=0)
    with pytest.raises(ValueError, match="batch_size=0"):
        PromptData(open_rows([GOOD]), 0)
    with pytest.raises(ValueError, match="`prepare` already"):
        PromptData(open_rows([GOOD], prepare=dict), 1)


def test_data_with_two_labels_is_refused():
    data = PromptData(open_rows([{**GOOD, "answer": 4}], on_bad_row="skip"), 1, byte_tokenizer(), label_key="answer")
    with pytest.raises(DataError, match=r"has a column 'label'.*choose"):
        data(0)
    data = PromptData(open_rows([{**GOOD, "answer": 4}]), 1, byte_tokenizer(), label_key="answer", columns=[])
    assert data(0)[1] == {"label": [4]}


def test_rollout_beyond_the_last_epoch_is_an_error():
    data = PromptData(open_rows([GOOD] * 3, epochs=1), 2, byte_tokenizer())
    assert len(data(0)[0]) == 2
    with pytest.raises(DataError, match="rollout 1 goes beyond the last row"):
        data(1)


def test_missing_library_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = made(tmp_path, "a.parquet", b"PAR1")
    with pytest.raises(ImportError, match=r"pip install 'single-controller\[data\]'"):
        open_rows(path)


def test_index_error_of_prepare_is_a_bad_row_and_not_the_end():
    rows, first = [{"m": ["a"]}, {"m": []}, {"m": ["b"]}], lambda row: row["m"][0]
    with pytest.raises(DataError, match="row 2: list index out of range"):
        open_rows(rows, shuffle=False, epochs=1, prepare=first).take(3)
    assert open_rows(rows, shuffle=False, epochs=1, prepare=first, on_bad_row="skip").take(9) == ["a", "b"]


def test_full_temporary_folder_is_not_a_damaged_file(tmp_path, monkeypatch):
    def full(pa, source):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("workers.data.row_files.ParquetRows._decoded", staticmethod(full))
    with pytest.raises(DataError, match="set TMPDIR"):
        open_rows(made(tmp_path, "a.parquet", parquet([GOOD])))
