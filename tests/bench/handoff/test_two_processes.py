"""Two real processes, a real connection, real torch tensors and mlx caches; small ones.

The processes are forks of one that has imported torch and transformers: each would take 5 s of CPU time for that.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
from msgspec import structs

from disagg.api.handoff import ENVIRONMENT_VARIABLE, HandoffFigures, HandoffSpec
from disagg.errors import DisaggError, PeerLost, UsageError
from disagg.fleet.link.handoff import EndPlace, measure_handoff, on_this_machine
from tests.fleets import preloaded_command

SPEC = HandoffSpec(
    windows=(None, 16, None), kv_heads=2, head_dim=8, dtype="bfloat16", tokens=100, rounds=2, device="cpu"
)
SMALL = HandoffSpec(windows=(None,), kv_heads=1, head_dim=8, dtype="float32", tokens=4, rounds=1)
ROWS = 2 * 100 + 16


def place(name: str) -> EndPlace:
    argv, environment = preloaded_command()
    return replace(on_this_machine(name), argv=tuple(argv), environment=environment)


def measure(spec: HandoffSpec) -> HandoffFigures:
    return measure_handoff(place("prefill end"), place("decode end"), spec, 60.0)


@pytest.fixture(scope="module")
def figures() -> HandoffFigures:
    return measure(SPEC)


def test_every_transport_moved_the_same_bytes_and_was_timed_in_every_round(figures: HandoffFigures) -> None:
    assert figures.bytes == ROWS * 2 * 2 * 8 * 2
    assert (figures.rounds, figures.device) == (2, "cpu")
    assert set(figures.transports) == {"handoff", "raw_socket", "base64_json"}
    for one in figures.transports.values():
        assert one.best_gb_s >= one.gb_s > 0
        assert one.sender_cpu_s_per_gb > 0


def test_the_ratios_are_those_of_the_rates(figures: HandoffFigures) -> None:
    assert figures.ratio_to_raw == pytest.approx(figures.handoff_gb_s / figures.raw_socket_gb_s)
    assert figures.handoff_gb_s == figures.transports["handoff"].gb_s
    assert figures.ratio_to_base64_json == pytest.approx(figures.handoff_gb_s / figures.base64_json_gb_s)


def test_an_unavailable_device_is_an_error_that_names_the_end() -> None:
    spec = structs.replace(SMALL, device="nonsense")
    with pytest.raises(DisaggError, match=r"prefill end: .*nonsense"):
        measure(spec)


def start(end: str, **task: object) -> subprocess.Popen[str]:
    argv, environment = preloaded_command()
    environment |= {ENVIRONMENT_VARIABLE: json.dumps({"spec": SMALL.to_json(), **task})}
    argv += ["disagg.bench.handoff", end]
    return subprocess.Popen(argv, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)


def test_only_an_end_with_the_token_is_accepted_and_others_do_no_harm() -> None:
    with start("receive", token="right", host="127.0.0.1") as receiver:
        assert receiver.stdout is not None
        port = json.loads(receiver.stdout.readline())["port"]
        with socket.create_connection(("127.0.0.1", port)) as junk:
            junk.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with start("send", token="wrong", host="127.0.0.1", port=port) as sender:
            refused, _ = sender.communicate(timeout=60)
        with start("send", token="right", host="127.0.0.1", port=port) as sender:
            figures, _ = sender.communicate(timeout=60)
        printed, _ = receiver.communicate(timeout=60)
    assert json.loads(refused)["error"]["code"] == PeerLost.__name__
    assert json.loads(figures)["rounds"] == 1
    assert (printed, receiver.returncode, sender.returncode) == ("", 0, 0)


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense", '{"token": "t", "surprise": 1}'])
def test_a_malformed_task_is_refused(text: str) -> None:
    environment = {**os.environ, ENVIRONMENT_VARIABLE: text}
    argv = [sys.executable, "-m", "disagg.bench.handoff", "receive"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert json.loads(done.stdout)["error"]["code"] == UsageError.__name__
    assert done.returncode == UsageError.exit_code and "Traceback" not in done.stderr
