"""Measures a link between two hosts. Standard library only: it runs there, before anything is deployed.

    receive ADDRESS SECONDS            listens, prints {"port"}, takes one connection, prints what it got
    send ADDRESS PORT SECONDS BYTES    sends until either is reached, prints what arrived

$DISAGG_LINK_TOKEN is the one-time secret that the sender must show. Every wait is bounded. Exit code 3 with a JSON
line {"errno", "error", "stage"} where the network fails.
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
        say(port=listener.getsockname()[1])
        deadline = time.monotonic() + seconds
        while True:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            connection, peer = listener.accept()
            with connection:
                connection.settimeout(PATIENCE_S)
                if admitted(connection, token):
                    count, took = take(connection, deadline)
                    connection.sendall(COUNTED.pack(count, took))
                    say(bytes=count, seconds=took, peer=peer[0])
                    return


def admitted(connection: socket.socket, token: bytes) -> bool:
    shown = b""
    try:
        while len(shown) < len(token):
            data = connection.recv(len(token) - len(shown))
            if not data:
                return False
            shown += data
        if not hmac.compare_digest(shown, token):
            return False
        connection.sendall(b"+")
        return True
    except OSError:
        return False


def take(connection: socket.socket, deadline: float) -> tuple[int, float]:
    """Bytes and seconds between the first of them and the last."""
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
            raise ConnectionAbortedError("the receiver does not take this sender")
        stop = time.monotonic() + seconds
        while sent < limit and time.monotonic() < stop:
            connection.sendall(piece)
            sent += len(piece)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(PATIENCE_S + 4 * seconds)  # what is still in the buffers of a slow link
        answer = b""
        while len(answer) < COUNTED.size:
            data = connection.recv(COUNTED.size - len(answer))
            if not data:
                raise ConnectionResetError("the receiver went away")
            answer += data
        count, took = COUNTED.unpack(answer)
        say(bytes=count, seconds=took, latency=latency, **names)


def say(**fields: object) -> None:
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
        say(errno=error.errno, error="timed out" if late else error.strerror or str(error), timeout=late)
        sys.exit(3)


main(sys.argv[1:])
