"""`python -m tests.keeper.stand_in --config FILE --host HOST/MODEL --port N [--kv-port N]`: what a keeper sees of the
process of a model, without one. The model's name says what it does: see `BEHAVIOUR` in tests/keeper/test_processes.py.

SIGUSR1: a request begins. SIGUSR2: it ends.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import socket
import sys
import time

from disagg.api.names import KEEPER_VARIABLE
from disagg.api.status import Counters, Load, ProcessOrder, ProcessReport


class StandIn:
    def __init__(self, connection: socket.socket, model: str) -> None:
        self.connection, self.model = connection, model
        self.running = self.requests = self.answers = 0
        self.state, self.refused, self.ends = "loading", False, False
        signal.signal(signal.SIGUSR1, lambda *_: self.begin())
        signal.signal(signal.SIGUSR2, lambda *_: self.finish())
        signal.signal(signal.SIGTERM, lambda *_: self.leave())

    def begin(self) -> None:
        self.running, self.requests = self.running + 1, self.requests + 1

    def finish(self) -> None:
        self.running -= 1

    def leave(self) -> None:
        """As a server does at its first signal."""
        self.state, self.ends = "draining", not self.running

    def run(self) -> int:
        ready_at = time.monotonic() + (3600.0 if "endless" in self.model else 0.0)
        while not (self.ends or (self.state == "draining" and not self.running)):
            if self.state == "loading" and time.monotonic() >= ready_at:
                self.state = "ok"
            self.report()
            readable, _, _ = select.select([self.connection], [], [], 0.05)
            if readable:
                data = self.connection.recv(1 << 12)
                if not data:
                    return 1
                for line in data.splitlines():
                    self.order(ProcessOrder.from_bytes(line))
        return 0

    def order(self, order: ProcessOrder) -> None:
        self.answers, self.refused = order.number, self.running > 0 and not (order.drains or order.cuts)
        self.ends = self.ends or order.cuts
        if not self.refused:
            self.state = "draining"

    def report(self) -> None:
        load = Load(status=self.state, boot_id="x", running=self.running)  # type: ignore[arg-type]
        counters = Counters(requests=self.requests)
        report = ProcessReport(load=load, counters=counters, answers=self.answers, refused=self.refused)
        self.connection.send(report.to_bytes() + b"\n")


def main() -> int:
    parser = argparse.ArgumentParser()
    for option in ("--config", "--host", "--port", "--kv-port"):
        parser.add_argument(option)
    model = parser.parse_args().host.partition("/")[2]
    if "broken" in model:
        sys.stderr.write(json.dumps({"event": "start_failed", "code": "ModelError", "message": "it is broken"}) + "\n")
        return 3
    if "crashes" in model:
        os.kill(os.getpid(), signal.SIGSEGV)
    return StandIn(socket.socket(fileno=int(os.environ[KEEPER_VARIABLE])), model).run()


if __name__ == "__main__":
    sys.exit(main())
