"""How fast the hand-off moves KV on this machine's loopback, beside a bare socket in the same run.

    python benchmarks/handoff_smoke.py [--mb 512] [--rounds 5] [--first-chunk 0.5]

Two processes: a receiver (KVServer) and a sender (Transfer), bf16, 48 layers, 4 heads x 128, blocks of 2048 tokens.
The bare socket is sendall(memoryview) -> recv_into(one touched buffer), 1 MiB a call, same bytes, no digest.
The sender waits --first-chunk seconds before its first block, as a prefill does that computes its first chunk: the
receiver uses that time to touch its buffers. Rounds alternate. Clock: the sender's, from just before the first block
to the acknowledgement. GB = 1e9 bytes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import socket
import statistics
import sys
import time
from multiprocessing.connection import Connection

import numpy

from disagg.errors import DisaggError
from disagg.kv.blocks import KVBlock
from disagg.kv.fingerprint import Fingerprint, token_hash
from disagg.kv.frames import Header
from disagg.kv.layout import LayerLayout, Layout
from disagg.kv.receive import KVServer
from disagg.kv.send import Transfer
from disagg.kv.tickets import Expected, Result, Tickets

LAYOUT = Layout(tuple(LayerLayout("full", kv_heads=4, key_dim=128, value_dim=128) for _ in range(48)), "bfloat16")
FINGERPRINT = Fingerprint("benchmark", 1, "none", "none", "none", "none")
CHUNK_TOKENS = 2048
CALL_BYTES = 1 << 20
TIMEOUT_S = 60.0


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--mb", type=int, default=512, help="megabytes per round")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--first-chunk", type=float, default=0.5, help="seconds before the first block")
    args = options.parse_args()
    tokens = max(CHUNK_TOKENS, args.mb * 1_000_000 // LAYOUT.nbytes(1) // CHUNK_TOKENS * CHUNK_TOKENS)
    here, there = multiprocessing.get_context("spawn").Pipe()
    receiver = multiprocessing.get_context("spawn").Process(target=receive, args=(there, tokens, args.rounds))
    receiver.start()
    there.close()
    blocks = make_blocks(tokens)
    bare, handoff = [], []
    for _ in range(args.rounds):
        bare.append(send_bare(here.recv(), blocks))
        handoff.append(send_handoff(here.recv(), blocks, tokens, args.first_chunk))
    receiver.join(TIMEOUT_S)
    nbytes = LAYOUT.nbytes(tokens)
    print(f"{nbytes / 1e6:.0f} MB, {tokens} tokens, {args.rounds} rounds (median, best)")
    for name, seconds in (("bare socket", bare), ("hand-off", handoff)):
        print(f"{name:12} {nbytes / statistics.median(seconds) / 1e9:6.2f} {nbytes / min(seconds) / 1e9:6.2f} GB/s")
    print(f"{'ratio':12} {statistics.median(bare) / statistics.median(handoff):6.2f} {min(bare) / min(handoff):6.2f}")


def make_blocks(tokens: int) -> list[KVBlock]:
    size = CHUNK_TOKENS * 128 * LAYOUT.itemsize
    random = numpy.random.default_rng(0)
    heads = [random.integers(0, 256, size, numpy.uint8).data for _ in range(8 * len(LAYOUT.layers))]
    return [
        KVBlock(
            layer, start, start + CHUNK_TOKENS, heads[8 * layer : 8 * layer + 4], heads[8 * layer + 4 : 8 * layer + 8]
        )
        for start in range(0, tokens, CHUNK_TOKENS)
        for layer in range(len(LAYOUT.layers))
    ]


def send_bare(port: int, blocks: list[KVBlock]) -> float:
    with socket.create_connection(("127.0.0.1", port)) as sock:
        began = time.perf_counter()
        for block in blocks:
            for view in (*block.keys, *block.values):
                sock.sendall(view)
        sock.recv(1)
        return time.perf_counter() - began


def send_handoff(where: tuple[int, str], blocks: list[KVBlock], tokens: int, first_chunk_s: float) -> float:
    port, ticket = where
    header = Header(ticket, "smoke", FINGERPRINT, LAYOUT, token_hash([]), tokens)
    with Transfer.open("127.0.0.1", port, header, deadline=time.monotonic() + TIMEOUT_S) as transfer:
        time.sleep(first_chunk_s)
        began = time.perf_counter()
        for block in blocks:
            transfer.send(block)
        transfer.finish()
        return time.perf_counter() - began


def receive(parent: Connection, tokens: int, rounds: int) -> None:
    nbytes = LAYOUT.nbytes(tokens)
    tickets = Tickets(max_kv_bytes=nbytes)
    buffer = memoryview(bytearray(nbytes))
    with KVServer("127.0.0.1", 0, tickets) as server:
        for _ in range(rounds):
            receive_bare(parent, buffer)
            receive_handoff(parent, server, tickets, tokens)


def receive_bare(parent: Connection, buffer: memoryview) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        parent.send(listener.getsockname()[1])
        sock, _ = listener.accept()
        with sock:
            got = 0
            while got < len(buffer):
                got += sock.recv_into(buffer[got : got + CALL_BYTES])
            sock.sendall(b"k")


def receive_handoff(parent: Connection, server: KVServer, tickets: Tickets, tokens: int) -> None:
    arrived: queue.Queue[Result] = queue.Queue()
    expected = Expected("smoke", LAYOUT, FINGERPRINT, token_hash([]), tokens)
    slot = tickets.issue(expected, arrived.put, deadline=time.monotonic() + TIMEOUT_S)
    parent.send((server.port, slot.ticket))
    result = arrived.get(timeout=TIMEOUT_S)
    if isinstance(result, DisaggError):
        sys.exit(f"the hand-off failed: {result}")
    result.release()


if __name__ == "__main__":
    main()
