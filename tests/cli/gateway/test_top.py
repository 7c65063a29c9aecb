"""The picture of `disagg top`, and what its keys change."""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from disagg.api.gateway import HistoryEntry, LiveHost, LiveModel, LiveRequest, LiveState, Totals
from disagg.cli.app import invoke
from disagg.cli.gateway import top as command
from disagg.cli.gateway.picture import KEYS, ScreenChoice, keys_of, press, top_view
from disagg.cli.gateway.top import _Screen
from disagg.config import Fleet
from disagg.errors import ServerUnavailable, UsageError
from disagg.gateway import follow
from tests.cli.commandline import run, write_fleet

LAST = HistoryEntry(
    time=0.0,
    request_id="r",
    api="chat",
    model="qwen",
    state="ok",
    total_time=2.0,
    prefill_time=0.5,
    prefill_speed=900.0,
    decode_time=1.5,
    decode_speed=30.0,
    ttft=0.6,
    prompt_tokens=11,
    completion_tokens=22,
)
STATE = LiveState(
    fleet="demo",
    version="1",
    time=0.0,
    started=0.0,
    totals=Totals(running=2, waiting=1, ok=7),
    models=(LiveModel(name="qwen", totals=Totals(), last=LAST), LiveModel(name="gpt", totals=Totals())),
    hosts=(
        LiveHost(name="mac-1", role="decode", model="qwen", state="up", decode_tokens_s=31.0),
        LiveHost(name="dgx-2", role="prefill", model="gpt", state="down", reason="gone", hint="disagg start"),
    ),
    requests=(
        LiveRequest(
            number=1, request_id="a", api="chat", model="qwen", phase="decode", seconds=1.0, phase_seconds=1.0, tokens=9
        ),
        LiveRequest(
            number=2, request_id="b", api="ask", model="gpt", phase="queue", seconds=5.0, phase_seconds=1.0, tokens=2
        ),
    ),
    last=(LAST,),
)


def text(shown: ScreenChoice, note: str = "", state: LiveState = STATE, height: int = 100, width: int = 80) -> str:
    console = Console(width=width, height=height, color_system=None)
    with console.capture() as captured:
        console.print(top_view(state, shown, note))
    return captured.get()


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        ("x", ScreenChoice()),
        ("s", ScreenChoice(order="tokens")),
        ("sss", ScreenChoice(order="time")),
        ("m", ScreenChoice(model="qwen")),
        ("mmm", ScreenChoice()),
        ("d", ScreenChoice(part="requests")),
        ("dd", ScreenChoice(part="hosts")),
        (" ", ScreenChoice(paused=True)),
        ("  ", ScreenChoice()),
        ("SM", ScreenChoice(order="tokens", model="qwen")),
        ("q", None),
    ],
)
def test_what_is_shown_after_these_keys(keys: str, shown: ScreenChoice | None) -> None:
    now: ScreenChoice | None = ScreenChoice()
    for key in keys:
        assert now is not None
        now = press(now, key, STATE)
    assert now == shown


def test_the_picture_has_models_requests_hosts_and_the_last_answers_in_80_columns() -> None:
    picture = text(ScreenChoice())
    help_text = "dgx-2: gone\n  → disagg start\n"
    for part in ("500 ms @ 900", "1.50 s @ 30", "decode", "queue", "mac-1", help_text, "11+22", "q quit"):
        assert part in picture
    assert max(map(len, picture.splitlines())) <= 80


def test_a_whole_request_host_has_no_figure_for_its_kv() -> None:
    host = LiveHost(name="mini", role="whole", model="qwen", state="up")
    picture = text(ScreenChoice(part="hosts"), state=msgspec.structs.replace(STATE, hosts=(host,)))
    assert next(line for line in picture.splitlines() if "mini" in line).split() == [
        "mini",
        "whole",
        "up",
        "0",
        "0",
        "–",
        "–",
    ]


@pytest.mark.parametrize(("order", "first"), [("time", "ask"), ("tokens", "chat"), ("model", "ask")])
def test_requests_are_sorted(order: str, first: str) -> None:
    picture = text(ScreenChoice(order=order, part="requests"))  # type: ignore[arg-type]  # of a parameter
    assert min((picture.index(name), name) for name in ("  chat", "  ask"))[1].strip() == first


