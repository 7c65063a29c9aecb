"""disagg/engines/vllm/scheduler.py: steps of vLLM's scheduler as orders to its workers."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from disagg.api.delivery import DESCRIBE, ORDER_FIELD, KVOrder, KVProgress, OrderAnswer
from disagg.api.requests import KVAddress
from disagg.engines.vllm.scheduler import MAX_PLANNED, PromptPiece, SchedulerSide, StepTimes
from disagg.kv.fingerprint import token_hash
from tests.engines.vllm.served.fake_serve import INFO

ORDER = KVOrder(
    id="the secret of the order",
    report=KVAddress("127.0.0.1", 1),
    deliver=KVAddress("10.0.0.2", 9001),
    ticket="the secret of the ticket",
    request_id="r1",
    next_token=9,
    deadline_s=5.0,
)


def request(id: str, tokens: int, order: KVOrder | None) -> Any:
    params = None if order is None else {ORDER_FIELD: order}
    ids = list(range(tokens))
    return SimpleNamespace(
        request_id=id,
        num_prompt_tokens=tokens,
        prompt_token_ids=ids,
        prompt_embeds=None,
        kv_transfer_params=params,
    )


def by_http(id: str, tokens: int, order: Any) -> Any:
    """A request whose order is JSON."""
    made = request(id, tokens, None)
    made.kv_transfer_params = {ORDER_FIELD: order}
    return made


def planned(new: dict[str, int], cached: dict[str, int], scheduled: dict[str, int]) -> Any:
    """vLLM's SchedulerOutput. new, cached: tokens that are computed."""
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=id, num_computed_tokens=n) for id, n in new.items()],
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(cached), num_computed_tokens=list(cached.values())),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda id: ([1, 2],)),
    )


def test_the_steps_of_a_prompt_are_pieces_until_its_rows_are_complete() -> None:
    side = SchedulerSide()
    side.add(request("a", 10, ORDER))
    side.add(request("of another caller", 5, None))
    (first,) = side.step(planned({"a": 0, "of another caller": 0}, {}, {"a": 6, "of another caller": 2})).pieces
    assert first.begun is not None and first.begun.token_hash == token_hash([*range(10), 9])
    assert (first.rows, first.last, first.tables) == (range(6), False, ([1, 2],))
    assert side.planned.pop()["a"] == KVProgress(0, 6, 0.75)
    (rest,) = side.step(planned({}, {"a": 6}, {"a": 4})).pieces
    assert rest == PromptPiece("a", range(6, 10), ([1, 2],), last=True, share=KVProgress(6, 10, 1.0))
    assert side.step(planned({}, {"a": 10}, {"a": 1})).pieces == []
    side.finished("a")
    assert (side.prompts, side.step(planned({}, {}, {})).dropped) == (0, [])


@pytest.mark.parametrize(
    ("computed", "scheduled", "tables"), [(0, 1, ([1, 2],)), (0, 2, None), (1, 1, None)], ids=["one", "two", "second"]
)
def test_the_first_token_of_a_prompt_that_asks_for_a_description_shows_the_workers_its_states(
    computed: int, scheduled: int, tables: Any
) -> None:
    side = SchedulerSide()
    side.add(by_http("a", 2, DESCRIBE))
    side.add(request("of another caller", 5, None))
    orders = side.step(planned({"a": computed, "of another caller": 0}, {}, {"a": scheduled, "of another caller": 1}))
    assert (orders.shown, orders.pieces) == (tables, [])
    side.finished("a")
    assert side.step(planned({"a": 0}, {}, {"a": 1})).shown is None


@pytest.mark.parametrize(("seen", "status"), [("", "ok"), ("they lie otherwise", "refused")])
def test_a_description_states_whether_states_can_be_read_once_a_prompt_has_shown_them(seen: str, status: str) -> None:
    side = SchedulerSide()
    side.info = INFO
    first = side.answer(by_http("a", 1, DESCRIBE))
    assert first is not None and first.connector == INFO
    side.seen = seen
    second = side.answer(by_http("a", 1, DESCRIBE))
    assert second is not None and second.connector is not None
    assert [(one.component, one.status) for one in second.connector.preflight] == [("states", status)]


def test_the_workers_are_notified_of_a_prompt_that_ends_before_its_rows_are_complete() -> None:
    side = SchedulerSide()
    side.add(request("a", 10, ORDER))
    side.add(request("never computed", 10, ORDER))
    side.step(planned({"a": 0}, {}, {"a": 6}))
    side.finished("a")
    side.finished("never computed")
    assert [side.step(planned({}, {}, {})).dropped for _ in range(2)] == [["a"], []]


def test_what_vllm_logs_of_a_step_has_no_secret_and_its_workers_get_it_whole() -> None:
    side = SchedulerSide()
    wanted = request("a", 10, ORDER)
    side.add(wanted)
    orders = side.step(planned({"a": 0}, {}, {"a": 6}))
    assert "secret" not in repr((orders, orders.__dict__, wanted.kv_transfer_params))
    (piece,) = pickle.loads(pickle.dumps(orders)).pieces
    assert piece.begun.order == ORDER


