"""The turns: every way in every round, one after the other; the first round warms up and is not counted.

Clock: the sender's, from before the first byte until the receiver says that every tensor is ready (one word over the
same network: half a round trip more than the transfer itself).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import xxhash

from disagg.bench.handoff.bare_socket import BareReceiver, BareSender
from disagg.bench.handoff.control import Control
from disagg.bench.handoff.handoff import HandoffReceiver, HandoffSender
from disagg.bench.handoff.http_json import JSONReceiver, JSONSender
from disagg.bench.handoff.way import Receiver, Sender, Shape
from disagg.engines.simulated.synthetic_kv import SyntheticKV
from disagg.errors import IntegrityError

RECEIVERS: Final[Mapping[str, Callable[[Shape, str], Receiver]]] = {
    "handoff": HandoffReceiver,
    "raw_socket": BareReceiver,
    "base64_json": JSONReceiver,
}
SENDERS: Final[Mapping[str, Callable[[Shape, SyntheticKV], Sender]]] = {
    "handoff": HandoffSender,
    "raw_socket": BareSender,
    "base64_json": JSONSender,
}


def receive(control: Control, shape: Shape, host: str, rounds: int) -> None:
    """The decode host's part."""
    ways = {name: make(shape, host) for name, make in RECEIVERS.items()}
    try:
        for _ in range(rounds + 1):
            for way in ways.values():
                _receive_once(control, way)
    finally:
        for way in ways.values():
            way.close()


def _receive_once(control: Control, way: Receiver) -> None:
    control.say(**way.offer())
    control.hear()  # the sender has connected
    way.accept()
    cpu = time.process_time()
    control.say(ready=True)
    tensors = way.receive()
    control.say(cpu_s=time.process_time() - cpu)
    control.say(digest=_digest(tensors))
    _wipe(tensors)  # the next turn's memory may be the same, and its bytes are
    control.hear()


def send(control: Control, shape: Shape, device: str, rounds: int) -> dict[str, Any]:
    """The prefill host's part; the figures, per second and per GB (1e9 bytes), medians over the rounds."""
    source = SyntheticKV(shape.layout, shape.tokens, device)
    digest = _digest(source.flat())
    ways = {name: make(shape, source) for name, make in SENDERS.items()}
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    try:
        for number in range(rounds + 1):
            for name, way in ways.items():
                turn = _send_once(control, way, digest)
                if number:
                    turns[name].append(turn)
    finally:
        for way in ways.values():
            way.close()
    return {"device": source.device, **_figures(shape, turns)}


def _send_once(control: Control, way: Sender, digest: str) -> dict[str, float]:
    way.prepare(control.hear())
    control.say(connected=True)
    control.hear()
    cpu, began = time.process_time(), time.perf_counter()
    way.send()
    receiver_cpu = float(control.hear()["cpu_s"])
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    arrived = control.hear()["digest"]
    control.say(next=True)
    if arrived != digest:
        raise IntegrityError("the KV that is ready is not the KV that was sent", "test the memory of both hosts")
    return {"seconds": seconds, "sender_cpu_s": cpu, "receiver_cpu_s": receiver_cpu}


def _figures(shape: Shape, turns: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    gigabytes = shape.nbytes / 1e9
    ways = {}
    for name, taken in turns.items():
        ways[name] = {
            "gb_s": gigabytes / statistics.median(turn["seconds"] for turn in taken),
            "best_gb_s": gigabytes / min(turn["seconds"] for turn in taken),
            "sender_cpu_s_per_gb": statistics.median(turn["sender_cpu_s"] for turn in taken) / gigabytes,
            "receiver_cpu_s_per_gb": statistics.median(turn["receiver_cpu_s"] for turn in taken) / gigabytes,
        }
    handoff = ways["handoff"]["gb_s"]
    return {
        "bytes": shape.nbytes,
        "rounds": len(turns["handoff"]),
        "handoff_gb_s": handoff,
        "raw_socket_gb_s": ways["raw_socket"]["gb_s"],
        "base64_json_gb_s": ways["base64_json"]["gb_s"],
        "ratio_to_raw": handoff / ways["raw_socket"]["gb_s"],
        "ratio_to_base64_json": handoff / ways["base64_json"]["gb_s"],
        "ways": ways,
    }


def _wipe(tensors: Sequence[Any]) -> None:
    """So that bytes that never came are not found in the place of those that came before."""
    for tensor in tensors:
        if tensor.flags.writeable:
            tensor[:] = 255


def _digest(tensors: Sequence[Any]) -> str:
    hashed = xxhash.xxh3_128()
    for tensor in tensors:
        hashed.update(tensor)
    return hashed.hexdigest()
