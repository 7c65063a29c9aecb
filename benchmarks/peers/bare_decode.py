"""mlx-lm's BatchGenerator alone in a process: the upper bound for any server built on it."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.peers.answers import TIMEOUT_S, Answer


class BareDecode:
    """The process. decode: run prompts together; returns the times of each one's tokens."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def decode(self, prompts: Sequence[str], tokens: int) -> list[Answer]:
        self._pipe.send((list(prompts), tokens))
        if not self._pipe.poll(TIMEOUT_S):
            raise TimeoutError(f"BatchGenerator did not answer within {TIMEOUT_S:g} s")
        answers: list[Answer] = self._pipe.recv()
        return answers


@contextmanager
def running(model: Path, environment: Mapping[str, str]) -> Iterator[BareDecode]:
    """Start the process with the model loaded, and end it on exit."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, model, dict(environment)), daemon=True)
    process.start()
    there.close()
    try:
        yield BareDecode(here)
    finally:
        here.close()
        process.join(5.0)
        process.kill()


def _serve(pipe: Connection, source: Path, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)  # before mlx is imported: its BLAS reads the number of threads once
    from mlx_lm import load

    model, tokenizer = load(str(source))[:2]
    while True:
        try:
            prompts, tokens = pipe.recv()
        except EOFError:
            return
        pipe.send(_decode(model, [tokenizer.encode(prompt) for prompt in prompts], tokens))


def _decode(model: object, prompts: list[list[int]], tokens: int) -> list[Answer]:
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(model, completion_batch_size=max(8, len(prompts)))
    sent = time.monotonic()
    uids = generator.insert(prompts, max_tokens=[tokens] * len(prompts))
    times: dict[int, list[float]] = {uid: [] for uid in uids}
    while any(len(arrived) < tokens for arrived in times.values()):
        _, responses = generator.next()
        now = time.monotonic()
        for response in responses:
            times[response.uid].append(now)
    generator.close()
    return [Answer(sent, times[uid], len(prompt), tokens) for uid, prompt in zip(uids, prompts, strict=True)]
