from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from disagg.api.events import TokenLogprob
from disagg.api.requests import PrefillOffer
from disagg.cli.generate import ranking_view
from disagg.cli.words import read_prompt
from disagg.config import load
from disagg.errors import Overloaded, Partial, RequestError, ServerUnavailable, UsageError
from disagg.inference import client
from disagg.inference.types import Chunk
from tests.cli.answers import TEXT, FakeClient
from tests.cli.commandline import run, write_fleet
from tests.values import printed


@pytest.fixture(autouse=True)
def fake_client(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    class Fresh(FakeClient):
        pass

    FakeClient.requests.clear()
    monkeypatch.setattr(client, "AsyncClient", Fresh)
    return Fresh


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return write_fleet(tmp_path)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    return write_fleet(tmp_path, ("tiny", "other"))


def test_the_text_goes_to_stdout_and_the_metrics_to_stderr(one: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", one, "generate", "def fibonacci(n):") == 0
    out, err = capsys.readouterr()
    assert out == TEXT
    assert "7 in" in err and "329 tok/s" in err and "TTFT: request sent → first token" not in err
    assert run("--config", one, "generate", "--explain", "def fibonacci(n):") == 0
    assert "TTFT: request sent → first token" in capsys.readouterr().err
    assert all(len(line) <= 80 for line in err.splitlines())


def test_several_models_are_followed_by_what_running_them_together_was_worth(
    two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--config", two, "generate", "-m", "tiny", "-m", "other", "x") == 0
    assert "% parallel efficiency" in capsys.readouterr().err
    assert run("--config", two, "generate", "-m", "tiny", "x") == 0
    assert "parallel efficiency" not in capsys.readouterr().err


def test_every_option_reaches_the_request(one: Path) -> None:
    sampling = "--max-tokens 3 --temperature 0.5 --top-p 0.9 --top-k 4 --min-p 0.1 --repetition-penalty 1.1 --seed 7"
    rest = [
        "--stop",
        "a",
        "--stop",
        "b",
        "--logprobs",
        "2",
        "--timeout",
        "9",
        "--alone",
        "prefill",
        "--json",
        "--on-kv-failure",
        "fail",
        "--split",
        "12",
    ]
    assert run("--config", one, "generate", "-m", "tiny-alias", *sampling.split(), *rest, "x") == 0
    assert FakeClient.requests == [
        {
            "model": "tiny",
            "prompt": "x",
            "max_tokens": 3,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 4,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "seed": 7,
            "stop": ("a", "b"),
            "logprobs": 2,
            "timeout": 9.0,
            "alone": "prefill",
            "on_kv_failure": "fail",
            "split": 12,
        }
    ]


def test_chat_sends_the_prompt_as_a_users_message(one: Path) -> None:
    run("--config", one, "generate", "--chat", "hello")
    assert FakeClient.requests[0]["messages"] == [{"role": "user", "content": "hello"}]
    assert FakeClient.requests[0]["prompt"] is None


def test_json_is_one_object_on_stdout(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", two, "generate", "-m", "tiny", "-m", "other", "--json", "x") == 0
    out, err = capsys.readouterr()
    figures = json.loads(out)["together"]
    assert figures["complete"] == 2
    assert figures["efficiency"] == pytest.approx(figures["sequential_sum"] / (2 * figures["wall"]))
    results = json.loads(out)["results"]
    assert [r["model"] for r in results] == ["tiny", "other"] and err == ""
    assert set(results[0]) == {"model", "text", "finish_reason", "warnings", "metrics", "tokens"}
    assert results[0]["text"] == TEXT and results[0]["metrics"]["decode_computed_tokens"] == 1


def test_several_models_print_each_text_under_a_header(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", two, "generate", "-m", "tiny", "-m", "other", "x") == 0
    out = capsys.readouterr().out
    assert f"== tiny ==\n{TEXT}\n" in out and f"== other ==\n{TEXT}\n" in out


def test_one_models_failure_leaves_the_others_answer(
    two: Path, fake_client: type[FakeClient], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(model: Any) -> None:
        if model == "tiny":
            raise Overloaded("the queue of tiny is full", "try again in 1 s")

    fake_client.on_stream = staticmethod(fail)
    assert run("--config", two, "generate", "-m", "tiny", "-m", "other", "x") == 3
    out, err = capsys.readouterr()
    assert "== other ==" in out and "error: the queue of tiny is full\n hint: try again in 1 s" in err


def test_a_failed_models_error_is_in_the_json(
    two: Path, fake_client: type[FakeClient], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(model: Any) -> None:
        if model == "tiny":
            raise Overloaded("full")

    fake_client.on_stream = staticmethod(fail)
    assert run("--config", two, "generate", "-m", "tiny", "-m", "other", "--json", "x") == 3
    results = json.loads(capsys.readouterr().out)["results"]
    assert results[0] == {"model": "tiny", "text": "", "error": {"code": "Overloaded", "message": "full", "hint": ""}}


def test_what_had_arrived_of_a_failed_answer_is_in_the_json(
    one: Path, fake_client: type[FakeClient], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fail(self: FakeClient, model: str, deliver: Any) -> Any:
        deliver(Chunk("half an", (TokenLogprob(5, 0.0), TokenLogprob(6, 0.0))))
        error = ServerUnavailable("gone")
        error.partial = Partial("half an", (5, 6))
        raise error

    monkeypatch.setattr(fake_client, "answer", fail)
    assert run("--config", one, "generate", "--json", "x") == 4
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert (result["text"], result["token_ids"], result["error"]["message"]) == ("half an", [5, 6], "gone")


def test_explain_shows_the_hosts_and_the_reasons_before_the_answer(
    one: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--config", one, "generate", "--explain", "x") == 0
    out, err = capsys.readouterr()
    assert out == TEXT
    assert (
        "750 ms" in err
        and "queue 250 ms, prompt 500 ms" in " ".join(err.split())
        and "holds 64 tokens of the prompt" in err
        and "gets no request: down" in err
    )
    assert err.index("mac-1") < err.index("dgx-1") < err.index("mac-2") < err.index("TTFT: request sent")


@pytest.mark.parametrize("offer", [None, PrefillOffer(tokens_s=1000.0)])
def test_explain_states_that_a_short_rest_may_be_computed_without_the_prefill_host(offer: PrefillOffer | None) -> None:
    ranking = replace(FakeClient(None).explain("tiny"), offer=offer)
    console = Console(file=io.StringIO(), width=80)
    console.print(ranking_view(ranking))
    assert ("the decode host may compute it" in " ".join(printed(console).split())) is (offer is not None)


def test_explain_in_json_is_a_field_of_the_answer(one: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", one, "generate", "--explain", "--json", "x") == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    ranking = result["ranking"]
    assert [choice["host"] for choice in ranking["decode"]] == ["mac-1"] and ranking["left_out"] == {"mac-2": "down"}
    assert ranking["decode"][0]["costs_s"] == {"queue": 0.25, "prompt": 0.5}


def test_notes_about_the_answer_go_to_stderr(
    one: Path, fake_client: type[FakeClient], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_client.note = "waiting: mac-1 is loading"
    assert run("--config", one, "generate", "x") == 0
    out, err = capsys.readouterr()
    assert out == TEXT and err.startswith("note: waiting: mac-1 is loading\n")


def test_which_model_must_be_said_where_there_are_several(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", two, "generate", "x") == 2
    assert "which model? hosts.toml has tiny, other" in capsys.readouterr().err


def test_an_unknown_model_lists_those_there_are(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", two, "generate", "-m", "nope", "x") == 2
    err = capsys.readouterr().err
    assert "tiny" in err and "other" in err and FakeClient.requests == []


def test_a_prompt_before_the_model_is_an_error_with_the_right_order(
    two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--config", two, "generate", "to be", "tiny") == 2
    err = capsys.readouterr().err
    assert "error: to be is not a model\n hint: the model comes first: disagg generate tiny 'to be'" in err


def test_the_prompt_comes_from_a_file_or_stdin_as_it_is(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt").write_text("from a file\n")
    run("--config", one, "generate", "-f", tmp_path / "prompt")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("from stdin é\n".encode())))
    run("--config", one, "generate", "-")
    assert [r["prompt"] for r in FakeClient.requests] == ["from a file\n", "from stdin é\n"]


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (b"", ["-"], "the prompt from stdin is empty"),
        (b"\n", ["-"], "the prompt from stdin is empty"),
        (b"\xff", ["-"], "the prompt from stdin is not UTF-8"),
        (b"", [""], "the prompt is empty"),
        (b"", [], "the prompt from stdin is empty"),
        (b"", ["x", "-f", "y"], "there are two prompts"),
        (b"", ["-f", "/no/such/file"], "cannot read the prompt from /no/such/file: No such file or directory"),
        (b"", ["-f", "/"], "cannot read the prompt from /: Is a directory"),
        (b"", ["x", "--logprobs", "2"], "--logprobs: its figures are printed as JSON only"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_one_clear_error(
    content: bytes,
    arguments: list[Any],
    message: str,
    one: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert run("--config", one, "generate", *arguments) == 2
    assert message in capsys.readouterr().err and FakeClient.requests == []


class Endless(io.RawIOBase):
    """A source that never ends, such as /dev/urandom. size: bytes read so far."""

    size = 0

    def read(self, size: int | None = -1) -> bytes:
        assert size is not None and 0 < size <= 1 << 20, "a signal takes effect between two reads only"
        self.size += size
        return b"\xff" * size


@pytest.mark.parametrize(("context", "limit"), [(0, 1 << 20), (1 << 15, 1 << 21), (1 << 20, 1 << 26)])
def test_a_prompt_is_read_up_to_the_largest_that_a_request_may_have(
    context: int, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = Endless()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(endless))  # type: ignore[type-var]  # a fake
    with pytest.raises(UsageError, match=f"the prompt from stdin is over {limit >> 20} MiB"):
        read_prompt("-", None, context)
    assert limit < endless.size <= limit + (1 << 20)
    file = tmp_path / "prompt"
    with file.open("wb") as written:
        written.write(b"x")
        written.truncate(limit)
    assert len(read_prompt(None, file, context)) == limit
    with file.open("ab") as written:
        written.write(b"x")
    with pytest.raises(UsageError, match=f"over {limit >> 20} MiB, more than a request may have"):
        read_prompt(None, file, context)


def test_the_largest_context_of_the_models_bounds_the_prompt(
    one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt").write_bytes(b"x" * (64 * load(one).model("tiny").context + (1 << 20)))
    assert run("--config", one, "generate", "-f", tmp_path / "prompt") == 2
    assert "more than a request may have" in capsys.readouterr().err and FakeClient.requests == []


def test_a_terminal_gets_panels_and_no_control_characters(
    two: Path, fake_client: type[FakeClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_client.text = "safe \x1b]0;title\x07 text"
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        assert run("--config", two, "generate", "-m", "tiny", "-m", "other", "x") == 0
        terminal.flush()
        shown = os.read(reader, 100_000).decode()
    os.close(reader)
    assert "╭─" in shown and "other" in shown and "\x1b]0;title" not in shown


@pytest.mark.parametrize("models", [["-m", "tiny"], ["-m", "tiny", "-m", "other"], ["-m", "tiny", "--json"]])
def test_a_reader_that_goes_away_ends_it_without_a_word(
    two: Path, models: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    pipe = os.fdopen(writing, "w")
    monkeypatch.setattr(sys, "stdout", pipe)
    assert run("--config", two, "generate", *models, "x") == 128 + signal.SIGPIPE
    assert capsys.readouterr().err == ""
    with contextlib.suppress(BrokenPipeError):  # what could not be written is still in its buffer
        pipe.close()


@pytest.mark.parametrize("command", [["generate", "x"], ["generate", "--json", "x"], ["status"], ["status", "--json"]])
def test_a_full_disk_behind_stdout_is_one_clear_error(
    one: Path, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run("--config", one, *command) == 1
    assert capsys.readouterr().err.startswith("error: cannot write the output: No space left on device\n hint: ")


def test_so_it_is_with_more_than_a_buffer_takes(
    one: Path, fake_client: type[FakeClient], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_client.text = "x" * 100_000
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run("--config", one, "generate", "--json", "x") == 1
    assert "cannot write the output" in capsys.readouterr().err


def pipe_in(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make stdin a terminal at which nobody types."""
    stdin = io.TextIOWrapper(io.BytesIO(b""))
    monkeypatch.setattr(stdin, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", stdin)


@pytest.mark.parametrize(
    ("words", "piped", "models", "prompt"),
    [
        (["other-alias", "hi"], b"", ["other"], "hi"),
        (["other"], b"from a pipe\n", ["other"], "from a pipe\n"),
        (["-m", "tiny"], b"from a pipe\n", ["tiny"], "from a pipe\n"),
        (["-m", "tiny", "-m", "other", "-"], b"from a pipe\n", ["tiny", "other"], "from a pipe\n"),
        (["-m", "tiny", "other"], b"", ["tiny"], "other"),
        (["other", "-"], b"from a pipe\n", ["other"], "from a pipe\n"),
    ],
)
def test_the_model_and_the_prompt_are_found_in_arguments_and_pipes(
    words: list[str], piped: bytes, models: list[str], prompt: str, two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, piped)
    assert run("--config", two, "generate", *words) == 0
    assert [(one["model"], one["prompt"]) for one in FakeClient.requests] == [(model, prompt) for model in models]


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ([], "there is no prompt", 'disagg generate -m NAME "text to continue"'),
        (["-m", "tiny"], "there is no prompt", 'disagg generate -m NAME "text to continue"'),
        (["tiny"], "there is no prompt for tiny", 'disagg generate tiny "text to continue"'),
        (["tiny", "two", "words"], "3 arguments: the prompt is one", "quote it: "),
        (["some text"], "which model? hosts.toml has tiny, other", "name one: "),
        (["tiny", "-m", "other", "hi"], "the model is given twice: tiny and -m other", "leave out one; several "),
        (["-m", "tiny", "-m", "tiny", "hi"], "the model is given twice: -m tiny -m tiny", "leave out one"),
        (["-m", "other", "-m", "other-alias", "hi"], "the model is given twice: -m other -m other-alias", "leave "),
    ],
)
def test_at_a_terminal_the_error_is_the_command_to_type(
    words: list[str],
    message: str,
    hint: str,
    two: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    on_terminal(monkeypatch)
    assert run("--config", two, "generate", *words) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}\n hint: {hint}")
    assert FakeClient.requests == []


def test_quiet_prints_the_text_and_errors_only(
    one: Path, fake_client: type[FakeClient], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("generate", "--quiet", "--config", one, "x") == 0
    assert capsys.readouterr() == (TEXT, "")

    def fail(model: str) -> None:
        raise Overloaded("full")

    fake_client.on_stream = staticmethod(fail)
    assert run("generate", "-q", "--config", one, "x") == 3
    assert capsys.readouterr().err == "error: full\n"


def test_an_error_about_a_field_names_the_option(
    one: Path, fake_client: type[FakeClient], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(model: str) -> None:
        raise RequestError("sampling.top_k: expected int <= 1048576 (got 2000000)")

    fake_client.on_stream = staticmethod(fail)
    assert run("--config", one, "generate", "x") == 2
    assert capsys.readouterr().err == "error: --top-k: expected int <= 1048576 (got 2000000)\n"


def test_a_single_answer_is_not_said_to_have_run_together_with_others(
    two: Path, fake_client: type[FakeClient], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(model: str) -> None:
        if model == "other":
            raise Overloaded("full")

    fake_client.on_stream = staticmethod(fail)
    assert run("generate", "--config", two, "-m", "tiny", "-m", "other", "x") == 3
    assert "together" not in capsys.readouterr().err


def test_alone_on_a_role_that_no_host_has_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", write_fleet(tmp_path), "generate", "--alone", "whole", "tiny", "hi") == 2
    assert "--alone whole: no whole host serves tiny" in capsys.readouterr().err
