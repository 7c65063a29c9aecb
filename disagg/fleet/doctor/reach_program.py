"""Connects to other hosts, to find which a program on this host can reach. Standard library only; never imported.

    PLACE...   each "ADDRESS PORT", one argument

Prints one JSON object: place -> 0, or the errno with which the connection failed (-1 without one, as on a timeout).
"""

from __future__ import annotations

import json
import socket
import sys


def connect(address: str, port: int) -> int:
    try:
        socket.create_connection((address, port), timeout=3).close()
    except OSError as error:
        return error.errno or -1
    return 0


def main(places: list[str]) -> None:
    results = {}
    for place in places:
        address, _, port = place.rpartition(" ")
        results[place] = connect(address, int(port))
    sys.stdout.write(json.dumps(results) + "\n")


main(sys.argv[1:])
