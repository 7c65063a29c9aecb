"""DecodeEngine on mlx-lm: continuous batching over received or locally computed KV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy
import numpy.typing
from mlx_lm.models.cache import make_prompt_cache

from disagg.api.sampling import Sampling
from disagg.config import EngineOptions
from disagg.engines.base import DecodeRequest, DecodeTiming, EngineInfo
from disagg.engines.base.audit import UNBOUNDED
from disagg.engines.base.decode import Collector
from disagg.engines.base.scores import scored_chunk
from disagg.engines.decoding import DecodeEngine, Job
from disagg.engines.decoding.valid import require_fitting
from disagg.engines.mlx import cache as mlx_cache
from disagg.engines.mlx import memory
from disagg.engines.mlx.groups import GroupedBatch
from disagg.engines.mlx.load import LoadedModel, prepare, require_one_thread, select_device
from disagg.engines.mlx.prefix_cache import Rows, hold, make_prefix_cache
from disagg.engines.mlx.scores import ScoringPass
from disagg.engines.mlx.span import Spans
from disagg.engines.model.architectures.base import Patch
from disagg.engines.model.architectures.patches import MLX_PATCHES
from disagg.engines.model.evidence import gather
from disagg.engines.model.prefix_cache import LayerSnapshot, PrefixCache
from disagg.engines.model.text import PromptTokenizer
from disagg.engines.process import lower_priority_of_thread
from disagg.errors import ModelError, RequestError
from disagg.kv.arena import Arenas
from disagg.kv.received import ByteRanges, ReceivedKV

_WARM_UP_PROMPT = [0] * 8
_WARM_UP_TOKENS = 4
_WARM_UP_S = 600.0  # a large model's first step on a cold disk


class MLXDecodeEngine(DecodeEngine):
    """A DecodeEngine on mlx-lm. source: a checkpoint folder or hub id. context: tokens of the longest request. patches:
    those to try.

    The constructor loads the model. It raises ModelError if that fails, and PreflightRefused if mlx-lm computes the
    model differently from its checkpoint's reference and no patch corrects it.
    """

    _backend: MLXBackend
    _batch: GroupedBatch

    def __init__(
        self, source: str | Path, context: int, options: EngineOptions, *, patches: Sequence[Patch] = MLX_PATCHES
    ) -> None:
        require_one_thread(options)
        self._chunk_tokens = options.chunk_tokens
        super().__init__(lambda: _opened(source, context, options, patches), name="mlx-decode")

    def allocate(self, nbytes: int) -> Any:
        return memory.allocate(nbytes)

    def logits(
        self, tokens: Sequence[int], last: int, kv: ReceivedKV | None = None, *, chunk_tokens: int | None = None
    ) -> numpy.typing.NDArray[numpy.float32]:
        """Runs between two steps of the batch."""
        if not 1 <= last <= len(tokens):
            raise RequestError(f"cannot return logits of the last {last} of {len(tokens)} tokens", "request 1 to all")
        if kv is not None:
            require_fitting(kv, self._info.layout, len(tokens) - last)
        chunk = chunk_tokens or self._chunk_tokens
        return self.call(lambda backend: logits_of(backend.loaded.model, list(tokens), last, kv, chunk))

    def warm_up(self) -> None:
        """One request with KV and one without, so that all kernels are compiled."""
        audits = _run_once(self)
        self.give_up_held(self.held_bytes)  # the KV of its requests was made of zeros
        evidence = gather(self.tokenizer, self._info.layout, self._info.profile.context, self._likeliest)
        self._info = replace(self._info, evidence=evidence, audits=audits)

    def _likeliest(self, tokens: Sequence[int], last: int) -> Sequence[int]:
        return [int(token) for token in self.logits(tokens, last).argmax(-1)]


@dataclass(slots=True)
class MLXBackend:
    """The Backend of this engine: the loaded model, and the stream of the thread that computes with it."""

    loaded: LoadedModel
    spans: Spans
    info: EngineInfo
    tokenizer: PromptTokenizer
    held: PrefixCache[Rows, LayerSnapshot]
    options: EngineOptions
    stream: Any

    def new_batch(self) -> GroupedBatch:
        return GroupedBatch(self.loaded, self.spans, self.info, self.options, self.stream)

    def scoring(self, tokens: Sequence[int], top: int) -> ScoringPass:
        chunk = scored_chunk(self.options.chunk_tokens, self.info.profile.vocab_size)
        return ScoringPass(self.loaded.model, tokens, top, chunk)

    def hold(self, job: Job, tokens: list[int], caches: Any) -> None:
        hold(self.held, tokens, caches, job.request.salt, job.snapshots)

    def release_memory(self) -> None:
        memory.release_memory()

    def trim_memory(self) -> None:
        memory.trim_memory()


@contextmanager
def _opened(source: str | Path, context: int, options: EngineOptions, patches: Sequence[Patch]) -> Iterator[MLXBackend]:
    """The model, loaded on this thread, with whose stream everything on it runs."""
    device = select_device(options.device)
    if device == mx.cpu:
        lower_priority_of_thread()  # before MLX starts the threads that compute
    stream = mx.new_thread_local_stream(device)
    with mx.stream(stream):
        memory.bound_memory()
        loaded, info, tokenizer = prepare(source, options, context=context, device=device, patches=patches)
        spans = Spans(loaded.model, info)
        info = replace(info, split=spans.split)
        yield MLXBackend(
            loaded, spans, info, tokenizer, make_prefix_cache(loaded.model, options.max_kv_bytes), options, stream
        )


def logits_of(
    model: Any, tokens: list[int], last: int, kv: ReceivedKV | None, chunk_tokens: int
) -> numpy.typing.NDArray[numpy.float32]:
    """Logits [last, vocab], as DecodeEngine.logits states them. On the model's thread."""
    caches = make_prompt_cache(model) if kv is None else mlx_cache.build(model, kv)
    first = len(tokens) - last
    for start in range(first if kv else 0, first, chunk_tokens):
        model(mx.array([tokens[start : min(start + chunk_tokens, first)]]), cache=caches)
        mx.eval([cache.state for cache in caches])
    return numpy.array(model(mx.array([tokens[first:]]), cache=caches)[0].astype(mx.float32))


