"""PrefillEngine on PyTorch and transformers: emits KV layer by layer while it is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers

from disagg.api.names import AS_IS, WireForm
from disagg.api.sampling import Sampling
from disagg.config import EngineOptions
from disagg.engines.base import EngineInfo, PrefillEngine, Token
from disagg.engines.model import checkpoint, preflight
from disagg.engines.model.text import HFTokenizer
from disagg.engines.transformers.cache import OnRows
from disagg.engines.transformers.emit import RowEmitter
from disagg.engines.transformers.forward import Forward
from disagg.engines.transformers.load import choose_device, load_model, weight_bytes
from disagg.engines.transformers.profile import measure
from disagg.engines.transformers.runs import AnswerRun, PromptRun
from disagg.kv.blocks import Block


class TransformersPrefillEngine(PrefillEngine):
    """A PrefillEngine."""

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
        self._forward = Forward(self._model, self._layout, self._device)
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

    def start(
        self,
        tokens: Sequence[int],
        emit: Callable[[Block], None],
        *,
        start: int = 0,
        wire: WireForm = AS_IS,
        salt: str = "",
        chunk_tokens: int | None = None,
    ) -> PromptRun:
        """See PrefillEngine."""
        on_rows = RowEmitter(self._layout, len(tokens), self._device, emit, wire=wire, start=start)
        return self._prompt(tokens, len(tokens), chunk_tokens or self._chunk_tokens, on_rows)

    def start_answer(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        emit: Callable[[Token], None],
        *,
        answered: int = 0,
        salt: str = "",
    ) -> AnswerRun:
        """See PrefillEngine."""
        prompt = self._prompt(tokens[:-1], len(tokens) + sampling.max_tokens - answered, self._chunk_tokens)
        eos_ids = self.info.eos_ids
        return AnswerRun(self._forward, prompt, tokens, sampling, emit, eos_ids=eos_ids, answered=answered)

    def logits(self, tokens: Sequence[int], last: int) -> list[list[float]]:
        """See PrefillEngine."""
        head = len(tokens) - last
        prompt = self._prompt(tokens[:head], len(tokens), self._chunk_tokens)
        while not prompt.done:
            prompt.step()
        rows: list[list[float]] = []
        for start in range(head, len(tokens), self._chunk_tokens):
            chunk = tokens[start : start + self._chunk_tokens]
            rows.extend(self._forward.logits(chunk, prompt.cache).float().tolist())
        return rows

    def _prompt(self, tokens: Sequence[int], total: int, chunk: int, on_rows: OnRows | None = None) -> PromptRun:
        """A run of `tokens` with a cache of `total` tokens."""

        def beat(layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
            self.on_beat()
            if on_rows is not None:
                on_rows(layer, start, keys, values)

        return PromptRun(self._forward, self._forward.cache(total, min(chunk, total), beat), tokens, chunk)
