"""benchmarks/peers/pair.py and memory.py: real bytes between two real processes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.peers import bare_socket, memory, pair
from benchmarks.peers.bare_socket import SocketReceiver, SocketSender
from benchmarks.peers.memory import Tensor

TOKENS = 16


class Damaging(SocketReceiver):
    """Changes one byte amid the last tensor."""

    def receive(self) -> Sequence[Tensor]:
        tensors = super().receive()
        tensors[-1][len(tensors[-1]) // 2] ^= 1
        return tensors


class Unwilling(SocketSender):
    def send(self) -> None:
        raise RuntimeError("not today")


def test_a_transfer_moves_every_byte_and_is_timed() -> None:
    transfer = pair.run(bare_socket.TRANSPORT, TOKENS)
    assert transfer.nbytes == TOKENS * 98304
    assert transfer.seconds > 0
    assert transfer.sender_cpu_s >= 0


def test_one_wrong_byte_fails_the_transfer() -> None:
    with pytest.raises(pair.TransferFailed, match="not the bytes sent"):
        pair.run(pair.Transport(SocketSender, Damaging, {}), TOKENS)


def test_a_failing_transfer_names_the_end_that_failed_and_its_error() -> None:
    with pytest.raises(pair.TransferFailed, match="sender: RuntimeError: not today"):
        pair.run(pair.Transport(Unwilling, SocketReceiver, {}), TOKENS)


def test_805_megabytes_are_the_kv_of_8192_tokens() -> None:
    assert memory.tokens_of(memory.DEFAULT_MB) == 8192
    assert memory.nbytes_of(8192) == 805306368
    assert memory.tokens_of(1) == memory.BLOCK_TOKENS


def test_tensors_are_in_place_once_both_ends_of_each_are() -> None:
    tensors = [np.zeros(64, np.uint8), np.zeros(64, np.uint8)]
    memory.stamp(tensors, 7)
    memory.wait_stamped(tensors, 7, timeout_s=0)
    tensors[1][-1] = 1
    with pytest.raises(TimeoutError, match="transfer 7"):
        memory.wait_stamped(tensors, 7, timeout_s=0)
