"""Random HTTP bodies: a valid one of each endpoint with some of its values replaced, removed or added. Pure."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Mapping
from typing import Any, Final

JSON = Any

VALID: Final[Mapping[str, Mapping[str, JSON]]] = {
    "/generate": {
        "model": "tiny",
        "prompt": "def add(a, b):",
        "sampling": {"max_tokens": 3, "temperature": 0.5, "seed": 1, "stop": ["x"]},
        "deadline_s": 2.0,
        "lease_s": 2.0,
        "cache_salt": "a",
    },
    "/decode": {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "sampling": {"max_tokens": 3},
        "answer_tokens": [7],
        "deadline_s": 2.0,
        "prefill": {"wait_s": 0.1, "tokens_s": 100.0, "link_bytes_s": 1e9},
    },
    "/prefill": {
        "model": "tiny",
        "tokens": [10, 11, 12],
        "deadline_s": 2.0,
        "deliver": {"host": "127.0.0.1", "port": 9},
        "ticket": "a-ticket-of-nobody",
        "start": 0,
    },
    "/score": {"model": "tiny", "prompt": "def add(a, b):", "top": 2, "deadline_s": 2.0},
    "/count": {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "deadline_s": 2.0},
    "/lease": {"request_ids": ["a", "b"]},
}
VALUES: Final[tuple[JSON, ...]] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**40, 0.0, -0.0, 1e-320, 1e308, 0.5),
    *("", "tiny", "\x00", "\ud800", "é🙂", "x" * 5000, "prefill", "127.0.0.1", "*"),
    *([], [[]], [None], {}, {"": {}}, [0] * 3000, [-1], ["tiny"], {"role": "user"}, [[[[[[[[[[]]]]]]]]]]),
)
RAW: Final[tuple[bytes, ...]] = (
    b"",
    b"null",
    b"[]",
    b'"',
    b"\xff\xfe",
    b"NaN",
    b"[" * 20_000,
    b'{"model":' * 2000,
    b'{"model": 1e999}',
    b'{"model": "tiny", "prompt": "x", "deadline_s": NaN}',
    b'{"model": "tiny", "prompt": "\\ud800"}',
    b"{}" * 10,
)


def body(path: str, chance: random.Random) -> bytes:
    """One body for this endpoint; sometimes not even JSON."""
    if chance.random() < 0.1:
        return chance.choice(RAW)
    value = json.loads(json.dumps(VALID[path]))
    for _ in range(chance.randint(0, 3)):
        _damage(value, chance)
    data = json.dumps(value).encode()
    if chance.random() < 0.1:
        data = data[: chance.randrange(len(data))]
    return data


def _damage(value: dict[str, JSON], chance: random.Random) -> None:
    """Replace, remove or add one value, at any depth."""
    holder: JSON = value
    while isinstance(holder, dict | list) and holder:
        key = chance.choice(list(holder)) if isinstance(holder, dict) else chance.randrange(len(holder))
        if isinstance(holder[key], dict | list) and holder[key] and chance.random() < 0.5:
            holder = holder[key]
            continue
        match chance.randrange(3):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[chance.choice(("", "model", "prompt", "tokens", "x"))] = copy.deepcopy(chance.choice(VALUES))
            case _:
                holder[key] = copy.deepcopy(chance.choice(VALUES))
        return
