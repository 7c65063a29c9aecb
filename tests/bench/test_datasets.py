"""Files of requests, and what is said of those that cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disagg.bench import workloads
from disagg.bench.workloads import TextItem, TraceRow, read_mooncake, read_prompts, read_sharegpt
from disagg.errors import ConfigError, DisaggError, UsageError

TURNS = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
ROW = {"timestamp": 0, "input_length": 700, "output_length": 10, "hash_ids": [0, 1]}


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    def write(content: str, name: str = "file.jsonl") -> Path:
        path = tmp_path / name
        path.write_text(content)
        return path

    return write


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_a_text_file_is_one_prompt_as_it_is(file: Callable[..., Path]) -> None:
    assert read_prompts(file("  def f():\n\n    pass\n", "prompt.txt")) == [TextItem("  def f():\n\n    pass\n")]


def test_a_jsonl_file_has_a_prompt_a_line_and_blank_lines_are_nothing(file: Callable[..., Path]) -> None:
    text = lines({"prompt": "a"}) + "\n" + lines({"prompt": "b", "output_tokens": 3})
    assert read_prompts(file(text)) == [TextItem("a"), TextItem("b", 3)]


def test_sharegpt_gives_the_first_human_turn_of_answered_conversations(file: Callable[..., Path]) -> None:
    late = [{"from": "gpt", "value": "x"}, *TURNS]
    body = [{"id": "1", "conversations": TURNS}, {"conversations": TURNS[:1]}, {"conversations": late}]
    assert read_sharegpt(file(json.dumps(body, indent=1), "s.json")) == [TextItem("hi")]


def test_reading_stops_once_there_are_enough(file: Callable[..., Path]) -> None:
    path = file(lines({"prompt": "a"}, {"prompt": "b"}) + "broken")
    assert len(read_prompts(path, limit=2)) == 2
    text = json.dumps([{"conversations": TURNS}] * 2)[:-1] + ", broken"
    assert len(read_sharegpt(file(text, "s.json"), limit=2)) == 2


def test_a_mooncake_trace_is_read_row_by_row(file: Callable[..., Path]) -> None:
    path = file(lines(ROW, {**ROW, "timestamp": 27482, "input_length": 512, "hash_ids": [0]}))
    assert read_mooncake(path) == [TraceRow(0, 700, 10, (0, 1)), TraceRow(27482, 512, 10, (0,))]


@pytest.mark.parametrize(
    ("read", "content", "where", "message"),
    [
        (read_prompts, '{"prompt": "a"}\n{"prompt": 3}\n', "2:1", 'there is no "prompt"'),
        (read_prompts, '{"prompt": "a"}\n{"prompt" "b"}\n', "2:11", "this is not JSON"),
        (read_prompts, '\n\n"text"\n', "3:1", "this is not a JSON object"),
        (read_prompts, '{"prompt": "a", "max": 1}\n', "1:1", 'unknown key "max"'),
        (read_prompts, '{"prompt": "a", "output_tokens": 0}\n', "1:1", '"output_tokens" is missing or not a whole'),
        (read_mooncake, lines(ROW, {**ROW, "input_length": "x"}), "2:1", '"input_length" is missing or not a whole'),
        (read_mooncake, lines({**ROW, "input_length": 1 << 30}), "1:1", '"input_length" is missing or not a whole'),
        (read_mooncake, lines({**ROW, "timestamp": None}), "1:1", '"timestamp" is missing'),
        (read_mooncake, lines({**ROW, "timestamp": 9}, ROW), "2:1", "timestamp 0 is before the 9 above it"),
        (read_mooncake, lines({**ROW, "hash_ids": [0]}), "1:1", "1 hash_ids do not cover 700 input tokens"),
        (read_mooncake, lines({**ROW, "hash_ids": "01"}), "1:1", '"hash_ids" is missing or not a list'),
        (read_sharegpt, '{"a": 1}', "1:1", "the file does not begin with ["),
        (read_sharegpt, '[\n {"conversations": 3}]', "2:2", 'not an object with a list of "conversations"'),
        (read_sharegpt, '[\n\n{"conversations": [1]}]', "3:1", "each turn of a conversation reads"),
        (read_sharegpt, '[\n{"conversations": []},\n nope]', "3:2", "this is not JSON"),
        (read_sharegpt, '[\n{"conversations": []}\n{}]', "3:1", "expected , or ]"),
        (read_sharegpt, '[{"conversations": []}', "1:23", "expected , or ]"),
        (read_prompts, "[" * 100_000, "1:1", "nested too deeply"),
        (read_sharegpt, "[" * 100_000, "1:2", "nested too deeply"),
    ],
)
def test_a_fault_is_shown_with_file_line_and_column(
    read: Any, content: Any, where: str, message: str, file: Callable[..., Path]
) -> None:
    path = file(content)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert caught.value.message.startswith(f"{path}:{where}: ") and message in caught.value.message


@pytest.mark.parametrize(("read", "content"), [(read_prompts, ""), (read_mooncake, "\n\n"), (read_sharegpt, "[]")])
def test_a_file_without_requests_says_so(read: Any, content: str, file: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="holds no request"):
        read(file(content))


def test_an_empty_prompt_file_says_so(file: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        read_prompts(file(" \n", "prompt.txt"))


def test_files_that_cannot_be_read_are_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "latin").write_bytes(b"\xff")
    (tmp_path / "big").write_text("x" * 100)
    for name, message in (("none", "No such file"), (".", "Is a directory"), ("latin", "is not UTF-8")):
        with pytest.raises(UsageError, match=message):
            read_prompts(tmp_path / name)
    monkeypatch.setattr(workloads, "MAX_FILE_BYTES", 99)
    with pytest.raises(DisaggError, match="use a part of it"):
        read_prompts(tmp_path / "big")
    with pytest.raises(DisaggError, match="use a part of it"):
        read_prompts(Path("/dev/zero"))
