"""Types of the contract that several threads use for the first time at the same moment."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, threading
from disagg.api.base import Contract

sys.setswitchinterval(1e-6)
for _ in range(100):
    fields = {f"field_{n}": "int | None" for n in range(20)}
    values = dict.fromkeys(fields)
    inner = type("Inner", (Contract,), {"__annotations__": fields, **values}, frozen=True)
    outer = type("Outer", (Contract,), {"__annotations__": {"inner": inner, **fields}, **values}, frozen=True)
    together = threading.Barrier(4)

    def read(outer=outer, together=together):
        together.wait()
        outer.from_json({"inner": {"field_1": 3}})

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_that_use_a_type_first_do_not_crash_the_process() -> None:
    """In a process of its own: msgspec's race ends it by SIGSEGV."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
