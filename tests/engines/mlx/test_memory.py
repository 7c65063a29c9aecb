from __future__ import annotations

import platform
import subprocess
import sys

_PROGRAM = """
from pathlib import Path

import mlx.core as mx

from disagg.engines.mlx.memory import release_memory, trim_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

arrays = [mx.ones((100, 256)) for _ in range(800)]
for array in arrays:
    mx.eval(array)
del array, arrays[::2]  # 40 MB in holes of 100 KB
release_memory()
before = resident()
trim_memory()
print(before - resident())
"""


def test_memory_that_malloc_keeps_between_blocks_in_use_is_returned_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=300)

    if platform.libc_ver()[0] == "glibc":
        assert int(done.stdout) > 20e6
