from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from disagg.config import EngineOptions
from disagg.servers.__main__ import prepare_environment

_PROGRAM = """
import ctypes, sys, threading
from disagg.servers.__main__ import limit_arenas

if sys.argv[1] == "limited":
    limit_arenas()
barrier = threading.Barrier(9)

def allocate():
    kept = [bytes(4000) for _ in range(1000)]
    barrier.wait()
    barrier.wait()

for _ in range(8):
    threading.Thread(target=allocate).start()
barrier.wait()
libc = ctypes.CDLL(None)
if hasattr(libc, "malloc_info"):
    libc.fdopen.restype = ctypes.c_void_p
    out = ctypes.c_void_p(libc.fdopen(1, b"w"))
    libc.malloc_info(0, out)
    libc.fflush(out)
barrier.wait()
"""


@pytest.mark.parametrize(("how", "few"), [("limited", True), ("unlimited", False)])
def test_the_threads_of_a_server_share_two_arenas_of_malloc(how: str, few: bool) -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM, how], capture_output=True, text=True, check=True, timeout=60)
    arenas = done.stdout.count("<heap nr=")
    if platform.libc_ver()[0] == "glibc":
        assert (1 <= arenas <= 2) is few, done.stdout
    else:
        assert arenas == 0


@pytest.mark.parametrize(
    ("engine", "kept", "expected"),
    [
        ("transformers", None, "expandable_segments:True"),
        ("transformers", "max_split_size_mb:64", "max_split_size_mb:64"),
        ("vllm", None, None),
    ],
)
def test_the_memory_of_a_cuda_device_grows_in_place_where_the_engine_allows_it_and_nobody_says_otherwise(
    engine: str, kept: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {} if kept is None else {"PYTORCH_CUDA_ALLOC_CONF": kept})
    prepare_environment(EngineOptions(engine, threads=1))
    assert os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == expected
    assert os.environ["OMP_NUM_THREADS"] == "1"
