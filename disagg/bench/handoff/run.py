"""The rounds: every transport in every round, one after the other. The first round is a warm-up and is not counted.

Clock: the sender's, from before the first byte until the receiver's message that every tensor is ready has arrived
(half a round trip more than the transfer itself).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import xxhash

from disagg.api.handoff import HandoffFigures, TransportFigures
from disagg.bench.handoff.channel import Connected, Digest, MessageChannel, Next, Ready, Received
from disagg.bench.handoff.transports import (
    BareReceiver,
    BareSender,
    HandoffReceiver,
    HandoffSender,
    JSONReceiver,
    JSONSender,
    RandomKV,
    Receiver,
    ReceiverOffer,
    Sender,
)
from disagg.engines.synthetic import SyntheticKV
from disagg.errors import IntegrityError

RECEIVERS: Final[Mapping[str, Callable[[RandomKV, str], Receiver]]] = {
    "handoff": HandoffReceiver,
    "raw_socket": BareReceiver,
    "base64_json": JSONReceiver,
}
SENDERS: Final[Mapping[str, Callable[[RandomKV, SyntheticKV], Sender]]] = {
    "handoff": HandoffSender,
    "raw_socket": BareSender,
    "base64_json": JSONSender,
}


class Round(NamedTuple):
    """One transfer by one transport, in seconds. cpu: of the process."""

    wall: float
    sender_cpu: float
    receiver_cpu: float


def receive(channel: MessageChannel, shape: RandomKV, host: str, rounds: int) -> None:
    """The decode host's part."""
    receivers = [make(shape, host) for make in RECEIVERS.values()]
    try:
        for _ in range(rounds + 1):
            for receiver in receivers:
                _receive_once(channel, receiver)
    finally:
        for receiver in receivers:
            receiver.close()


def _receive_once(channel: MessageChannel, receiver: Receiver) -> None:
    channel.send(receiver.offer())
    channel.receive(Connected)
    receiver.accept()
    cpu = time.process_time()
    channel.send(Ready())
    tensors = receiver.receive()
    channel.send(Received(time.process_time() - cpu))
    channel.send(Digest(_digest(tensors)))
    _overwrite(tensors)
    channel.receive(Next)


def send(channel: MessageChannel, shape: RandomKV, device: str, rounds: int) -> HandoffFigures:
    """The prefill host's part."""
    source = SyntheticKV(shape.layout, shape.tokens, device)
    digest = _digest(source.flat())
    senders = {name: make(shape, source) for name, make in SENDERS.items()}
    measured: dict[str, list[Round]] = {name: [] for name in senders}
    try:
        for number in range(rounds + 1):
            for name, sender in senders.items():
                one = _send_once(channel, sender, digest)
                if number:
                    measured[name].append(one)
    finally:
        for sender in senders.values():
            sender.close()
    return _figures(source.device, shape, measured)


def _send_once(channel: MessageChannel, sender: Sender, digest: str) -> Round:
    sender.prepare(channel.receive(ReceiverOffer))
    channel.send(Connected())
    channel.receive(Ready)
    cpu, began = time.process_time(), time.perf_counter()
    sender.send()
    received = channel.receive(Received)
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    received_digest = channel.receive(Digest).digest
    channel.send(Next())
    if received_digest != digest:
        raise IntegrityError("the KV that is ready is not the KV that was sent", "test the memory of both hosts")
    return Round(wall, cpu, received.cpu_s)


def _figures(device: str, shape: RandomKV, measured: Mapping[str, Sequence[Round]]) -> HandoffFigures:
    gigabytes = shape.nbytes / 1e9
    transports = {
        name: TransportFigures(
            gb_s=gigabytes / statistics.median(one.wall for one in rounds),
            best_gb_s=gigabytes / min(one.wall for one in rounds),
            sender_cpu_s_per_gb=statistics.median(one.sender_cpu for one in rounds) / gigabytes,
            receiver_cpu_s_per_gb=statistics.median(one.receiver_cpu for one in rounds) / gigabytes,
        )
        for name, rounds in measured.items()
    }
    handoff, raw, base64_json = (transports[name].gb_s for name in ("handoff", "raw_socket", "base64_json"))
    return HandoffFigures(
        device=device,
        bytes=shape.nbytes,
        rounds=len(measured["handoff"]),
        handoff_gb_s=handoff,
        raw_socket_gb_s=raw,
        base64_json_gb_s=base64_json,
        ratio_to_raw=handoff / raw,
        ratio_to_base64_json=handoff / base64_json,
        transports=transports,
    )


def _overwrite(tensors: Sequence[Any]) -> None:
    """Overwrite the memory, which the next round may reuse: bytes of this round must not pass for bytes of that one."""
    for tensor in tensors:
        if tensor.flags.writeable:
            tensor[:] = 255


def _digest(tensors: Sequence[Any]) -> str:
    hashed = xxhash.xxh3_128()
    for tensor in tensors:
        hashed.update(tensor)
    return hashed.hexdigest()
