"""Work ends when the pipe that gets its output has lost its reader."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from disagg.cli.common import process
from disagg.cli.common.process import has_no_reader, while_stdout_is_read


def test_a_pipe_has_a_reader_until_its_other_end_is_closed() -> None:
    reading, writing = os.pipe()
    assert not has_no_reader(writing)
    os.close(reading)
    assert has_no_reader(writing)
    os.close(writing)
    assert not has_no_reader(None)


async def test_work_for_a_pipe_without_a_reader_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LOOK_S", 0.01)
    reading, writing = os.pipe()
    cancelled = asyncio.Event()

    async def work() -> None:
        os.close(reading)
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        async with asyncio.timeout(60):
            with pytest.raises(BrokenPipeError):
                await while_stdout_is_read(work())
    assert cancelled.is_set()


async def test_work_without_a_pipe_runs_to_its_end_and_raises_what_it_raises() -> None:
    done = asyncio.Event()

    async def work(error: Exception | None = None) -> None:
        if error:
            raise error
        done.set()

    await while_stdout_is_read(work())
    assert done.is_set()
    with pytest.raises(ValueError, match="wrong"):
        await while_stdout_is_read(work(ValueError("wrong")))
