"""A simulated pair through the real servers, wire and client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.errors import ContextLengthExceeded, DeadlineExceeded
from disagg.planning.shapes import SHAPES
from tests.deadlines import wait_until
from tests.fleets import RunningFleet, running
from tests.simulated import HIDDEN_BYTES, LAYERS, ROW_BYTES, write_simulated

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    with running(write_simulated(tmp_path_factory.mktemp("simulated"), decode="m4-max")) as fleet:
        yield fleet


def nothing_held(fleet: RunningFleet) -> bool:
    figures = [fleet.status(name) for name in ("m-prefill", "m-decode")]
    return all((status["kv_bytes"], status["running"], status["queue"]) == (0, 0, 0) for status in figures)


def test_a_handed_over_request_ships_every_byte_and_counts_every_token(fleet: RunningFleet) -> None:
    with fleet.client() as client:
        answer = client.generate("m", tokens=list(range(1001)), max_tokens=24, local_prefill=False, split="off")
    metrics = answer.metrics
    assert (metrics.method, metrics.prompt_tokens, metrics.completion_tokens) == ("disaggregated", 1001, 24)
    assert metrics.kv_bytes == 1000 * ROW_BYTES
    assert metrics.decode_computed_tokens == 1
    assert len(answer.tokens) == 24
    wait_until(lambda: nothing_held(fleet), PATIENCE_S, "both hosts to hold nothing")


@pytest.mark.parametrize("layers", [2, 4, 6])
def test_a_split_ships_its_layers_and_hidden_states_and_is_answered_alike(fleet: RunningFleet, layers: int) -> None:
    tokens = list(range(1001))
    with fleet.client() as client:
        alone = client.generate("m", tokens=tokens, max_tokens=24, alone="decode", cache_salt="alone")
        answer = client.generate("m", tokens=tokens, max_tokens=24, split=layers, cache_salt=f"split-{layers}")
    metrics = answer.metrics
    assert (metrics.layers, metrics.decode_computed_tokens, metrics.resumed_at) == (layers, 1, None)
    assert metrics.kv_bytes == 1000 * (ROW_BYTES * layers // LAYERS + HIDDEN_BYTES)
    assert [token.id for token in answer.tokens] == [token.id for token in alone.tokens]
    assert metrics.tail_time > 0
    assert metrics.ttft_parts.total == pytest.approx(metrics.ttft)
    wait_until(lambda: nothing_held(fleet), PATIENCE_S, "both hosts to hold nothing")


def test_a_split_begins_after_what_the_decode_host_holds(fleet: RunningFleet) -> None:
    tokens = list(range(2000, 2900))
    with fleet.client() as client:
        for end in (400, 900):
            answer = client.generate("m", tokens=tokens[:end], max_tokens=2, split=4, cache_salt="held")
    metrics = answer.metrics
    assert metrics.held_tokens >= 399 and metrics.layers == 4
    assert metrics.kv_bytes == (899 - metrics.held_tokens) * (ROW_BYTES // 2 + HIDDEN_BYTES)


def test_every_route_gives_one_answer_and_says_simulated(fleet: RunningFleet) -> None:
    with fleet.client() as client:
        answers = [
            client.generate("m", "def f():", max_tokens=16, alone=alone, local_prefill=False)
            for alone in (None, "decode", "prefill")
        ]
    assert len({answer.text for answer in answers}) == 1
    assert [answer.metrics.method for answer in answers] == ["disaggregated", "decode-alone", "prefill-alone"]
    for answer in answers:
        assert answer.metrics.simulated
        assert any(warning.startswith("simulated") for warning in answer.warnings)


def test_health_and_status_say_simulated(fleet: RunningFleet) -> None:
    for name, backend in (("m-prefill", "simulated/h200-sxm"), ("m-decode", "simulated/m4-max")):
        status = fleet.status(name)
        assert (status["simulated"], status["backend"]) == (True, backend)


def test_a_cancelled_request_leaves_nothing_behind(fleet: RunningFleet) -> None:
    with fleet.client() as client:
        stream = client.stream("m", tokens=[1] * 2000, max_tokens=10_000)
        next(stream)
        assert fleet.status("m-decode")["kv_bytes"] >= 2000 * ROW_BYTES
        stream.close()
        wait_until(lambda: nothing_held(fleet), PATIENCE_S, "both hosts to hold nothing")


def test_a_request_cancelled_while_it_is_read_leaves_nothing_behind(fleet: RunningFleet, tmp_path: Path) -> None:
    with (
        running(write_simulated(tmp_path, prefill="m4-max", chunk_tokens=256)) as slow,
        slow.client() as client,
        pytest.raises(DeadlineExceeded),  # noticed by the client, or by the decode host a moment earlier
    ):
        # 16000 tokens of 0.55e9 parameters are over a second of a M4 Max.
        client.generate("m", tokens=[1] * 16000, max_tokens=4, timeout=0.5)
    with fleet.client() as client:
        assert client.generate("m", "x", max_tokens=1).metrics.completion_tokens == 1


def test_the_context_is_that_of_hosts_toml(fleet: RunningFleet) -> None:
    with fleet.client() as client, pytest.raises(ContextLengthExceeded):
        client.generate("m", tokens=[1] * 16380, max_tokens=16)


def test_a_model_with_states_ships_rows_and_states(tmp_path: Path) -> None:
    path = write_simulated(tmp_path, decode="m3-ultra", prefill="m3-ultra")
    path.write_text(path.read_text().replace(str(tmp_path / "config.json"), "shape:qwen3-next-80b"))
    layout = SHAPES["qwen3-next-80b"].layout("bfloat16")
    with running(path) as fleet, fleet.client() as client:
        answer = client.generate("m", tokens=list(range(101)), max_tokens=2, local_prefill=False)
    assert (answer.metrics.method, answer.metrics.kv_bytes) == ("disaggregated", layout.nbytes(100))
