"""keep_alive in the forms of Ollama, and what a key allows of it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from disagg.errors import ModelNotAllowed, RequestError
from disagg.gateway.clients.access import kept_alive, require_admin
from disagg.gateway.clients.keys import Key
from disagg.gateway.dialects.chat import ChatCompletions
from disagg.gateway.dialects.completions import Completions
from disagg.gateway.dialects.managing import keep_alive_s
from disagg.gateway.dialects.ollama import Chat, Generate
from disagg.gateway.dialects.responses import Responses

MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None),
        (0, 0),
        (300, 300),
        (1.5, 1.5),
        (-1, math.inf),
        (1e300, math.inf),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5h", 5400),
        (".5s", 0.5),
        ("250ms", 0.25),
        ("10\u00b5s", 1e-5),
        ("+2m", 120),
        ("-1s", math.inf),
        ("0", 0),
        ("0s", 0),
        ("-1", math.inf),
        ("90", 90),
    ],
)
def test_a_length_of_time_is_read_as_ollama_reads_it(given: Any, seconds: float | None) -> None:
    read = keep_alive_s(given)
    assert read == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize("given", ["", "soon", "5 minutes", "5d", "m", "--1", "1e3s", ".", "1h-5m", "9" * 300, "5m\n5"])
def test_what_is_no_length_of_time_is_one_error_that_names_the_field(given: str) -> None:
    with pytest.raises(RequestError, match=r"^keep_alive: not a length of time") as caught:
        keep_alive_s(given)
    assert len(caught.value.message) < 200 and '"5m"' in caught.value.hint


@pytest.mark.parametrize("given", [True, [], {}])
def test_other_types_are_refused_by_name(given: Any) -> None:
    with pytest.raises(RequestError, match=r"^keep_alive: "):
        Chat().read({"model": "m", "messages": MESSAGES, "keep_alive": given})


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (Chat(), {"messages": MESSAGES}),
        (Chat(), {}),
        (Generate(), {"prompt": "x"}),
        (ChatCompletions(), {"messages": MESSAGES}),
        (Completions(), {"prompt": "x"}),
        (Responses(None), {"input": "x"}),
    ],
)
def test_every_api_that_knows_it_takes_it(dialect: Any, body: dict[str, Any]) -> None:
    assert dialect.read({"model": "m", **body, "keep_alive": "5m"}).keep_alive_s == 300
    assert dialect.read({"model": "m", **body}).keep_alive_s is None


def test_ttl_is_another_name_of_it_in_openais_apis() -> None:
    def read(**more: Any) -> float | None:
        return ChatCompletions().read({"model": "m", "messages": MESSAGES, **more}).keep_alive_s

    assert read(ttl=60) == 60
    assert read(ttl=60, keep_alive=5) == 5


def test_a_key_bounds_it_and_says_so() -> None:
    def key(**fields: Any) -> Key:
        return Key(id="1", name="a b", sha256="", created=0, **fields)

    assert kept_alive(None, math.inf) == (math.inf, None)
    assert kept_alive(key(), 60) == (60, None)
    assert kept_alive(key(keep_alive_s=90), 60) == (60, None)
    assert kept_alive(key(keep_alive_s=90), 3600) == (90, "keep_alive: 3600 s was lowered to the 90 s of the key a b")
    seconds, warning = kept_alive(key(keep_alive_s=90), math.inf)
    assert seconds == 90 and "for ever" in str(warning)
    assert kept_alive(key(load=False), 60)[0] is None
    assert kept_alive(key(load=False, admin=True), 60) == (60, None)
    require_admin(None, "pull models")
    require_admin(key(admin=True), "pull models")
    with pytest.raises(ModelNotAllowed, match="the key a b may not pull models") as caught:
        require_admin(key(), "pull models")
    assert caught.value.hint == "disagg keys edit 'a b' --admin"
