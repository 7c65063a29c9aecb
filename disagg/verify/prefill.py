"""A prefill engine for `disagg verify`, in a process and an environment of its own, which its parent starts, calls and
ends.

The process, `python -m disagg.verify.prefill`, loads the model, writes a PrefillReady, then answers each PrefillCall
that it reads from standard input. It ends with its input. Whatever else is printed in it goes to standard error.
"""

from __future__ import annotations

import argparse
import logging
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar, get_args

import msgspec
import numpy

from disagg import logs
from disagg.api.base import Contract, InvalidValue
from disagg.api.engines import engines_for
from disagg.api.events import TokenLogprob
from disagg.api.requests import KVAddress
from disagg.api.sampling import Sampling
from disagg.api.verify import PrefillCall, PrefillReady, PrefillReply
from disagg.config import DType, EngineOptions
from disagg.engines.base import EmittingEngine, PrefillEngine
from disagg.engines.model.reference import Reference
from disagg.engines.opening import open_prefill
from disagg.engines.process import exit_without_cleanup
from disagg.errors import DisaggError, ModelError, ProtocolError
from disagg.kv.fingerprint import token_hash
from disagg.kv.frames import Header
from disagg.servers.host.health import EngineProgress
from disagg.servers.prefill.delivery import delivery_by

TIMEOUT_S = 3600.0
"""How long an engine may compute for one call, its transfer included."""
END_S = 10.0
READ_BYTES = 1 << 20
ALTERNATIVES = 20
"""Likeliest tokens that an answer states in each place."""
NOT_IN_PARTS = "this prefill engine computes all layers of a prompt"
T = TypeVar("T", bound=Contract)
CACHE_SPARE_BYTES = 64 << 20
"""Bytes of vLLM's paged cache beside two requests of the whole context: a block of each layer may be partly filled."""


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

    def answer(self, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
        """The first `count` tokens of the engine's own greedy answer."""
        return list(self._call(PrefillCall(call="answer", tokens=tuple(tokens), count=count)).tokens)

    def logits(self, tokens: Sequence[int], last: int, chunk_tokens: int | None = None) -> Any:
        file = str(Path(self._folder.name) / "logits.npy")
        self._call(PrefillCall(call="logits", tokens=tuple(tokens), count=last, chunk_tokens=chunk_tokens, file=file))
        return numpy.load(file)

    def send(
        self, tokens: Sequence[int], to: KVAddress, ticket: str, chunk_tokens: int | None, layers: int | None = None
    ) -> None:
        """Send the KV of tokens[:-1], until it is acknowledged. layers: as of PrefillCall."""
        call = PrefillCall(call="send", tokens=tuple(tokens), chunk_tokens=chunk_tokens, to=to, ticket=ticket)
        self._call(msgspec.structs.replace(call, layers=layers))

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


def options_of(arguments: argparse.Namespace, kv_bytes: int) -> EngineOptions:
    """The engine's options: nothing is held between calls. kv_bytes: of a request of the whole context."""
    return EngineOptions(
        arguments.engine,
        dtype=arguments.dtype,
        device=arguments.device,
        quantization=arguments.quantization,
        max_held_bytes=0,
        kv_cache_memory_bytes=2 * kv_bytes + CACHE_SPARE_BYTES,
        enforce_eager=True,
    )


def perform(engine: PrefillEngine, call: PrefillCall) -> PrefillReply:
    """Compute what a call asks for. Raises what the engine and the transfer raise."""
    if call.call == "answer":
        sampling = Sampling(max_tokens=call.count, ignore_eos=True, logprobs=ALTERNATIVES)
        made = engine.generate(call.tokens, sampling)
        return PrefillReply(tokens=tuple(TokenLogprob(token.id, token.logprob, token.top) for token in made))
    if call.call == "logits":
        numpy.save(call.file, engine.logits(call.tokens, call.count, chunk_tokens=call.chunk_tokens))
    else:
        _send(engine, call)
    return PrefillReply()


def _send(engine: PrefillEngine, call: PrefillCall) -> None:
    if call.to is None:
        raise ProtocolError("a call to send KV states no address")
    count, info, layers = len(call.tokens) - 1, engine.info, call.layers
    head = info.split.head(info.layout, info.split.layers if layers is None else layers)
    header = Header(call.ticket, "verify", info.fingerprint, head, token_hash(call.tokens), count)
    if layers is not None:
        header = replace(header, chunks=True, layers=layers, hidden=info.split.hidden)
    to, deadline = (call.to.host, call.to.port), time.monotonic() + TIMEOUT_S
    progress = EngineProgress()
    engine.on_beat = progress.beat
    delivery = delivery_by(engine)(
        engine, call.tokens, to, header, deadline=deadline, salt="verify", beats=lambda: progress.beats
    )
    try:
        run = delivery.start()
        try:
            while not run.done:
                run.step(call.chunk_tokens)
            delivery.finish(run.timing, ())
        finally:
            run.close()
    finally:
        delivery.end()


def serve(engine: PrefillEngine, calls: BinaryIO, replies: BinaryIO) -> None:
    """Answer each call until the input ends. A call that fails is answered with its error."""
    for line in calls:
        try:
            reply = perform(engine, PrefillCall.from_bytes(line))
        except InvalidValue as error:
            reply = PrefillReply(error=ProtocolError(f"not a call: {error}").to_json())
        except DisaggError as error:
            reply = PrefillReply(error=error.to_json())
        _write(replies, reply)


def _write(replies: BinaryIO, value: Contract) -> None:
    replies.write(value.to_bytes() + b"\n")
    replies.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the input ends; 0, or the exit code of the error for which the engine was not loaded."""
    arguments = _parser().parse_args(argv)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # frameworks print
    logs.configure()
    logs.log.setLevel(logging.WARNING)
    try:
        layout = Reference.open(arguments.source, arguments.context).layout(arguments.dtype)
        options = options_of(arguments, layout.nbytes(arguments.context))
        engine = open_prefill(options, arguments.source, arguments.context)
    except DisaggError as error:
        _write(replies, PrefillReady(error=error.to_json()))
        return error.exit_code
    info = engine.info
    ready = PrefillReady(
        backend=info.backend,
        context=info.profile.context,
        versions=info.versions,
        preflight=info.preflight,
        split_refusal=info.split.refusal or ("" if isinstance(engine, EmittingEngine) else NOT_IN_PARTS),
    )
    _write(replies, ready)
    serve(engine, sys.stdin.buffer, replies)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m disagg.verify.prefill", description=__doc__)
    parser.add_argument("source")
    parser.add_argument("--engine", choices=[one.name for one in engines_for("prefill", loads=True)], required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--dtype", choices=get_args(DType), required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quantization", default=None)
    return parser


if __name__ == "__main__":
    exit_without_cleanup(main())
