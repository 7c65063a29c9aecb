"""disagg/servers/output/answer.py: decode steps to events, stop strings, and how an answer ends."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence

import pytest

from disagg.api.events import Event, FinishReason, TokenLogprob, TokensEvent
from disagg.api.requests import ToolCall
from disagg.api.sampling import Sampling
from disagg.engines.base import DecodeTiming, Token
from disagg.engines.simulated.model import ByteTokenizer
from disagg.errors import ModelError
from disagg.servers.host.feed import StepTokens, TokenBridge, TokenFeed
from disagg.servers.output.answer import GrowingAnswer, rest_of
from disagg.servers.output.part import OutputPart, Plain
from tests.values import of_type


def steps(letters: str, finish: FinishReason | None = None) -> Sequence[StepTokens]:
    """One step per letter, at 1.0, 2.0, ...; `finish` on the last."""
    ends = [None] * (len(letters) - 1) + [finish]
    tokens = [Token(ord(letter), -0.5, finish=end) for letter, end in zip(letters, ends, strict=True)]
    return [StepTokens((token,), DecodeTiming(), float(at)) for at, token in enumerate(tokens, 1)]


def answer(*stop: str) -> GrowingAnswer:
    return GrowingAnswer(Plain(ByteTokenizer(256).stream(stop)))


def added(one: GrowingAnswer, steps: Sequence[StepTokens]) -> TokensEvent:
    """The one event of these steps."""
    (event,) = one.add(steps)
    return event


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_the_last_token_ends_the_answer_with_its_reason(finish: FinishReason) -> None:
    one = answer()
    assert added(one, steps("ab")).text == "ab"
    event = added(one, steps("c", finish))
    assert (event.text, event.tokens) == ("c", (TokenLogprob(ord("c"), -0.5),))
    assert (one.finish_reason, one.completion_tokens) == (finish, 3)


def test_tokens_after_a_stop_string_in_one_event_are_not_part_of_the_answer() -> None:
    one = answer("b")
    event = added(one, steps("xabcd"))
    assert (event.text, len(event.tokens)) == ("xa", 3)
    assert (one.finish_reason, one.completion_tokens, one.first_at, one.decode_s) == ("stop", 3, 1.0, 2.0)


def test_text_that_may_begin_a_stop_string_is_held_until_it_is_certain() -> None:
    one = answer("cd")
    assert [added(one, steps(letter)).text for letter in "abc"] == ["a", "b", ""]
    assert added(one, steps("x")).text == "cx" and one.finish_reason is None


def test_the_end_of_an_answer_releases_text_that_was_held() -> None:
    one = answer("cd")
    assert added(one, steps("abc", "length")).text == "abc" and one.finish_reason == "length"


def test_a_token_of_probability_0_reaches_the_caller_as_a_number() -> None:
    one = answer()
    never = Token(ord("a"), float("-inf"), top=((ord("b"), float("-inf")), (ord("c"), -0.5)))
    event = added(one, [StepTokens((never,), DecodeTiming(), 1.0)])
    assert TokensEvent.from_bytes(event.to_bytes()) == event
    assert event.tokens == (TokenLogprob(ord("a"), -9999.0, ((ord("b"), -9999.0), (ord("c"), -0.5))),)


@pytest.mark.parametrize("token", [Token(1, float("nan")), Token(1, -0.5, top=((1, -0.5), (2, float("nan"))))])
def test_a_nan_probability_ends_the_request_with_an_error(token: Token) -> None:
    with pytest.raises(ModelError, match="NaN probability"):
        answer().add([StepTokens((token,), DecodeTiming(), 1.0)])


def resumed(given: str, sampling: Sampling | None = None, eos_ids: Collection[int] = ()) -> GrowingAnswer:
    sampling = sampling or Sampling()
    one = answer(*sampling.stop)
    asyncio.run(one.resume([ord(letter) for letter in given], sampling, eos_ids))
    return one


def test_an_answer_that_goes_on_counts_the_tokens_it_was_given_and_sends_none_of_their_text() -> None:
    one = resumed("ab")
    assert added(one, steps("c", "length")).text == "c"
    assert (one.completion_tokens, one.generated_tokens) == (3, 1)


def test_text_that_was_held_when_a_host_failed_is_sent_by_the_next_one() -> None:
    first, stop = answer("cd"), Sampling(stop=("cd",))
    assert added(first, steps("abc")).text == "ab"
    assert added(resumed("abc", stop), steps("x")).text == "cx"
    ended = resumed("abc", stop)
    assert added(ended, steps("d")).text == "" and ended.finish_reason == "stop"


def test_half_a_character_that_was_given_is_completed_by_the_next_token() -> None:
    one = answer()
    asyncio.run(one.resume(list("é".encode()[:1]), Sampling(), ()))
    assert added(one, [StepTokens((Token("é".encode()[1], -0.5),), DecodeTiming(), 1.0)]).text == "é"


@pytest.mark.parametrize(
    ("given", "sampling", "finish"),
    [
        ("ab", Sampling(max_tokens=3), None),
        ("abc", Sampling(max_tokens=3), "length"),
        ("abcd", Sampling(max_tokens=3), "length"),
        ("ab!", Sampling(max_tokens=3), "stop"),
        ("ab!", Sampling(max_tokens=4, ignore_eos=True), None),
        ("ab", Sampling(max_tokens=2, stop=("b",)), "stop"),
        ("ab", Sampling(max_tokens=9, stop=("bc",)), None),
    ],
)
def test_an_answer_that_was_given_whole_is_finished(
    given: str, sampling: Sampling, finish: FinishReason | None
) -> None:
    assert resumed(given, sampling, {ord("!")}).finish_reason == finish


class Letters:
    """An Output: small letters are text, capitals reasoning, digits calls."""

    reasoning = False
    stopped = ""

    def push(self, token: int) -> Sequence[OutputPart]:
        letter = chr(token)
        self.reasoning = letter.isupper()
        if letter.isdigit():
            return [OutputPart("call", call=ToolCall(letter))]
        return [OutputPart("reasoning" if self.reasoning else "text", letter)]

    def finish(self) -> Sequence[OutputPart]:
        return ()


def test_the_parts_of_steps_are_one_event_unless_that_would_change_their_order() -> None:
    one = GrowingAnswer(Letters())
    events = one.add(steps("ABab1cA", "stop"))
    assert [(event.reasoning, event.text, [call.name for call in event.tool_calls]) for event in events] == [
        ("AB", "ab", ["1"]),
        ("", "c", []),
        ("A", "", []),
    ]
    assert [len(event.tokens) for event in events] == [5, 1, 1]
    assert (one.completion_tokens, one.reasoning_tokens) == (7, 3)


@pytest.mark.parametrize(("letters", "finish", "reason"), [("a1", "stop", "tool_calls"), ("a1", "length", "length")])
def test_an_answer_that_ends_after_a_call_says_so(letters: str, finish: FinishReason, reason: str) -> None:
    one, resumed = GrowingAnswer(Letters()), GrowingAnswer(Letters())
    one.add(steps(letters, finish))
    asyncio.run(resumed.resume([ord(letter) for letter in letters], Sampling(), ()))
    resumed.add(steps("b", finish))
    assert one.finish_reason == resumed.finish_reason == reason


class Reader:
    """A caller that is slow now and then, and the stream that sends what is yielded."""

    def __init__(self) -> None:
        self.ready = True
        self.text, self.at_once = "", 0

    def send_now(self, events: Callable[[], Sequence[Event]]) -> bool:
        if self.ready:
            self.text += "".join(of_type(event, TokensEvent).text for event in events())
            self.at_once += 1
        return self.ready

    async def send(self, event: Event, seconds: float) -> None:
        self.ready = False
        await asyncio.sleep(seconds)
        self.text += of_type(event, TokensEvent).text
        self.ready = True


async def test_steps_are_sent_as_they_arrive_and_in_order_beside_those_that_wait_for_a_slow_caller() -> None:
    bridge, count = TokenBridge(), 3000
    feed, reader, growing = TokenFeed(bridge, time.monotonic() + 60.0), Reader(), answer()
    letters = [chr(97 + at % 26) for at in range(count)]

    def steps() -> None:
        for at, letter in enumerate(letters):
            finish: FinishReason | None = "length" if at + 1 == count else None
            feed.on_tokens((Token(ord(letter), -0.5, finish=finish),), DecodeTiming())
            feed.flush()
            if at % 10 == 0:
                time.sleep(0.0001)
            if at % 500 == 250:
                loop.call_soon_threadsafe(stop)

    def stop() -> None:
        reader.ready = False

    loop = asyncio.get_running_loop()
    engine = threading.Thread(target=steps)
    engine.start()
    async for event in rest_of(growing, feed, growing.add, reader.send_now):
        await reader.send(event, 0.001)
    engine.join()
    feed.close()
    assert reader.text == "".join(letters) and growing.completion_tokens == count
    assert reader.at_once > 1


async def test_an_error_of_a_step_that_is_sent_at_once_ends_the_answer() -> None:
    bridge = TokenBridge()
    feed, growing = TokenFeed(bridge, time.monotonic() + 60.0), answer()
    rest = rest_of(growing, feed, growing.add, Reader().send_now)
    ended = asyncio.ensure_future(anext(rest))
    await asyncio.sleep(0)
    feed.on_tokens((Token(97, math.nan),), DecodeTiming())
    feed.flush()
    with pytest.raises(ModelError, match="NaN"):
        await ended
    feed.close()


async def test_a_token_that_ends_the_answer_has_no_text_unless_it_is_wanted() -> None:
    for silent, text in ((frozenset({ord("b")}), "a"), (frozenset[int](), "ab")):
        one = GrowingAnswer(Plain(ByteTokenizer(256).stream()), silent=silent)
        assert added(one, [*steps("a"), *steps("b", "stop")]).text == text
        assert (one.finish_reason, one.completion_tokens) == ("stop", 2)
        resumed = GrowingAnswer(Plain(ByteTokenizer(256).stream()), silent=silent)
        await resumed.resume(b"ab", Sampling(stop_token_ids=(ord("b"),)), ())
        assert resumed.finish_reason == "stop"


class Calling:
    """An Output in which a capital letter is a call, and an exclamation mark two."""

    reasoning, stopped = False, ""

    def push(self, token: int) -> Sequence[OutputPart]:
        letter = chr(token)
        count = 2 if letter == "!" else int(letter.isupper())
        return [OutputPart("call", call=ToolCall(letter))] * count if count else [OutputPart("text", letter)]

    def finish(self) -> Sequence[OutputPart]:
        return [OutputPart("text", "rest")]


@pytest.mark.parametrize("text", ["abXcdY", "ab!cd"])
def test_an_answer_of_one_call_at_most_ends_with_it(text: str) -> None:
    one = GrowingAnswer(Calling(), one_call=True)
    event = added(one, steps(text))
    assert (event.text, len(event.tool_calls), len(event.tokens)) == ("ab", 1, 3)
    assert one.finish_reason == "tool_calls"


async def test_an_answer_that_another_host_has_ended_with_its_only_call_is_complete() -> None:
    one, more = GrowingAnswer(Calling(), one_call=True), GrowingAnswer(Calling())
    for growing in (one, more):
        await growing.resume(b"abX", Sampling(), ())
    assert (one.finish_reason, more.finish_reason) == ("tool_calls", None)
