"""benchmarks/peers/answers.py and mlx_server.py: events into figures, prompts, and the model copy."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import cast

import pytest

from benchmarks.peers import mlx_server, same_model
from benchmarks.peers.answers import Answer, Events, Figures, figures, post_all, read_disagg, read_openai
from benchmarks.peers.mlx_server import BARE, CLIENT, OURS, PEER
from disagg.tls.certificate import ServerTLS, client_tls

TOKEN = "a token of thirty-two characters"
DONE = {"prompt_tokens": 9, "completion_tokens": 3, "computed_prompt_tokens": 1}

OPENAI = (
    {"choices": [{"index": 0, "finish_reason": None, "text": "a"}]},
    {"choices": [{"index": 0, "finish_reason": None, "text": "b"}]},
    {"choices": [{"index": 0, "finish_reason": "length", "text": ""}]},
)
USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}


def test_an_answer_of_mlx_lm_server_ends_with_its_usage() -> None:
    events = Events()
    assert [read_openai(events, data) for data in OPENAI] == [None, None, None]
    answer = read_openai(events, {"choices": [], "usage": USAGE})
    assert answer is not None
    assert (answer.prompt_tokens, answer.tokens, answer.cached) == (9, 3, 0)
    assert events.sent <= answer.first <= answer.last
    assert len(answer.times) == 2


def test_prompt_tokens_from_a_cache_are_seen_on_either_server() -> None:
    cached = {**USAGE, "prompt_tokens_details": {"cached_tokens": 8}}
    theirs = read_openai(Events(), {"choices": [], "usage": cached})
    ours = read_disagg(Events(), DONE)
    assert theirs is not None and ours is not None
    assert theirs.cached == ours.cached == 8
    with pytest.raises(ValueError, match="prompt cache"):
        figures([theirs])


def test_an_error_event_of_disagg_is_raised() -> None:
    with pytest.raises(ConnectionError, match="Overloaded"):
        read_disagg(Events(), {"code": "Overloaded", "message": "full", "hint": ""})


def answer(first: float, step: float, tokens: int) -> Answer:
    return Answer(0.0, [first + step * index for index in range(tokens)], 5, tokens)


def test_decode_speed_counts_tokens_after_the_first_from_the_first_of_any_to_the_last_of_all() -> None:
    together = figures([answer(1.0, 0.1, 11), answer(1.5, 0.15, 11)])
    assert together.decode_tok_s == pytest.approx(21 / 2.0)
    assert together.tpot_ms == pytest.approx((100 + 150) / 2)


def test_steady_speed_counts_only_while_every_request_decodes() -> None:
    together = figures([answer(1.0, 0.125, 9), answer(1.5, 0.25, 9)])  # both from 1.5 to 2.0
    assert together.steady_tok_s == pytest.approx((4 + 2) / 0.5)
    with pytest.raises(ValueError, match="never all decoding"):
        figures([answer(1.0, 0.1, 3), answer(5.0, 0.1, 3)])


def test_a_token_without_a_piece_of_its_own_is_still_counted() -> None:
    assert Answer(0.0, [1.0, 2.0, 3.0], 5, 6).between(1.0, 3.0) == pytest.approx(4.0)


async def test_a_stream_is_read_over_http_whether_chunked_or_not() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for data in (*OPENAI, {"choices": [], "usage": USAGE}):
            event = f"data: {json.dumps(data)}\n\n".encode()
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        answers = await post_all(port, "/v1/completions", [{"prompt": "x"}] * 2, read_openai)
    assert [answer.tokens for answer in answers] == [3, 3]


async def test_a_fleets_server_is_asked_over_tls() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\ndata: " + json.dumps(DONE).encode() + b"\n\n")
        await writer.drain()
        writer.close()

    context = ServerTLS(lambda: [TOKEN]).context()
    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        (answer,) = await post_all(port, "/generate", [{}], read_disagg, tls=client_tls(TOKEN))
    assert answer.tokens == DONE["completion_tokens"]


async def test_a_stream_that_ends_early_is_an_error() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionError, match="before the answer was complete"):
            await post_all(port, "/generate", [{}], read_disagg)


def test_no_two_prompts_of_a_run_begin_alike_and_all_are_as_long() -> None:
    names = (BARE, PEER, OURS, CLIENT, "handed-over")
    prompts = [p for number in range(-1, 5) for name in names for p in mlx_server.prompts(number, name, 16)]
    assert len({prompt[:6] for prompt in prompts}) == len(prompts)
    assert len({len(prompt) for prompt in prompts}) == 1


def test_the_ratio_and_what_is_added_come_from_medians() -> None:
    row = {PEER: [Figures(100, 80, 10.0)] * 3, BARE: [Figures(200, 200, 5.0)] * 3, CLIENT: [Figures(0.1, 1, 5.5)] * 3}
    ours = {OURS: [Figures(50, 40, 1), Figures(110, 100, 1), Figures(400, 400, 1)]}
    result = mlx_server.summary({1: {**row, **ours}})
    assert result["ratio"] == {"1": pytest.approx(1.1)}
    assert result["steady_ratio"] == {"1": pytest.approx(1.25)}
    assert result["added_ms"] == pytest.approx(0.5)


def test_without_mlx_lm_the_server_is_skipped_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_server, "import_error", lambda module: f"no {module}")
    result = mlx_server.compare(Path("nowhere"), 1, 1, [1])
    assert result == {"skipped": {PEER: {"why": "no mlx_lm.server", "install": mlx_server.INSTALL}}}


def test_the_model_copy_is_float32_and_cannot_end_its_answer(tmp_path: Path) -> None:
    import mlx.core as mx

    same_model.write(same_model.DEMO_MODEL, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["dtype"], config["eos_token_id"]) == ("float32", config["vocab_size"])
    assert json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())["eos_token"] is None
    weights = mx.load(str(tmp_path / "model" / "model.safetensors"))
    assert {array.dtype for array in cast(dict[str, mx.array], weights).values()} == {mx.float32}