def _run_once(engine: DecodeEngine) -> bool:
    """Run one request with KV (zeros), which is audited, and one that computes its prompt, together in one batch.
    Returns whether the audit worked. ModelError if the requests fail or take longer than ten minutes."""
    sampling = Sampling(max_tokens=_WARM_UP_TOKENS, ignore_eos=True)
    answers = []
    for name, kv in (("handed-over", _zero_kv(engine, len(_WARM_UP_PROMPT) - 1)), ("alone", None)):
        answers.append(Collector())
        request = DecodeRequest(f"warm-up-{name}", _WARM_UP_PROMPT, sampling, kv, audit=UNBOUNDED)
        engine.submit(request, answers[-1])
    handed_over, _ = map(_ended, answers)
    return handed_over.audit is not None


def _zero_kv(engine: DecodeEngine, tokens: int) -> ReceivedKV:
    """KV of `tokens` tokens, all zeros, in the model's layout."""
    layout = engine.info.layout
    arena = Arenas(engine.allocate).acquire(ByteRanges.of(layout, tokens).nbytes)
    arena.data[:] = 0
    return ReceivedKV(layout, tokens, arena)


def _ended(answer: Collector) -> DecodeTiming:
    try:
        return answer.timing.result(_WARM_UP_S)
    except TimeoutError:
        hint = "check the host's load and memory"
        raise ModelError(f"the warm-up did not end in {_WARM_UP_S:.0f} s", hint) from None
    except Exception as error:
        raise ModelError(f"the warm-up failed: {error}") from error