def test_an_order_that_came_by_http_is_one_and_its_answer_says_that_it_was_taken() -> None:
    side = SchedulerSide()
    wanted = by_http("a", 10, ORDER.to_json())
    side.add(wanted)
    (piece,) = side.step(planned({"a": 0}, {}, {"a": 6})).pieces
    assert piece.begun is not None and piece.begun.order == ORDER
    assert side.answer(wanted) == OrderAnswer()


def test_an_order_that_came_by_http_has_no_secret_in_what_vllm_logs_and_reaches_workers_with_its_request() -> None:
    side = SchedulerSide()
    for id, given in {"a": ORDER.to_json(), "b": {**ORDER.to_json(), "of a later version": 1}}.items():
        wanted = by_http(id, 10, given)
        side.add(wanted)
        assert "secret" not in repr(pickle.loads(pickle.dumps(wanted.kv_transfer_params)))


@pytest.mark.parametrize(
    "change", [{"of a later version": 1}, {"next_token": 2**32}, {"next_token": -1}, {"deadline_s": 0}], ids=str
)
def test_an_order_that_cannot_be_read_is_answered_with_the_reason_and_sends_nothing(change: dict[str, Any]) -> None:
    side = SchedulerSide()
    wanted = by_http("a", 10, {**ORDER.to_json(), **change})
    side.add(wanted)
    assert side.prompts == 0
    for _ in range(2):
        answer = side.answer(wanted)
        assert answer is not None and answer.error is not None and "version" in answer.error["hint"]


@pytest.mark.parametrize(("ids", "embeds"), [(None, "a tensor"), ([0] * 10, "a tensor"), (None, None)])
def test_an_order_for_a_prompt_of_embeddings_is_refused(ids: list[int] | None, embeds: str | None) -> None:
    side = SchedulerSide()
    wanted = by_http("a", 10, ORDER.to_json())
    wanted.prompt_token_ids, wanted.prompt_embeds = ids, embeds
    side.add(wanted)
    answer = side.answer(wanted)
    assert side.prompts == 0
    assert answer is not None and answer.error is not None and "embeddings" in answer.error["message"]


def test_parameters_that_are_no_object_are_those_of_others() -> None:
    side = SchedulerSide()
    asked = request("a", 1, None)
    asked.kv_transfer_params = "from vllm_xargs"
    side.add(asked)
    assert (side.prompts, side.answer(asked)) == (0, None)


def test_a_prompt_whose_step_cannot_be_sent_ends_alone_with_the_reason() -> None:
    side = SchedulerSide()
    unsound, begun, sound = (by_http(id, 10, ORDER.to_json()) for id in ("unsound", "begun", "sound"))
    for one in (unsound, begun, sound):
        side.add(one)
    unsound.prompt_token_ids = [2**32]
    ids = ("unsound", "begun", "sound")
    first = side.step(planned(dict.fromkeys(ids, 0), {}, dict.fromkeys(ids, 4)))
    assert ([piece.id for piece in first.pieces], first.dropped) == (["begun", "sound"], [])
    output = planned({}, dict.fromkeys(ids, 4), dict.fromkeys(ids, 4))
    tables = {"sound": ([1, 2],)}
    output.kv_connector_block_state.get_block_ids = lambda id: tables[id]
    second = side.step(output)
    assert ([piece.id for piece in second.pieces], second.dropped) == (["sound"], ["begun"])
    for one in (unsound, begun):
        answer = side.answer(one)
        assert answer is not None and answer.error is not None
        side.add(one)  # preempted, and given blocks again
        side.finished(one.request_id)
    assert (side.prompts, side.answer(sound), side.step(planned({}, {}, {})).dropped) == (1, OrderAnswer(), [])


def test_what_the_connector_is_answers_a_request_for_it_and_a_request_of_others_gets_nothing() -> None:
    side = SchedulerSide()
    asked = request("a", 1, None)
    assert side.answer(asked) is None
    asked.kv_transfer_params = {ORDER_FIELD: DESCRIBE}
    side.add(asked)
    assert (side.prompts, side.answer(asked)) == (0, OrderAnswer())
    side.info = INFO
    assert side.answer(asked) == OrderAnswer(connector=INFO)


def test_steps_that_nobody_takes_are_kept_within_a_bound() -> None:
    side = SchedulerSide()
    for _ in range(2 * MAX_PLANNED):
        side.step(planned({}, {}, {}))
    assert len(side.planned) == MAX_PLANNED


ONE, TWO, THREE = ({id: KVProgress(0, 1, 1.0)} for id in "123")


def test_a_step_without_a_pipeline_lasts_as_long_as_the_call_that_plans_it() -> None:
    times = StepTimes()
    times.plan(10.0, ONE)
    assert list(times.end(12.0, 0)) == [(10.0, 12.0, ONE)]
    times.plan(15.0, TWO)
    assert list(times.end(16.0, 0)) == [(15.0, 16.0, TWO)]


def test_a_step_of_a_pipeline_ends_in_a_later_call_and_its_time_begins_at_the_end_of_the_one_before_it() -> None:
    times = StepTimes()
    times.plan(10.0, ONE)
    assert list(times.end(10.5, 1)) == []
    times.plan(10.5, TWO)
    assert list(times.end(13.0, 1)) == [(10.0, 13.0, ONE)]
    times.plan(13.0, THREE)
    assert list(times.end(14.0, 1)) == [(13.0, 14.0, TWO)]
    assert list(times.end(15.0, 0)) == [(14.0, 15.0, THREE)]
