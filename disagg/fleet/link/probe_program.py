"""Measures a link between two hosts. Standard library only: it runs on hosts before anything is deployed.

    receive ADDRESS SECONDS            listens, prints {"port"}, accepts one connection, prints what it received
    send ADDRESS PORT SECONDS BYTES    sends until either limit is reached, prints what the receiver counted

$DISAGG_LINK_TOKEN is the one-time secret that the sender presents. Every wait is bounded. Exits with code 3 and a JSON
line {"errno", "error", "timeout"} if the network fails.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import struct
import sys
import time

PIECE = 1 << 20
PATIENCE_S = 5.0
COUNTED = struct.Struct("!Qd")  # bytes, seconds


def receive(address: str, seconds: float) -> None:
    token = os.environ["DISAGG_LINK_TOKEN"].encode()
    family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind(place)
        listener.listen(4)
        print_json(port=listener.getsockname()[1])
        deadline = time.monotonic() + seconds
        while True:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            connection, peer = listener.accept()
            with connection:
                connection.settimeout(PATIENCE_S)
                if admitted(connection, token):
                    count, took = take(connection, deadline)
                    connection.sendall(COUNTED.pack(count, took))
                    print_json(bytes=count, seconds=took, peer=peer[0])
                    return


def admitted(connection: socket.socket, token: bytes) -> bool:
    presented = b""
    try:
        while len(presented) < len(token):
            data = connection.recv(len(token) - len(presented))
            if not data:
                return False
            presented += data
        if not hmac.compare_digest(presented, token):
            return False
        connection.sendall(b"+")
        return True
    except OSError:
        return False


def take(connection: socket.socket, deadline: float) -> tuple[int, float]:
    """The number of bytes, and the seconds from the first to the last."""
    buffer, count, end = bytearray(PIECE), 0, 0.0
    first: float | None = None
    while True:
        got = connection.recv_into(buffer)
        if not got:
            break
        end = time.monotonic()
        first = end if first is None else first
        count += got
        if end > deadline:
            break
    return (count, end - first) if first is not None else (0, 0.0)


def send(address: str, port: int, seconds: float, limit: int) -> None:
    piece, sent, began = os.urandom(PIECE), 0, time.monotonic()
    with socket.create_connection((address, port), timeout=PATIENCE_S) as connection:
        latency = time.monotonic() - began
        names = {"source": connection.getsockname()[0], "target": connection.getpeername()[0]}
        connection.sendall(os.environ["DISAGG_LINK_TOKEN"].encode())
        if connection.recv(1) != b"+":
            raise ConnectionAbortedError("the receiver refused this sender's token")
        stop = time.monotonic() + seconds
        while sent < limit and time.monotonic() < stop:
            connection.sendall(piece)
            sent += len(piece)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(PATIENCE_S + 4 * seconds)  # until a slow link's buffers are empty
        answer = b""
        while len(answer) < COUNTED.size:
            data = connection.recv(COUNTED.size - len(answer))
            if not data:
                raise ConnectionResetError("the receiver closed the connection")
            answer += data
        count, took = COUNTED.unpack(answer)
        print_json(bytes=count, seconds=took, latency=latency, **names)


def print_json(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main(words: list[str]) -> None:
    try:
        if words[0] == "receive":
            receive(words[1], float(words[2]))
        else:
            send(words[1], int(words[2]), float(words[3]), int(words[4]))
    except OSError as error:
        late = isinstance(error, socket.timeout)
        print_json(errno=error.errno, error="timed out" if late else error.strerror or str(error), timeout=late)
        sys.exit(3)


main(sys.argv[1:])
