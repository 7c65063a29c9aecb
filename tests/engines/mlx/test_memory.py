from __future__ import annotations

import platform
import subprocess
import sys

_PROGRAM = """
from pathlib import Path

import mlx.core as mx

from disagg.engines.mlx.batching.batch import release_memory, trim_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

large, small = [], []
for _ in range(400):  # 40 MB, with something between that stays
    large.append(mx.ones((100, 256)))
    small.append(mx.ones((8,)))
    mx.eval(large[-1], small[-1])
large.clear()
release_memory()
before = resident()
trim_memory()
print(before - resident())
"""


def test_memory_that_malloc_keeps_between_blocks_in_use_is_returned_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=300)

    if platform.libc_ver()[0] == "glibc":
        assert int(done.stdout) > 20e6
