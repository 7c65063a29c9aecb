"""The names of threads, as the system shows them."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

NAME_BYTES = 15
_NUMBER = re.compile(r"_\d+$")


def name_threads_in_the_system() -> None:
    """From now on each thread that Python starts in this process has its name in the system, too, as from Python 3.14
    on by itself. Threads that native code starts inherit the name of the thread that starts them. Linux."""
    run = threading.Thread.run

    def named(self: threading.Thread) -> None:
        with suppress(OSError):  # no descriptor is left
            Path("/proc/thread-self/comm").write_bytes(self.name.encode()[:NAME_BYTES])
        run(self)

    threading.Thread.run = named  # type: ignore[method-assign]  # of every thread


def threads_by_name(pid: int) -> Mapping[str, int]:
    """How many threads a process has of each name; those of a pool have one name."""
    found: Counter[str] = Counter()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            found[_NUMBER.sub("", (task / "comm").read_text().strip())] += 1
    return found
