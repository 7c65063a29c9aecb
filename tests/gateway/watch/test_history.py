"""Finished requests in their file: what is kept, what is dropped, and that nothing about it fails a request."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from disagg.api.gateway import HistoryEntry
from disagg.errors import DisaggError, ServerUnavailable
from disagg.gateway import views
from disagg.gateway.clients.keys import KeyFile
from disagg.gateway.dialects.base import GatewayRequest, Head, Prompt
from disagg.gateway.dialects.problems import problem_of
from disagg.gateway.watch.entry import entry_of_completion, entry_of_end
from disagg.gateway.watch.gateway import GatewayWatch
from disagg.gateway.watch.history import CACHE_KIB, Filter, HistoryBounds, Store, read
from disagg.gateway.watch.recorder import Recorder
from disagg.gateway.watch.request import ObservedRequest, Observers
from disagg.inference.client import AsyncClient
from disagg.inference.types import Stage
from tests.deadlines import wait_until
from tests.gateway import fake_client
from tests.gateway.fake_client import FakeClient, completion

STAGE = Stage("decode", "fallback", None, "d", 100, 60, "prefill failed")
ALL = Filter()


def observed(
    text: str = "", *texts: str, n: int = 1, key: str | None = "editor", key_id: str | None = None
) -> ObservedRequest:
    """A request in STAGE; with these prompts, if there are any to be kept."""
    prompts = tuple(Prompt(prompt=one) for one in (text, *texts))
    head = Head(GatewayRequest(model="m", prompts=prompts, n=n), "r1", time.time())
    request = Observers([], keep_text=bool(text)).accept(head, "openai-chat", "m", key, key_id)
    for answer in request.answers:
        answer.stage = STAGE
    return request


def completed(recorder: Recorder, text: str, request: ObservedRequest | None = None) -> None:
    """A request is answered with this text."""
    request = request or observed()
    request.answers[0].completion = completion(text)
    recorder.completed(request, 0)


def entry(number: int, **fields: object) -> HistoryEntry:
    base = HistoryEntry(time=float(number), request_id=f"r{number}", api="a", model="m", state="ok", total_time=1.0)
    return msgspec.structs.replace(base, **fields)


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    one = Recorder(tmp_path / "history.db")
    yield one
    one.close()


def test_the_pages_of_the_file_take_no_more_memory_than_their_bound(tmp_path: Path) -> None:
    store = Store(tmp_path / "history.db", HistoryBounds())
    assert store._connection.execute("PRAGMA cache_size").fetchone() == (-CACHE_KIB,)  # negative: in KiB
    store.close()


def test_an_entry_has_the_figures_and_the_route_and_no_text() -> None:
    request = observed()
    request.answers[0].completion = completion("one two", held_tokens=4)
    found = entry_of_completion(request, 0)
    assert (found.model, found.key, found.state, found.reason) == ("m", "editor", "ok", "prefill failed")
    assert (found.ttft, found.decode_speed, found.held_tokens, found.ttft_parts["prefill"]) == (0.4, 20.0, 4, 0.2)
    assert found.prompt is None and found.answer is None


def test_a_request_that_failed_has_an_entry_with_its_error_and_its_last_route() -> None:
    request = observed()
    request.answers[0].tokens, request.answers[0].began = 7, request.began + 0.5
    request.state, request.problem, request.seconds = "failed", problem_of(ServerUnavailable("gone")), 2.0
    found = entry_of_end(request)
    assert found is not None
    assert (found.state, found.error_code, found.error) == ("failed", "no_host_available", "gone")
    assert (found.decode_server, found.completion_tokens, found.total_time) == ("d", 7, 2.0)
    assert found.ttft == pytest.approx(0.5)
    request.state = "ok"
    assert entry_of_end(request) is None


def test_a_kept_text_is_the_prompt_of_that_answer_and_bounded() -> None:
    request = observed("first", "second" * 100_000, n=2)
    for answer in request.answers:
        answer.completion = completion("x")
    prompts = [entry_of_completion(request, choice).prompt for choice in range(4)]
    assert prompts[:2] == ["first", "first"]
    assert prompts[2] is not None and prompts[2].startswith("second") and len(prompts[2]) == 64 << 10


async def test_what_has_settled_can_be_read_while_the_gateway_runs(recorder: Recorder) -> None:
    completed(recorder, "one two")
    cancelled = observed()
    cancelled.state = "cancelled"
    recorder.ended(cancelled)
    await recorder.settle()
    assert [one.state for one in read(recorder.path, ALL)] == ["cancelled", "ok"]
    assert recorder.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (Filter(), [5, 4, 3, 2, 1]),
        (Filter(limit=2), [5, 4]),
        (Filter(before=4, limit=2), [3, 2]),
        (Filter(since=3.0), [5, 4, 3]),
        (Filter(state="failed"), [4]),
        (Filter(models=("other",)), [5]),
        (Filter(models=("m",), since=2.0, state="ok"), [3, 2]),
        (Filter(models=()), []),
    ],
)
def test_what_a_filter_leaves_newest_first(tmp_path: Path, wanted: Filter, found: list[int]) -> None:
    store = Store(tmp_path / "history.db", HistoryBounds())
    store.append([entry(1), entry(2), entry(3), entry(4, state="failed"), entry(5, model="other")])
    store.close()
    assert [one.id for one in read(tmp_path / "history.db", wanted)] == found


def test_old_entries_and_those_over_the_bound_are_removed(tmp_path: Path) -> None:
    store = Store(tmp_path / "history.db", HistoryBounds(age_s=100.0, rows=2))
    store.append([entry(number) for number in (1, 10, 20, 30)])
    store.prune(now=105.0)
    store.close()
    assert [one.time for one in read(tmp_path / "history.db", ALL)] == [30.0, 20.0]


def test_a_history_that_was_never_written_is_empty(tmp_path: Path) -> None:
    assert read(tmp_path / "history.db", ALL) == ()


@pytest.mark.parametrize("content", [b"this is no database, but long enough to look like a file of one" * 20])
async def test_a_damaged_file_stops_the_history_with_one_line_and_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    path = tmp_path / "history.db"
    path.write_bytes(content)
    recorder = Recorder(path)
    for _ in range(3):
        completed(recorder, "one two")
        await recorder.settle()
    recorder.close()
    assert caplog.text.count("nothing is recorded any more") == 1 and "not a database" in str(recorder.stopped)
    with pytest.raises(DisaggError, match="cannot read the history"):
        read(path, ALL)


async def test_a_full_disk_stops_the_history_and_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path / "history.db")
    await recorder.settle()

    class Full(Store):
        def append(self, entries: object) -> None:
            raise sqlite3.OperationalError("database or disk is full")

    recorder.close()
    recorder = Recorder(tmp_path / "history.db", opened=Full)
    for _ in range(2):
        completed(recorder, "one two")
        await recorder.settle()
    recorder.close()
    assert caplog.text.count("disk is full") == 1


def test_a_disk_that_is_too_slow_loses_entries_and_delays_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "history.db"
    Store(path, HistoryBounds()).close()
    lock = sqlite3.connect(path, isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    recorder = Recorder(path, queued=2)
    for _ in range(200):
        completed(recorder, "one")
    assert recorder.dropped >= 190 and caplog.text.count("the disk is too slow") == 1
    lock.execute("ROLLBACK")
    lock.close()
    wait_until(lambda: len(read(path, ALL)) > 0, 60, "the entries that were queued")
    recorder.close()


def test_a_file_of_another_version_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    recorder = Recorder(path)
    recorder.close()
    assert "format 99" in str(recorder.stopped)


@pytest.mark.parametrize("content", [b"not a database" * 100, b""], ids=["damaged", "of another version"])
def test_a_file_that_cannot_be_used_is_closed(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, opened, connect = tmp_path / "history.db", list[sqlite3.Connection](), sqlite3.connect
    path.write_bytes(content)
    if not content:
        with closing(connect(path)) as connection:
            connection.execute("PRAGMA user_version = 99")

    def noted(*arguments: Any, **named: Any) -> sqlite3.Connection:
        opened.append(connect(*arguments, **named))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", noted)
    with pytest.raises(sqlite3.DatabaseError):
        Store(path, HistoryBounds())
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        opened[0].execute("SELECT 1")


def test_the_oldest_entries_are_removed_if_they_take_too_many_bytes(tmp_path: Path) -> None:
    store = Store(tmp_path / "history.db", HistoryBounds(age_s=100.0, size=200_000))
    store.append([entry(number, prompt="x" * 10_000) for number in range(60)])
    store.prune(now=60.0)
    store.close()
    left = [one.time for one in read(tmp_path / "history.db", ALL)]
    assert 10 <= len(left) <= 20 and left == [59.0 - number for number in range(len(left))]


async def listed(recorder: Recorder, tmp_path: Path, secret: str | None, query: str = "") -> list[dict[str, Any]]:
    """The entries that this key is answered with."""
    file, client = KeyFile(tmp_path / "keys.json"), FakeClient()
    headers = {"authorization": f"Bearer {secret}"} if secret else {}
    watch = GatewayWatch(cast(AsyncClient, client), recorder)
    async with fake_client.http(fake_client.app(client, file.path, watch), **headers) as http:
        return cast("list[dict[str, Any]]", (await http.get(f"/api/history{query}")).json()["entries"])


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("editor", ["of editor"]),
        ("chat", ["of chat"]),
        ("watch", [None, None, None, None]),
        (None, [None, None, None, "of nobody"]),
    ],
)
async def test_a_key_sees_its_own_requests_only_and_one_that_monitors_all_without_their_texts(
    recorder: Recorder, tmp_path: Path, name: str | None, texts: list[str | None]
) -> None:
    file, secrets = KeyFile(tmp_path / "keys.json"), dict[str | None, str]()
    if name:
        file.add("editor")
        file.revoke("editor")  # the name is then given to somebody else
        secrets = {key: file.add(key, monitor=key == "watch") for key in ("editor", "chat", "watch")}
    ids = [(one.name, one.id) for one in file.read()][:3] or [("editor", "1"), ("editor", "2"), ("chat", "3")]
    for key, key_id in [(None, None), *ids]:
        text = f"of {key or 'nobody'}"
        completed(recorder, text, observed(text, key=key, key_id=key_id))
    await recorder.settle()
    found = await listed(recorder, tmp_path, secrets.get(name))
    assert [one["prompt"] for one in found] == [one["answer"] for one in found] == texts


async def test_an_answer_ends_before_the_limit_if_its_texts_are_long(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "MAX_ANSWER", 5_000)
    for _ in range(5):
        completed(recorder, "a", observed("x" * 2_000, key=None))
    await recorder.settle()
    first = await listed(recorder, tmp_path, None)
    then = await listed(recorder, tmp_path, None, f"?before={first[-1]['id']}")
    assert 0 < len(first) < 5 and [one["id"] for one in (*first, *then)][:4] == [5, 4, 3, 2]


@pytest.mark.parametrize("before", ["99999999999999999999", "-1"])
async def test_a_page_before_an_id_that_cannot_be_is_refused(before: str) -> None:
    async with fake_client.http(fake_client.app(FakeClient())) as http:
        answer = await http.get(f"/api/history?before={before}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "before")


async def test_an_error_while_the_last_entries_are_written_ends_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(Store):
        def append(self, entries: object) -> None:
            raise sqlite3.OperationalError("database or disk is full")

    taken = threading.Event()
    following = Recorder._next

    def together(recorder: Recorder) -> Any:
        assert taken.wait(60)
        return following(recorder)

    monkeypatch.setattr(Recorder, "_next", together)
    recorder = Recorder(tmp_path / "history.db", opened=Full)
    completed(recorder, "one")
    recorder._queue.put(None)
    taken.set()
    recorder._thread.join(60)
    assert not recorder._thread.is_alive() and "disk is full" in str(recorder.stopped)


async def test_callers_that_read_a_slow_history_hold_up_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of hosts are looked up on the loop's default threads."""
    goes_on = threading.Event()

    def page(*_: object) -> bytes:
        assert goes_on.wait(60)
        return b"{}"

    monkeypatch.setattr(views, "_page", page)
    async with fake_client.http(fake_client.app(FakeClient(), tmp_path / "keys.json")) as http, asyncio.timeout(60):
        reading = [asyncio.ensure_future(http.get("/api/history")) for _ in range(views.MAX_READING + 1)]
        try:
            (refused,), _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            assert refused.result().status_code == 429
            assert await asyncio.to_thread(lambda: 1) == 1
            assert (await http.get("/health")).status_code in (200, 503)
        finally:
            goes_on.set()
        assert sorted(one.status_code for one in await asyncio.gather(*reading))[-2:] == [200, 429]
