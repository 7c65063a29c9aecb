"""The record of running requests: what a server that starts again finds in it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
from msgspec import structs

from disagg.api.requests import GenerateBody, PrefillBody
from disagg.errors import RequestEndedHosts
from disagg.servers.host.record import PLACES, RequestRecord
from disagg.servers.host.request import Phase
from disagg.strikes import POLICY, marks
from disagg.token import Tokens

Start = Callable[..., RequestRecord]
TOKENS = Tokens("a token of the fleet that nobody guesses")


def body(prompt: str = "p") -> GenerateBody:
    return GenerateBody(model="m", prompt=prompt)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "host-8000.requests"


@pytest.fixture
def start(path: Path) -> Iterator[Start]:
    """Starts a server with the record at `path`, as if the one before had just ended: its file stays as it is, and its
    descriptor is closed at the test's end."""
    opened = list[RequestRecord]()

    def begin(places: int = PLACES) -> RequestRecord:
        opened.append(RequestRecord("host", path, TOKENS, places))
        return opened[-1]

    yield begin
    for one in opened:
        if one._file is not None:
            os.close(one._file)


def strikes(server: RequestRecord, prompt: str = "p") -> int:
    of = marks(body(prompt), TOKENS.current)
    return of.strikes(lambda mark: server.strikes.stated(time.time()).get(mark, 0))


@pytest.mark.parametrize(
    ("phases", "struck"),
    [
        (["tokenising"], True),
        (["tokenising", "queued"], False),
        (["tokenising", "queued", "generating"], True),
        (["tokenising", "queued", "computing the prompt", "sending KV"], False),
        (["waiting for KV"], False),
    ],
    ids=lambda phases: phases[-1] if isinstance(phases, list) else "",
)
def test_what_a_server_computed_when_its_process_ended_gets_a_strike(
    start: Start, phases: list[Phase], struck: bool
) -> None:
    request = start().admit(body())
    for phase in phases:
        request.entered(phase)
    assert strikes(start()) == struck


def test_a_request_that_has_ended_or_has_a_token_gets_no_strike(start: Start) -> None:
    server = start()
    for prompt, end in (("ended", "ended"), ("computed", "computed")):
        request = server.admit(body(prompt))
        request.entered("generating")
        getattr(request, end)()
        request.entered("generating")  # as by an engine's thread that was about to begin
    again = start()
    assert strikes(again, "ended") == strikes(again, "computed") == 0


def test_two_strikes_refuse_a_request_and_a_token_takes_a_strike_back(start: Start) -> None:
    for _ in range(2):
        start().admit(body()).entered("generating")
    refusing = start()
    with pytest.raises(RequestEndedHosts, match="host ended while computing this request: it is refused for 300 s"):
        refusing.admit(body())
    refusing.admit(body("another")).entered("generating")
    once = start()
    assert strikes(once, "another") == 1 and strikes(once) == 2
    request = once.admit(body("another"))
    request.entered("generating")
    request.computed()
    assert strikes(once, "another") == 0 and strikes(start(), "another") == 0


@pytest.mark.parametrize("standing", ["suspect", "innocent"])
def test_a_request_with_strikes_elsewhere_that_is_computed_is_acquitted_also_after_a_crash(
    start: Start, standing: Literal["suspect", "innocent"]
) -> None:
    server = start()
    request = server.admit(structs.replace(body(), standing=standing))
    request.entered("generating")
    assert server.verdicts.acquitted == ()
    request.computed()
    assert server.verdicts.acquitted == start().verdicts.acquitted == marks(body(), TOKENS.current).computed


def test_a_request_that_is_refused_here_is_computed_for_a_caller_that_knows_it_to_be_innocent(start: Start) -> None:
    for _ in range(2):
        start().admit(body()).entered("generating")
    server = start()
    with pytest.raises(RequestEndedHosts):
        server.admit(structs.replace(body(), standing="suspect"))
    server.admit(structs.replace(body(), standing="innocent")).computed()
    server.admit(body())


def test_an_honest_request_that_is_sent_all_the_time_is_not_refused_however_often_the_host_is_killed_with_it(
    start: Start,
) -> None:
    for _ in range(20):
        server = start()
        server.admit(body()).computed()
        server.admit(body()).entered("generating")
    assert strikes(start()) == 0


def test_of_what_was_computed_the_latest_is_known_after_a_crash(start: Start) -> None:
    server = start()
    server.admit(body()).computed()
    for number in range(POLICY.computed - 1):
        server.admit(body(str(number))).computed()
    server.admit(body()).entered("generating")
    server.admit(body("0")).entered("generating")
    again = start()
    assert (strikes(again), strikes(again, "0")) == (0, 0)
    again.admit(body("another")).computed()
    again.admit(body()).entered("generating")
    assert strikes(start()) == 2, "what was computed at first has been overwritten"


def test_a_crash_is_one_strike_for_a_request_however_often_it_ran(start: Start) -> None:
    server = start()
    for _ in range(8):
        server.admit(body()).entered("generating")
    assert strikes(start()) == 1


def test_a_server_that_ends_of_its_own_will_leaves_no_strike(start: Start) -> None:
    server = start()
    server.admit(body()).entered("generating")
    server.close()
    assert strikes(start()) == 0


def test_a_prefill_host_knows_a_prompt_whatever_answer_it_is_for(start: Start) -> None:
    ordered = {"model": "m", "prompt": "p", "deliver": {"host": "h", "port": 1}, "ticket": "12345678"}
    start().admit(PrefillBody.received(ordered, "a caller")).entered("computing the prompt")
    assert strikes(start()) == 1


@pytest.mark.parametrize(
    "content", [b"", b"x", os.urandom(100_000), b"\xff" * 500_000], ids=["empty", "1", "any", "large"]
)
def test_a_damaged_file_refuses_nobody(path: Path, start: Start, content: bytes) -> None:
    path.write_bytes(content)
    server = start()
    server.admit(body())
    assert not server.verdicts.strikes and not server.verdicts.acquitted


def test_the_file_has_no_text_and_nobody_else_may_read_it(path: Path, start: Start) -> None:
    start().admit(body("a secret prompt")).entered("generating")
    assert path.stat().st_mode & 0o777 == 0o600
    assert b"secret" not in path.read_bytes()


def test_a_server_that_cannot_write_the_file_serves_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = RequestRecord("host", tmp_path / "missing" / "file", TOKENS)
    request = server.admit(body())
    request.entered("generating")
    request.computed()
    server.close()
    assert "requests_not_recorded" in caplog.text


def test_more_requests_than_places_are_served_and_places_are_used_again(start: Start) -> None:
    server = start(2)
    requests = [server.admit(body(str(number))) for number in range(3)]
    for request in requests:
        request.entered("generating")
    requests[0].ended()
    server.admit(body("3")).entered("generating")
    again = start(2)
    assert [strikes(again, str(number)) for number in range(4)] == [0, 1, 0, 1]


def test_an_engines_thread_and_the_end_of_a_request_may_meet(start: Start) -> None:
    server = start()
    for _ in range(200):
        request = server.admit(body())
        thread = threading.Thread(target=request.entered, args=("generating",))
        thread.start()
        request.ended()
        thread.join()
    assert strikes(start()) == 0 and len(server._free) == PLACES