def test_one_model_and_one_part_leave_out_the_rest() -> None:
    assert "dgx-2" not in text(ScreenChoice(model="qwen")) and "mac-1" in text(ScreenChoice(model="qwen"))
    hosts = text(ScreenChoice(part="hosts"))
    assert "mac-1" in hosts and "11+22" not in hosts


def test_the_help_for_a_host_has_the_width_of_the_terminal() -> None:
    reason = "it does not answer at http://127.0.0.1:28104 within the time that hosts have"
    host = msgspec.structs.replace(STATE.hosts[1], reason=reason, hint="disagg start --host dgx-spark-2")
    picture = text(ScreenChoice(part="hosts"), state=msgspec.structs.replace(STATE, hosts=(host,)))
    assert f"  → {host.hint}\n" in picture and "…" not in picture


def test_a_gateway_that_has_gone_is_stated_below_the_last_picture() -> None:
    assert "no gateway answers" in text(ScreenChoice(), "no gateway answers at x")


@pytest.mark.parametrize(("part", "cut"), [("all", "… d shows one part at a time"), ("last", "…")])
def test_a_low_terminal_shows_what_fits_and_always_the_note_and_the_keys(part: str, cut: str) -> None:
    busy = msgspec.structs.replace(STATE, requests=STATE.requests * 20, hosts=STATE.hosts * 4, last=(LAST,) * 40)
    picture = text(ScreenChoice(part=part), "no gateway answers at x", busy, height=24).splitlines()  # type: ignore[arg-type]  # of a parameter
    assert len(picture) == 24
    assert [line.rstrip() for line in picture[-4:]] == [cut, "", "no gateway answers at x", KEYS]


def test_into_a_pipe_the_picture_is_whole_whatever_the_height() -> None:
    busy = msgspec.structs.replace(STATE, hosts=STATE.hosts * 30)
    console = Console(width=80, height=24, color_system=None)
    with console.capture() as captured:
        console.print(top_view(busy, ScreenChoice(), keys=False))
    assert captured.get().count("mac-1") == 30


@pytest.mark.parametrize(
    ("read", "keys"),
    [
        ("\x1b", "\x1b"),
        ("sq", "sq"),
        ("\x1b[A", ""),
        ("\x1bOA", ""),
        ("\x1b[1;5C", ""),
        ("\x1b[15~\x1b[Bs", "s"),
        ("\x1bq", ""),
        ("\x1b\x1b", "\x1b\x1b"),
    ],
)
def test_arrow_and_function_keys_are_not_the_escape_key(read: str, keys: str) -> None:
    assert keys_of(read) == keys


async def test_the_screen_ends_by_escape_and_not_by_an_arrow_key() -> None:
    screen = _Screen(STATE)
    screen.press("\x1b[A")
    assert not screen.ended.is_set()
    screen.press("\x1b")
    assert screen.ended.is_set()


def test_a_narrow_terminal_has_fewer_columns_and_none_is_cut() -> None:
    wide, narrow = text(ScreenChoice()), text(ScreenChoice(), width=40)
    assert "…" not in narrow and max(map(len, narrow.splitlines())) <= 40
    assert "waiting" in wide and "running" in narrow and "5.00 s" in narrow and "waiting  " not in narrow


def test_a_name_in_brackets_is_shown_as_it_is() -> None:
    entry = msgspec.structs.replace(LAST, model="[/h]")
    request = msgspec.structs.replace(
        STATE.requests[0], model="[/r]", key="[bold]k", prefill_server="[/p]", decode_server="[/d]"
    )
    picture = text(
        ScreenChoice(),
        state=msgspec.structs.replace(
            STATE,
            models=(LiveModel(name="[/m]", totals=Totals()),),
            hosts=(msgspec.structs.replace(STATE.hosts[0], name="[/o]"),),
            requests=(request,),
            last=(entry,),
        ),
    )
    for name in ("[/h]", "[/r]", "[bold]k", "[/p]", "[/d]", "[/m]", "[/o]"):
        assert name in picture


