"""Two real processes, a real connection, real torch tensors and mlx caches; small ones."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from disagg.errors import DisaggError, PeerLost, UsageError
from disagg.fleet.link import handoff as rehearsal
from disagg.fleet.link.handoff import Order

ORDER = Order((None, 16, None), 2, 8, "bfloat16", 100, 2, "cpu", 60.0)
ROWS = 2 * 100 + 16


@pytest.fixture(scope="module")
def figures() -> Any:
    return rehearsal.rehearse(rehearsal.here("prefill end"), rehearsal.here("decode end"), ORDER)


def test_every_way_moved_the_same_bytes_and_was_timed_in_every_round(figures: Any) -> None:
    assert figures["bytes"] == ROWS * 2 * 2 * 8 * 2
    assert (figures["rounds"], figures["device"]) == (2, "cpu")
    assert set(figures["ways"]) == {"handoff", "raw_socket", "base64_json"}
    for way in figures["ways"].values():
        assert way["best_gb_s"] >= way["gb_s"] > 0
        assert way["sender_cpu_s_per_gb"] > 0


def test_the_ratios_are_those_of_the_rates(figures: Any) -> None:
    assert figures["ratio_to_raw"] == pytest.approx(figures["handoff_gb_s"] / figures["raw_socket_gb_s"])
    assert figures["handoff_gb_s"] == figures["ways"]["handoff"]["gb_s"]
    assert figures["ratio_to_base64_json"] == pytest.approx(figures["handoff_gb_s"] / figures["base64_json_gb_s"])


def test_a_device_that_is_not_there_is_told_with_the_end_that_lacks_it() -> None:
    order = Order((None,), 1, 8, "float32", 4, 1, "nonsense", 60.0)
    with pytest.raises(DisaggError, match=r"prefill end: .*nonsense"):
        rehearsal.rehearse(rehearsal.here("prefill end"), rehearsal.here("decode end"), order)


def play(end: str, **order: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "DISAGG_REHEARSAL": json.dumps(order)}
    argv = [sys.executable, "-m", "disagg.bench.handoff", end]
    return subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True)


SMALL = {"windows": [None], "kv_heads": 1, "head_dim": 8, "dtype": "float32", "tokens": 4, "rounds": 1}


def test_only_the_one_with_the_token_is_let_in_and_strangers_do_no_harm() -> None:
    with play("receive", token="right", host="127.0.0.1", **SMALL) as receiver:
        assert receiver.stdout is not None
        port = json.loads(receiver.stdout.readline())["port"]
        with socket.create_connection(("127.0.0.1", port)) as junk:
            junk.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with play("send", token="wrong", host="127.0.0.1", port=port, **SMALL) as sender:
            refused, _ = sender.communicate(timeout=60)
        with play("send", token="right", host="127.0.0.1", port=port, **SMALL) as sender:
            figures, _ = sender.communicate(timeout=60)
        told, _ = receiver.communicate(timeout=60)
    assert json.loads(refused)["error"]["code"] == PeerLost.__name__
    assert json.loads(figures)["rounds"] == 1
    assert (told, receiver.returncode, sender.returncode) == ("", 0, 0)


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense", '{"token": "t", "surprise": 1}'])
def test_an_order_that_is_none_is_refused(text: str) -> None:
    environment = {**os.environ, "DISAGG_REHEARSAL": text}
    argv = [sys.executable, "-m", "disagg.bench.handoff", "receive"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert json.loads(done.stdout)["error"]["code"] == UsageError.__name__
    assert done.returncode == UsageError.exit_code and "Traceback" not in done.stderr
