"""The wall clock of a server jumps: a shared library before libc's, which shifts what the process reads of it. Linux.

libfaketime does so too, but also changes the waits of pthreads, with which torch hangs. This one shifts the three
functions that read the clock, by a number of seconds in a file that both processes map.
"""

from __future__ import annotations

import mmap
import subprocess
from pathlib import Path
from typing import Final

from tests.programs import need

VARIABLE: Final = "WALL_CLOCK_SHIFT"
SOURCE: Final = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *shift;

static int64_t seconds(void) {
    const char *path;
    if (!shift && (path = getenv("WALL_CLOCK_SHIFT"))) {
        int file = open(path, O_RDONLY);
        if (file < 0) return 0;
        void *mapped = mmap(0, sizeof *shift, PROT_READ, MAP_SHARED, file, 0);
        close(file);
        if (mapped != MAP_FAILED) shift = mapped;
    }
    return shift ? *shift : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*next)(clockid_t, struct timespec *);
    if (!next) next = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = next(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += seconds();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    static int (*next)(struct timeval *, void *);
    if (!next) next = dlsym(RTLD_NEXT, "gettimeofday");
    int failed = next(now, zone);
    if (!failed) now->tv_sec += seconds();
    return failed;
}

time_t time(time_t *now) {
    struct timespec read;
    clock_gettime(CLOCK_REALTIME, &read);
    if (now) *now = read.tv_sec;
    return read.tv_sec;
}
"""


def library(folder: Path) -> Path:
    """The library for LD_PRELOAD. Needs a C compiler."""
    need("cc")
    built, source = folder / "clock.so", folder / "clock.c"
    source.write_text(SOURCE)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", built, source, "-ldl"], check=True, timeout=60)
    return built


class Clock:
    """The wall clock of the process whose environment has `variables` and LD_PRELOAD."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(8))
        self.variables = {VARIABLE: str(path)}
        with path.open("r+b") as file:
            self._shift = mmap.mmap(file.fileno(), 8)

    def jump(self, seconds: int) -> None:
        """Be so many seconds fast, or slow if negative, from now on."""
        self._shift[:] = seconds.to_bytes(8, "little", signed=True)
