"""The public client against real servers: exactness, metrics, streaming, parallel requests."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import random
import secrets
import subprocess
import sys
import types
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import (
    ConfigError,
    ContextLengthExceeded,
    DeadlineExceeded,
    RequestError,
    ServerUnavailable,
    UnknownModel,
)
from disagg.inference.attempt import Alone
from disagg.inference.attempts.waiting import Waiting
from disagg.inference.client import AsyncClient, Client
from disagg.inference.http.connection import HostConnection
from disagg.inference.metrics import Metrics
from disagg.inference.types import Chunk, Completion
from tests import tiny_models
from tests.cli.commandline import ROOT, write_fleet
from tests.deadlines import LONG_S, wait_until
from tests.fleets import TOKEN, RunningFleet
from tests.ports import free_ports

PROMPT = "def fibonacci(n):\n    if n < 2:\n        return n\n" * 20


def ids(answer: Completion) -> list[int]:
    return [token.id for token in answer.tokens]


def test_a_hand_off_gives_the_tokens_of_each_engine_alone(tiny_fleet: RunningFleet) -> None:
    chance = random.Random(2)
    prompt = [chance.randrange(8, tiny_models.VOCAB) for _ in range(150)]
    with tiny_fleet.client() as client:
        answers = {
            "disaggregated": client.generate("tiny", tokens=prompt, max_tokens=64),
            "decode-alone": client.generate("tiny", tokens=prompt, max_tokens=64, alone="decode"),
            "prefill-alone": client.generate("tiny", tokens=prompt, max_tokens=64, alone="prefill"),
        }
    tokens = {name: ids(answer) for name, answer in answers.items()}
    assert tokens["disaggregated"] == tokens["decode-alone"] == tokens["prefill-alone"]
    assert len(set(tokens["disaggregated"])) > 20
    assert {name: answer.metrics.method for name, answer in answers.items()} == {name: name for name in answers}
    assert len({answer.text for answer in answers.values()}) == 1


def test_the_decode_host_computes_exactly_one_prompt_token_after_a_hand_off(tiny_fleet: RunningFleet) -> None:
    before = tiny_fleet.status("tiny-decode")["counters"]["computed_prompt_tokens"]
    with tiny_fleet.client() as client:
        answer = client.generate("tiny", PROMPT, max_tokens=4)
    after = tiny_fleet.status("tiny-decode")["counters"]["computed_prompt_tokens"]
    assert after - before == 1
    assert answer.metrics.decode_computed_tokens == 1
    assert answer.metrics.kv_bytes > 0


async def test_no_kv_byte_passes_through_the_client(tiny_fleet: RunningFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    received, plain = 0, HostConnection.buffer_updated

    def count(connection: HostConnection, nbytes: int) -> None:
        nonlocal received
        received += nbytes
        plain(connection, nbytes)

    monkeypatch.setattr(HostConnection, "buffer_updated", count)
    async with AsyncClient(tiny_fleet.fleet, token=TOKEN) as client:
        salt = secrets.token_hex(8)  # nothing of the prompt is held
        answer = await client.generate("tiny", tokens=list(range(9, 609)), max_tokens=2, cache_salt=salt)
    assert answer.metrics.kv_bytes > 900_000
    assert 0 < received < answer.metrics.kv_bytes / 10


@pytest.mark.timeout(300)
def test_the_parts_of_ttft_are_never_negative_and_explain_it(tiny_fleet: RunningFleet) -> None:
    """Of the run that the least came between: what is left out systematically is left out of each."""
    prompt, runs = [9 + i % 600 for i in range(3500)], list[Metrics]()

    def network() -> float:
        return min(run.ttft_parts.network / run.ttft for run in runs)

    with tiny_fleet.client() as client:
        while len(runs) < 2 or (len(runs) < 8 and network() >= 0.10):
            answer = client.generate("tiny", tokens=prompt, max_tokens=2, cache_salt=f"{len(runs)}")
            runs.append(answer.metrics)
    for run in runs:
        assert min(asdict(run.ttft_parts).values()) >= 0
        assert run.ttft_parts.total == pytest.approx(run.ttft)
        assert run.ttft <= run.total_time
    assert network() < 0.10


def test_a_stream_gives_the_text_in_pieces_and_then_has_the_completion(tiny_fleet: RunningFleet) -> None:
    with tiny_fleet.client() as client:
        stream = client.stream("tiny", PROMPT, max_tokens=16)
        chunks = list(stream)
    completion = stream.completion
    assert all(isinstance(chunk, Chunk) for chunk in chunks) and len(chunks) > 1
    assert "".join(chunk.text for chunk in chunks) == completion.text
    assert sum((chunk.tokens for chunk in chunks), ()) == completion.tokens
    assert completion.finish_reason == "length"


def test_closing_a_stream_early_cancels_the_request(tiny_fleet: RunningFleet) -> None:
    with tiny_fleet.client() as client:
        stream = client.stream("tiny", PROMPT, max_tokens=1000)
        assert isinstance(next(stream), Chunk)
        stream.close()
        wait_until(lambda: tiny_fleet.status("tiny-decode")["running"] == 0, 60, "the request to end on its host")


def test_a_stop_string_ends_the_answer_right_before_it(tiny_fleet: RunningFleet) -> None:
    with tiny_fleet.client() as client:
        whole = client.generate("tiny", PROMPT, max_tokens=48).text
        stop = whole[20:23]
        cut = client.generate("tiny", PROMPT, max_tokens=48, stop=[stop])
    assert cut.text == whole[: whole.index(stop)]
    assert (cut.finish_reason, cut.stop) == ("stop", stop)


def test_logprobs_come_with_as_many_alternatives_as_asked_for(tiny_fleet: RunningFleet) -> None:
    with tiny_fleet.client() as client:
        answer = client.generate("tiny", PROMPT, max_tokens=4, logprobs=3)
    for token in answer.tokens:
        assert len(token.top) == 3
        top_id, top_logprob = token.top[0]
        assert top_id == token.id and top_logprob == pytest.approx(token.logprob)
        assert token.logprob < 0


def test_a_seed_repeats_a_sampled_answer(tiny_fleet: RunningFleet) -> None:
    with tiny_fleet.client() as client:
        first, again, other = (
            client.generate("tiny", PROMPT, max_tokens=24, temperature=1.0, seed=seed).text for seed in (11, 11, 12)
        )
    assert first == again != other


def test_chat_messages_go_through_the_chat_template(tiny_fleet: RunningFleet) -> None:
    with tiny_fleet.client() as client:
        chat = client.generate("tiny", messages=[{"role": "user", "content": "x = 1"}], max_tokens=4)
        bare = client.generate("tiny", "x = 1", max_tokens=4)
    assert chat.metrics.prompt_tokens > bare.metrics.prompt_tokens


async def test_concurrent_requests_of_mixed_length_each_get_their_own_answer(tiny_fleet: RunningFleet) -> None:
    prompts = [PROMPT[: 7 + 90 * i] for i in range(8)]
    async with AsyncClient(tiny_fleet.fleet, token=TOKEN) as client:
        one_by_one = [await client.generate("tiny", prompt, max_tokens=24) for prompt in prompts]
        together = await asyncio.gather(*(client.generate("tiny", prompt, max_tokens=24) for prompt in prompts))
    assert [ids(answer) for answer in together] == [ids(answer) for answer in one_by_one]


def test_an_alias_reaches_the_model(tiny_fleet: RunningFleet) -> None:
    with tiny_fleet.client() as client:
        assert client.generate("alias-of-tiny", PROMPT, max_tokens=1).metrics.model == "tiny"


def test_an_unknown_model_lists_those_there_are(tiny_fleet: RunningFleet) -> None:
    with tiny_fleet.client() as client, pytest.raises(UnknownModel, match="tiny"):
        client.generate("tinny", PROMPT)


def test_an_error_of_the_server_arrives_as_it_was_raised(tiny_fleet: RunningFleet) -> None:
    with tiny_fleet.client() as client:
        with pytest.raises(ContextLengthExceeded, match="4096"):
            client.generate("tiny", PROMPT, max_tokens=4096)
        with pytest.raises(RequestError, match="empty"):
            client.generate("tiny", "")


def test_a_request_ends_at_its_timeout(tiny_fleet: RunningFleet) -> None:
    with tiny_fleet.client() as client, pytest.raises(DeadlineExceeded):
        client.generate("tiny", PROMPT, max_tokens=1500, timeout=0.2)


def test_a_prompt_s_tokens_are_counted_as_its_answer_counts_them(tiny_fleet: RunningFleet) -> None:
    with tiny_fleet.client() as client:
        assert (
            client.count_tokens("tiny", PROMPT) == client.generate("tiny", PROMPT, max_tokens=1).metrics.prompt_tokens
        )
        with pytest.raises(RequestError, match="exactly one of prompt"):
            client.count_tokens("tiny")
    with pytest.raises(RequestError, match="this client is closed"):
        client.count_tokens("tiny", PROMPT)


def test_several_clients_in_one_process_do_not_disturb_each_other(tiny_fleet: RunningFleet) -> None:
    with Client(tiny_fleet.fleet, token=TOKEN) as one, Client(tiny_fleet.fleet, token=TOKEN) as two:
        assert one.generate("tiny", PROMPT, max_tokens=3).text == two.generate("tiny", PROMPT, max_tokens=3).text


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"alone": "gpu"}, "'gpu'", ""),
        ({"temperature": float("nan")}, r"temperature: .* \(got nan\)", "temperature: 0 to 10"),
        ({"temperature": 11}, r"temperature: .* <= 10.0 \(got 11\)", "temperature: 0 to 10"),
        ({"timeout": None}, r"timeout: .* \(got None\)", "timeout: over 0, at most 86,400"),
        ({"timeout": "5"}, r"timeout: .* \(got '5'\)", "timeout: over 0, at most 86,400"),
        ({"timeout": float("nan")}, r"timeout: .* \(got nan\)", "timeout: over 0, at most 86,400"),
        ({"timeout": float("inf")}, r"timeout: .* \(got inf\)", "timeout: over 0, at most 86,400"),
        ({"stop": 5}, r"stop: expected array, got int \(got 5\)", ""),
        ({"on_kv_failure": "wait"}, "'wait'", ""),
        ({"cache_salt": 5}, r"cache_salt: .* \(got 5\)", ""),
        ({"timeout": 0}, r"timeout: .* > 0.0 \(got 0\)", "timeout: over 0, at most 86,400"),
        ({"bogus": 0}, "bogus: unknown field", "the options are max_tokens, "),
        ({"tokens": [1]}, "exactly one of prompt, messages and tokens", ""),
        ({"stop": ["\ud800"]}, "not Unicode", ""),
        ({"json_schema": nested(5000)}, "nested", "send fewer"),
    ],
)
def test_values_out_of_bounds_are_refused_before_anything_is_sent(
    tiny_fleet: RunningFleet, options: dict[str, object], message: str, hint: str
) -> None:
    with tiny_fleet.client() as client, pytest.raises(RequestError, match=message) as caught:
        client.generate("tiny", PROMPT, **options)  # type: ignore[arg-type]  # that is the fault
    assert caught.value.hint.startswith(hint) and bool(caught.value.hint) == bool(hint)


def test_one_stop_string_may_be_given_as_it_is(tiny_fleet: RunningFleet) -> None:
    with tiny_fleet.client() as client:
        whole = client.generate("tiny", PROMPT, max_tokens=48).text
        stop = whole[20:23]
        assert client.generate("tiny", PROMPT, max_tokens=48, stop=stop).text == whole[: whole.index(stop)]


async def test_an_answer_passes_through_one_generator(tiny_fleet: RunningFleet) -> None:
    """Between the HTTP library and the caller: the asynchronous generators of disagg that are alive meanwhile."""
    async with AsyncClient(tiny_fleet.fleet, token=TOKEN) as client, client.stream("tiny", PROMPT) as stream:
        await anext(stream)
        codes = [one.ag_code for one in gc.get_objects() if type(one) is types.AsyncGeneratorType]
        ours = {code.co_qualname for code in codes if f"disagg{os.sep}inference" in code.co_filename}
    assert ours == {"events"}, ours


def test_connecting_early_leaves_the_caller_little_to_do(
    tiny_fleet: RunningFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, plain = [], HostConnection.connection_made

    def note(connection: HostConnection, transport: asyncio.BaseTransport) -> None:
        opened.append(connection)
        plain(connection, transport)

    monkeypatch.setattr(HostConnection, "connection_made", note)
    with tiny_fleet.client() as client:
        client.connect("tiny")
        assert len(opened) == 2
        client.generate("tiny", PROMPT, max_tokens=1)
        assert len(opened) == 2


def test_connecting_to_a_host_that_is_down_is_left_to_the_request(tiny_fleet: RunningFleet) -> None:
    (port,) = free_ports(1)
    hosts = {name: dataclasses.replace(host, port=port) for name, host in tiny_fleet.fleet.hosts.items()}
    with Client(dataclasses.replace(tiny_fleet.fleet, hosts=hosts), token=TOKEN) as client:
        client.connect()
        with pytest.raises(ServerUnavailable, match="no server answers"):
            client.generate("tiny", PROMPT, timeout=1)


@pytest.mark.parametrize("alone", [None, "decode", "prefill"])
def test_a_fleet_that_is_not_started_fails_a_request_at_once(
    tiny_fleet: RunningFleet, alone: Alone | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = iter(free_ports(len(tiny_fleet.fleet.hosts)))
    hosts = {name: dataclasses.replace(host, port=next(ports)) for name, host in tiny_fleet.fleet.hosts.items()}
    monkeypatch.setattr(Waiting, "wait", None)  # any wait would fail
    with Client(dataclasses.replace(tiny_fleet.fleet, hosts=hosts), token=TOKEN) as client:
        client.connect()
        with pytest.raises(ServerUnavailable, match="no server answers at") as raised:
            client.generate("tiny", PROMPT, alone=alone)
    assert "disagg start" in raised.value.hint


def test_a_closed_client_says_what_to_do(tiny_fleet: RunningFleet) -> None:
    with tiny_fleet.client() as client:
        pass
    for call in (client.connect, lambda: client.generate("tiny", PROMPT), lambda: client.stream("tiny", PROMPT)):
        with pytest.raises(RequestError, match="this client is closed"):
            call()


def test_a_client_in_a_forked_child_says_so_instead_of_waiting_for_ever(tiny_fleet: RunningFleet) -> None:
    with tiny_fleet.client() as client:
        child = os.fork()
        if child == 0:
            try:
                client.generate("tiny", PROMPT)
            except RequestError as error:
                client.close()
                os._exit(0 if "make a new one in the child" in error.hint else 1)
            finally:
                os._exit(2)
        wait_until(lambda: os.waitpid(child, os.WNOHANG)[0], 60, "the child to end")
        assert client.generate("tiny", PROMPT, max_tokens=1).finish_reason == "length"


def test_the_hosts_are_explained_without_a_request(tiny_fleet: RunningFleet) -> None:
    with tiny_fleet.client() as client:
        client.connect("tiny")
        ranking = client.explain("tiny", PROMPT)
    assert [choice.host.name for choice in (*ranking.decode, *ranking.prefill)] == ["tiny-decode", "tiny-prefill"]
    assert ranking.decode[0].reason and not ranking.left_out


@pytest.mark.parametrize("chunks", [0, 1])
async def test_closing_the_client_under_a_stream_says_so(tiny_fleet: RunningFleet, chunks: int) -> None:
    client = AsyncClient(tiny_fleet.fleet, token=TOKEN)
    async with client.stream("tiny", PROMPT, max_tokens=400) as stream:
        for _ in range(chunks):
            await anext(stream)
        await client.aclose()
        with pytest.raises(RequestError, match="this client is closed"):
            async for _ in stream:
                pass


def test_without_a_path_the_client_searches_as_the_command_line_does(
    tiny_fleet: RunningFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DISAGG_CONFIG", raising=False)
    with pytest.raises(ConfigError, match=r"there is no hosts\.toml"):
        Client(token=TOKEN)
    monkeypatch.setenv("DISAGG_CONFIG", str(tiny_fleet.fleet.path))
    with Client(token=TOKEN) as client:
        assert client.fleet.path == tiny_fleet.fleet.path
    (tmp_path / "hosts.toml").write_text(tiny_fleet.fleet.path.read_text())
    monkeypatch.delenv("DISAGG_CONFIG")
    with Client(token=TOKEN) as client:
        assert client.fleet.path.resolve() == tmp_path / "hosts.toml"


def test_a_program_that_does_not_close_its_client_ends(tmp_path: Path) -> None:
    script = f"import disagg; client = disagg.Client({str(write_fleet(tmp_path))!r}, token={TOKEN!r}); print('end')"
    environment = {**os.environ, "PYTHONPATH": ROOT}
    argv = [sys.executable, "-c", script]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=LONG_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_an_asynchronous_client_outside_of_asyncio_says_so(tmp_path: Path) -> None:
    client = AsyncClient(write_fleet(tmp_path), token=TOKEN)
    calls = (
        client.connect(),
        client.generate("tiny", PROMPT),
        client.generate_all([]),
        client.count_tokens("tiny", "x"),
    )
    for call in calls:
        with pytest.raises(RequestError, match="outside of an asyncio event loop") as raised:
            call.send(None)
    assert "trio is not supported" in raised.value.hint
    assert client.explain("tiny", PROMPT).decode, "this sends nothing"


def test_closing_waits_neither_for_a_connection_that_is_being_opened_nor_for_a_name(tmp_path: Path) -> None:
    """In a process of its own, whose resolver answers nobody."""
    script = f"""
import dataclasses, pathlib, socket, threading, disagg
from disagg.config import load
asked = threading.Event()
def getaddrinfo(*_, **__):
    asked.set()
    threading.Event().wait({10 * LONG_S})
socket.getaddrinfo = getaddrinfo
fleet = load(pathlib.Path({str(write_fleet(tmp_path))!r}))
hosts = {{name: dataclasses.replace(host, address="a-name") for name, host in fleet.hosts.items()}}
client = disagg.Client(dataclasses.replace(fleet, hosts=hosts), token={TOKEN!r})
stream = client.stream("tiny", "x")
asked.wait()
client.close()
try:
    next(stream)
except disagg.errors.RequestError as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": ROOT}
    argv = [sys.executable, "-c", script]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=LONG_S, check=False)
    assert (done.returncode, done.stderr) == (0, "") and "this client is closed" in done.stdout