@pytest.mark.parametrize(("option", "asked"), [("--url=http://a", "asking http://a"), ("--hosts", "asking the hosts")])
def test_before_the_first_picture_the_terminal_shows_who_is_asked(
    option: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = io.StringIO()
    console = Console(file=printed, width=80, force_terminal=True, color_system=None)

    async def source(*_: Any, **__: Any) -> Any:
        async with asyncio.timeout(60):
            while asked not in printed.getvalue():  # a thread of rich prints it
                await asyncio.sleep(0.01)
        return None, STATE, ""

    async def shown(*_: Any) -> None:
        pass

    monkeypatch.setattr(command, "stdout", lambda: console)
    monkeypatch.setattr(command, "_source", source)
    monkeypatch.setattr(command, "follow_states", shown)
    invoke(["top", option])


@pytest.mark.parametrize(
    ("options", "caption"), [((), "no gateway answers at http://127.0.0.1:8080"), (("--hosts",), "")]
)
def test_hosts_that_are_shown_because_no_gateway_answers_have_a_line_that_states_so(
    options: tuple[str, ...],
    caption: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def no_gateway(at: str, _: str | None) -> AsyncGenerator[LiveState, None]:
        raise ServerUnavailable(f"no gateway answers at {at}")
        yield STATE

    async def hosts(_: Fleet) -> AsyncGenerator[LiveState, None]:
        yield STATE

    monkeypatch.setattr(follow, "gateway_states", no_gateway)
    monkeypatch.setattr(follow, "host_states", hosts)
    assert run("--config", write_fleet(tmp_path), "top", *options) == 0
    picture = capsys.readouterr().out
    assert "mac-1" in picture and "q quit" not in picture
    assert ("these are the hosts' own figures" in picture) is bool(caption)
    assert not caption or picture.splitlines()[-1] == f"{caption}: these are the hosts' own figures"


def test_a_gateway_that_was_named_and_does_not_answer_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hosts' own figures under the name of a gateway that was mistyped would look like its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert run("--config", write_fleet(tmp_path), "top", "--url", url) == 4
    shown = capsys.readouterr()
    assert shown.out == "" and f"no gateway answers at {url}" in shown.err
    assert run("--config", write_fleet(tmp_path), "top", "--url", url, "--hosts") == 2


@pytest.mark.parametrize(
    ("typed", "url"),
    [
        ("127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("mac-1:8080/", "http://mac-1:8080/"),
        ("http://a", "http://a"),
        ("https://a:1", "https://a:1"),
    ],
)
def test_a_url_without_its_scheme_is_of_http(typed: str, url: str) -> None:
    assert command.full_url(typed) == url


async def test_the_screen_states_its_caption_unless_it_has_something_newer_to_state() -> None:
    screen = _Screen(STATE, "no gateway answers")
    console = Console(width=80, color_system=None)

    def shows(note: str) -> bool:
        with console.capture() as captured:
            console.print(screen.picture())
        return note in captured.get() and "q quit" in captured.get()

    assert shows("no gateway answers")
    screen.warn("it has stopped")
    assert shows("it has stopped")
    screen.take(STATE)
    assert shows("no gateway answers")


def test_a_url_of_another_scheme_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="is not a URL of a gateway"):
        command.full_url("foo://x")


def test_without_a_gateway_nothing_is_said_about_answers_and_what_runs_is_what_the_hosts_say() -> None:
    hosts = (
        LiveHost(name="dgx", role="prefill", model="qwen", state="up", running=1, queue=4),
        LiveHost(name="mac", role="decode", model="qwen", state="up", running=3, queue=2),
    )
    empty = LiveState(fleet="demo", version="1", time=0.0, started=0.0, totals=Totals(), hosts=hosts)
    state = follow.of_hosts(msgspec.structs.replace(empty, models=(LiveModel(name="qwen", totals=Totals()),)))
    assert (state.source, state.totals.running, state.models[0].totals.waiting) == ("hosts", 3, 2)
    picture = text(ScreenChoice(), state=state)
    assert picture.startswith("demo  3 running, 2 waiting, 0 B of KV\n")
    assert picture.count("known to gateways only") == 1 and "has ended" not in picture
    for word in ("0 answers", "0 tok/s", "no request"):
        assert word not in picture
    assert "known to gateways only" in text(ScreenChoice(part="last"), state=state)
