"""The process of the prefill engine, from its parent's side: starts it, calls it, ends it."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy

from disagg.api.base import Contract, InvalidValue
from disagg.api.requests import KVAddress
from disagg.api.verify import PrefillCall, PrefillReady, PrefillReply
from disagg.errors import DisaggError, ModelError, ProtocolError

TIMEOUT_S = 3600.0
"""For what an engine computes for one call, its transfer included."""
END_S = 10.0
READ_BYTES = 1 << 20
T = TypeVar("T", bound=Contract)


@dataclass(frozen=True, slots=True)
class PrefillSpec:
    """A prefill engine to start. python: the interpreter of its environment; None for this one. source: a checkpoint
    folder or hub id. context: in tokens."""

    engine: str
    source: str
    context: int
    dtype: str
    device: str = "auto"
    quantization: str | None = None
    python: str | None = None

    @property
    def argv(self) -> list[str]:
        named = {"--engine": self.engine, "--context": self.context, "--dtype": self.dtype, "--device": self.device}
        named |= {} if self.quantization is None else {"--quantization": self.quantization}
        options = [str(part) for pair in named.items() for part in pair]
        return [self.python or sys.executable, "-P", "-m", "disagg.verify.prefill", self.source, *options]


class PrefillProcess:
    """Started with the constructor, ended with the `with` statement. Calls wait for their reply and raise its error."""

    def __init__(self, spec: PrefillSpec) -> None:
        """ModelError if the interpreter cannot be run."""
        package_root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH", "")]))
        self._folder = tempfile.TemporaryDirectory(prefix="disagg-verify-")
        try:
            self._process = subprocess.Popen(
                spec.argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
            )
        except OSError as error:
            self._folder.cleanup()
            raise ModelError(
                f"cannot run {spec.argv[0]}: {error.strerror}",
                "give the Python of the environment with the prefill engine: --prefill-python",
            ) from error
        self._unread = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """End the process: with its input, or by SIGKILL."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(END_S if error is None else 0.0)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()

    def ready(self) -> PrefillReady:
        """Wait until the model is loaded."""
        ready = self._receive(PrefillReady)
        _raise(ready.error)
        return ready

    def answer(self, tokens: Sequence[int], count: int) -> list[int]:
        """The first `count` tokens of the engine's own greedy answer."""
        return list(self._call(PrefillCall(call="answer", tokens=tuple(tokens), count=count)).tokens)

    def logits(self, tokens: Sequence[int], last: int, chunk_tokens: int | None = None) -> Any:
        """See PrefillEngine.logits."""
        file = str(Path(self._folder.name) / "logits.npy")
        self._call(PrefillCall(call="logits", tokens=tuple(tokens), count=last, chunk_tokens=chunk_tokens, file=file))
        return numpy.load(file)

    def send(self, tokens: Sequence[int], to: KVAddress, ticket: str, chunk_tokens: int | None) -> None:
        """Send the KV of tokens[:-1], until it is acknowledged."""
        self._call(PrefillCall(call="send", tokens=tuple(tokens), chunk_tokens=chunk_tokens, to=to, ticket=ticket))

    def _call(self, call: PrefillCall) -> PrefillReply:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(call.to_bytes() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None
        reply = self._receive(PrefillReply)
        _raise(reply.error)
        return reply

    def _receive(self, kind: type[T]) -> T:
        """The next line. ModelError if the process ends first, or writes none until TIMEOUT_S."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise ModelError(f"the prefill engine has not answered for {TIMEOUT_S:g} s", "use a shorter prompt")
                data = os.read(self._process.stdout.fileno(), READ_BYTES)
                if not data:
                    raise self._ended()
                self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            return kind.from_bytes(line)
        except InvalidValue as error:
            raise ProtocolError(
                f"the prefill engine's process wrote a malformed {kind.__name__}: {error}",
                "both environments need the same version of disagg",
            ) from None

    def _ended(self) -> ModelError:
        code = self._process.wait()
        return ModelError(f"the prefill engine's process has ended with code {code}", "its last output says why")


def _raise(error: dict[str, str] | None) -> None:
    if error is not None:
        raise DisaggError.from_json(dict(error))
