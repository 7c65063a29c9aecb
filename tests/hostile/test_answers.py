"""A host that lies in its answer costs that attempt only: another host goes on."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator

import pytest

from disagg.api.events import DoneEvent, Event
from disagg.api.status import Load
from disagg.errors import MAX_ERROR_CHARS, DisaggError, InvalidAnswer
from tests.hostile.answers import LIES, SHIPPED_LIES, VOCABULARY
from tests.inference.scripted import Body, client_of, done, silent, slot, whole

PROMPT = [1, 2, 3]


def stated(name: str) -> Load:
    """What a good host of the model states."""
    return Load("ok", boot_id=name, vocab_size=VOCABULARY)


@pytest.mark.parametrize("lie", LIES)
async def test_the_next_host_answers_after_a_host_that_lies(lie: str, caplog: pytest.LogCaptureFixture) -> None:
    """The good host gets the tokens that had arrived, none of which is beyond the vocabulary."""
    caplog.set_level(logging.DEBUG)
    async with client_of(d1={"generate": LIES[lie]}, d2={"generate": whole}) as (client, hosts):
        hosts["d2"].load = stated("d2")
        await client._driver.refresher.read(client.fleet.hosts.values())
        answer = await client.generate("m", tokens=PROMPT, max_tokens=4, alone="decode", timeout=20)
    assert [token.id for token in answer.tokens] == [0, 1, 2, 3]
    assert answer.metrics.decode_server == "d2" and answer.metrics.completion_tokens == 4
    assert len(answer.text) < 100_000 and len(answer.reasoning) < 100_000
    assert [path for path, _ in hosts["d1"].asked] == ["/generate"]
    assert all(len(warning) < 3 * MAX_ERROR_CHARS for warning in answer.warnings)
    assert all(len(record.getMessage()) < 3 * MAX_ERROR_CHARS for record in caplog.records)


@pytest.mark.parametrize("lie", ["a token beyond the vocabulary", "more tokens counted than sent"])
async def test_the_only_host_that_lies_ends_the_request_at_once_with_the_reason(lie: str) -> None:
    async with client_of(d1={"generate": LIES[lie]}) as (client, _):
        client.view.answered("d2", stated("d2"))
        with pytest.raises(DisaggError, match="does not fit") as raised:
            await client.generate("m", tokens=PROMPT, max_tokens=4, alone="decode", timeout=20)
    assert "d1" in str(raised.value) and len(raised.value.message) < 300


async def test_a_host_whose_load_is_impossible_counts_as_one_that_does_not_answer() -> None:
    """A queue of minus a million would draw every request to it."""
    async with client_of(d1={"generate": silent}, d2={"generate": whole}) as (client, hosts):
        for boot_id, load in (("d1", Load("ok", boot_id="d1", queue=-1_000_000)), ("d2", stated("d2"))):
            hosts[boot_id].load = load
        await client._driver.refresher.read(client.fleet.hosts.values())
        assert client.view.of("d1").load is None and client.view.of("d2").load == stated("d2")


@pytest.mark.parametrize("lie", SHIPPED_LIES)
async def test_figures_of_a_prefill_host_that_cannot_be_are_left_out_with_a_warning(lie: str) -> None:
    """Its KV has been accepted, so that the answer is right."""

    async def decode(body: Body) -> AsyncGenerator[Event | DisaggError, None]:
        yield slot(body)
        async for event in whole(body):
            yield event if not isinstance(event, DoneEvent) else done(body)

    async with client_of(p1={"prefill": SHIPPED_LIES[lie]}, d1={"decode": decode}) as (client, _):
        answer = await client.generate("m", tokens=PROMPT, max_tokens=4, timeout=20)
    assert [token.id for token in answer.tokens] == [0, 1, 2, 3] and answer.metrics.kv_bytes == 0
    (warning,) = answer.warnings
    assert warning.startswith("the figures of p1 are missing: they do not fit")


def test_what_another_process_states_as_an_error_is_cut() -> None:
    error = DisaggError.from_json({"code": "Overloaded", "message": "m" * 10_000, "hint": "h" * 10_000})
    assert len(error.message) == len(error.hint) == MAX_ERROR_CHARS


@pytest.mark.parametrize(("stated_s", "used_s"), [(-5, 1), (0, 1), (7, 7), (10**12, 3600)])
def test_a_wait_that_another_process_asks_for_is_bounded(stated_s: int, used_s: int) -> None:
    error = DisaggError.from_json({"code": "Overloaded", "message": "busy", "hint": "", "retry_after_s": stated_s})
    assert getattr(error, "retry_after_s", None) == used_s


def test_an_answer_that_does_not_fit_is_no_passing_failure() -> None:
    """Waiting for the host would not help."""
    assert InvalidAnswer("x").exit_code == 4
