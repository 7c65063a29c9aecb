from __future__ import annotations

import errno
import socket
import sys

from disagg.fleet.doctor.gather import REACH
from disagg.fleet.facts.python import last_json, run_program
from disagg.fleet.machine.local import LocalMachine


def test_reached_places_are_zero_and_others_have_their_errno() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # without listen: connections are refused
        places = [f"127.0.0.1 {one.getsockname()[1]}" for one in (listener, silent)]
        machine = LocalMachine("here")
        reached = last_json(run_program(machine, sys.executable, REACH, places), machine, dict[str, int])
    assert reached == {places[0]: 0, places[1]: errno.ECONNREFUSED}
