"""PrefillEngine on PyTorch and transformers: emits KV layer by layer while it is computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from disagg.api.names import AS_IS, WireForm
from disagg.api.sampling import Sampling
from disagg.config import EngineOptions
from disagg.engines.base import EngineInfo, PrefillTiming, Token
from disagg.engines.model import checkpoint, preflight
from disagg.engines.model.text import HFTokenizer
from disagg.engines.transformers.cache import OnRows, PreallocatedCache
from disagg.engines.transformers.emit import RowEmitter
from disagg.engines.transformers.load import choose_device, load_model, weight_bytes
from disagg.engines.transformers.profile import measure
from disagg.engines.transformers.sampling import Sampler
from disagg.errors import Cancelled, ModelError
from disagg.kv.blocks import Block


def _never() -> bool:
    return False


class TransformersPrefillEngine:
    """A PrefillEngine. Calls come from one thread at a time."""

    def __init__(self, source: str | Path, context: int, options: EngineOptions) -> None:
        """Load the model in folder (or hub id) `source` to serve `context` tokens. ModelError if that fails,
        PreflightRefused if transformers does not compute what the checkpoint describes."""
        path = checkpoint.resolve(source)
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        self.tokenizer = HFTokenizer.load(path)
        reference = checkpoint.reference_profile(path, context, self.tokenizer)
        self._device = choose_device(options.device)
        self._model = load_model(path, options, self._device)
        self._chunk_tokens = options.chunk_tokens
        self._layout = checkpoint.layout(reference, options.dtype)
        actual = measure(self._model, reference)
        findings = preflight.compare(reference, actual)
        preflight.require(findings)
        self.info = EngineInfo(
            backend=f"transformers/{self._device.type}",
            versions={"transformers": transformers.__version__, "torch": str(torch.__version__)},
            profile=actual,
            layout=self._layout,
            fingerprint=checkpoint.fingerprint(reference),
            preflight=findings,
            memory_bytes=weight_bytes(self._model),
            eos_ids=reference.eos_ids,
        )

    def warm_up(self) -> None:
        """See PrefillEngine."""
        for _ in self.generate([0] * min(64, self.info.profile.context - 2), Sampling(max_tokens=2, ignore_eos=True)):
            pass

    def prefill(
        self,
        tokens: Sequence[int],
        emit: Callable[[Block], None],
        *,
        cancelled: Callable[[], bool] = _never,
        chunk_tokens: int | None = None,
        wire: WireForm = AS_IS,
    ) -> PrefillTiming:
        """See PrefillEngine."""
        started = time.monotonic()
        on_rows = RowEmitter(self._layout, len(tokens), self._device, emit, wire)
        cache = self._cache(len(tokens), chunk_tokens, on_rows)
        self._read(tokens, cache, cancelled, chunk_tokens)
        self._finish_compute()
        return PrefillTiming(started, time.monotonic(), len(tokens))

    def generate(
        self, tokens: Sequence[int], sampling: Sampling, *, cancelled: Callable[[], bool] = _never
    ) -> Iterator[Token]:
        """See PrefillEngine."""
        cache = self._cache(len(tokens) + sampling.max_tokens)
        self._read(tokens[:-1], cache, cancelled)
        sampler = Sampler(sampling, tokens)
        last = tokens[-1]
        for left in range(sampling.max_tokens - 1, -1, -1):
            if cancelled():
                raise Cancelled("the request was cancelled while it was decoded")
            token = sampler.next(self._logits([last], cache)[0])
            if token.id in self.info.eos_ids and not sampling.ignore_eos:
                yield replace(token, finish="stop")
                return
            yield token if left else replace(token, finish="length")
            last = token.id

    def logits(self, tokens: Sequence[int], last: int) -> list[list[float]]:
        """See PrefillEngine."""
        cache = self._cache(len(tokens))
        head = len(tokens) - last
        self._read(tokens[:head], cache, _never)
        rows: list[list[float]] = []
        for start in range(head, len(tokens), self._chunk_tokens):
            rows.extend(self._logits(tokens[start : start + self._chunk_tokens], cache).float().tolist())
        return rows

    def _cache(self, total: int, chunk_tokens: int | None = None, on_rows: OnRows | None = None) -> PreallocatedCache:
        chunk = min(chunk_tokens or self._chunk_tokens, total)
        try:
            return PreallocatedCache(self._layout, total, chunk, self._device, on_rows)
        except torch.OutOfMemoryError as error:
            raise _out_of_memory(total, error) from error

    def _read(
        self,
        tokens: Sequence[int],
        cache: PreallocatedCache,
        cancelled: Callable[[], bool],
        chunk_tokens: int | None = None,
    ) -> None:
        """Run tokens through the layers, chunk by chunk, without the output head."""
        step = chunk_tokens or self._chunk_tokens
        for start in range(0, len(tokens), step):
            if cancelled():
                raise Cancelled(f"the request was cancelled after {start} of {len(tokens)} prompt tokens")
            self._run(self._model.base_model, tokens[start : start + step], cache)

    def _logits(self, tokens: Sequence[int], cache: PreallocatedCache) -> torch.Tensor:
        """Logits [len(tokens), vocab] after each of the next tokens."""
        logits: torch.Tensor = self._run(self._model, tokens, cache).logits[0]
        return logits

    def _run(self, module: Any, tokens: Sequence[int], cache: PreallocatedCache) -> Any:
        ids = torch.tensor([list(tokens)], dtype=torch.long, device=self._device)
        try:
            with torch.inference_mode():
                return module(input_ids=ids, past_key_values=cache, use_cache=True)
        except torch.OutOfMemoryError as error:
            raise _out_of_memory(cache.get_seq_length() + len(tokens), error) from error

    def _finish_compute(self) -> None:
        """Wait for the device: kernels run asynchronously, and `ended` must not be the time at which they were
        queued."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif self._device.type == "mps":
            torch.mps.synchronize()


def _out_of_memory(tokens: int, error: Exception) -> ModelError:
    return ModelError(
        f"not enough memory for {tokens} tokens: {str(error).splitlines()[0]}",
        "lower chunk_tokens, or the model's context",
    )
