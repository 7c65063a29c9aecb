"""Prefill engines that lie: they send wrong KV under a right header and digest, each in one way.

LIES has them by name; a new lie is one line there. `LyingEngine` is a prefill engine that tells one, for tests in one
process. As a program (`python -m tests.hostile.peers --config hosts.toml --host NAME`) it serves a host as `python -m
disagg.servers` does, with the lie that the variable DISAGG_LIE names, or that the file has in it whose path it is.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from disagg.api.layout import Layout
from disagg.api.names import AS_IS, WireForm
from disagg.config import EngineOptions
from disagg.engines.base import PrefillRun, PrefillTiming
from disagg.engines.staging import filled_planes, head_views, plane_views
from disagg.engines.transformers.engine import TransformersPrefillEngine
from disagg.kv.blocks import Block, ChunkEnd, HiddenBlock, KVBlock, StateBlock

IDLES: Final = "idles"
"""Instead of a lie: the engine makes no progress, while its server sends idle frames, until the file is gone."""
ONCE: Final = " once"
"""Ends the name of a lie in a file for the first engine that reads it; the file is renamed, to one with this ending."""
LIE_VARIABLE: Final = "DISAGG_LIE"
EACH: Final = "each"
EVERY_VARIABLE: Final = "DISAGG_LIES_EVERY"
KEPT: Final = 9
"""Tokens at the end of another prompt that are those of the right one."""

Rows = Any  # a torch.Tensor, [heads, rows, dim] or a state
Change = Callable[[Rows], Rows]


@dataclass(frozen=True, slots=True)
class KV:
    """The KV of one prompt as it is sent: per layer keys and values, and the tensors of its state. hidden: the hidden
    states that a head sends beside it, [tokens, elements]."""

    rows: tuple[tuple[Rows, Rows], ...]
    states: tuple[tuple[Rows, ...], ...]
    hidden: Rows | None = None

    def each(self, change: Change, *layers: int) -> KV:
        """With this change of keys and values, in these layers or in all."""
        changed = (
            (change(keys), change(values)) if keys.numel() and (not layers or index in layers) else (keys, values)
            for index, (keys, values) in enumerate(self.rows)
        )
        return replace(self, rows=tuple(changed))

    def layer(self, index: int, other: KV) -> KV:
        """With one layer of other KV."""
        rows, states = list(self.rows), list(self.states)
        rows[index], states[index] = other.rows[index], other.states[index]
        return replace(self, rows=tuple(rows), states=tuple(states))


@dataclass(frozen=True, slots=True)
class Scene:
    """What a lie is made of. tokens: those whose KV is sent, without the last of the prompt. honest: their KV.
    compute: tokens -> KV, by the honest engine, or by one with another checkpoint."""

    tokens: Sequence[int]
    honest: KV
    compute: Callable[[Sequence[int], str], KV]
    vocabulary: int

    def of_other_prompt(self, keep: int = 0) -> KV:
        """The KV of another prompt of this length, which ends with the same `keep` tokens."""
        chance = random.Random(len(self.tokens))
        other = [chance.randrange(8, self.vocabulary) for _ in self.tokens]
        return self.compute([*other[: len(other) - keep], *self.tokens[len(other) - keep :]] if keep else other, "")

    def by(self, checkpoint: str) -> KV:
        """The KV of this prompt, computed with another checkpoint: see CHECKPOINTS."""
        return self.compute(self.tokens, checkpoint)

    def hidden(self, change: Change) -> KV:
        """Honest KV, with this change of the hidden states."""
        assert self.honest.hidden is not None, "all layers are computed by the liar"
        return replace(self.honest, hidden=change(self.honest.hidden))

    @property
    def middle(self) -> int:
        """A layer in the middle that keeps rows."""
        having = [index for index, (keys, _) in enumerate(self.honest.rows) if keys.numel()]
        return having[len(having) // 2]


def _noisy(rows: Rows) -> Rows:
    noise = torch.randn(rows.shape, generator=torch.Generator().manual_seed(rows.numel()))
    return (rows + 0.01 * rows.float().std() * noise).to(rows.dtype)


def _without(rows: Rows, begin: int, end: int) -> Rows:
    rows = rows.clone()
    rows[:, begin:end] = 0
    return rows


LIES: Final[Mapping[str, Callable[[Scene], KV]]] = {
    "zeros": lambda scene: scene.honest.each(torch.zeros_like),
    "NaN": lambda scene: scene.honest.each(lambda rows: rows * float("nan")),
    "one layer of another prompt": lambda scene: scene.honest.layer(scene.middle, scene.of_other_prompt()),
    "one head permuted": lambda scene: scene.honest.each(
        lambda rows: rows.roll(1, 0 if len(rows) > 1 else 2), scene.middle
    ),
    "rope of another base": lambda scene: scene.by("rope"),
    "1 % noise": lambda scene: scene.honest.each(_noisy),
    "rows shifted by one": lambda scene: scene.honest.each(lambda rows: rows.roll(1, 1)),
    "weights of another checkpoint": lambda scene: scene.by("weights"),
    "weights 1 % off": lambda scene: scene.by("weights 1 % off"),
    "another prompt": lambda scene: scene.of_other_prompt(),
    "another prompt that ends alike": lambda scene: scene.of_other_prompt(KEPT),
    "20 early rows zero": lambda scene: scene.honest.each(lambda rows: _without(rows, 10, 30)),
}
"""By name: the KV that is sent. Each row of a sliding layer counts from the first that is sent."""

HIDDEN_LIES: Final[Mapping[str, Callable[[Scene], KV]]] = {
    "hidden states zero": lambda scene: scene.hidden(torch.zeros_like),
    "hidden states of another prompt": lambda scene: replace(scene.honest, hidden=scene.of_other_prompt().hidden),
    "hidden states shifted by one": lambda scene: scene.hidden(lambda rows: rows.roll(1, 0)),
    "hidden states with 1 % noise": lambda scene: scene.hidden(_noisy),
}
"""By name: the same of a head, whose KV is right."""


def _other_rope(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config.get("text_config") or {}
    for part in (config, text, *(one.get("rope_parameters") or {} for one in (config, text))):
        if "rope_theta" in part:
            part["rope_theta"] *= 4
    path.write_text(json.dumps(config))


def _other_weights(folder: Path, share: float) -> None:
    path = folder / "model.safetensors"
    generator = torch.Generator().manual_seed(1)

    def changed(weight: Rows) -> Rows:
        if not weight.is_floating_point() or weight.dim() < 2:
            return weight
        noise = torch.randn(weight.shape, generator=generator)
        return (weight + share * weight.float().std() * noise).to(weight.dtype)

    weights = {name: changed(weight) for name, weight in sorted(load_file(path).items())}
    save_file(weights, path, metadata={"format": "pt"})


CHECKPOINTS: Final[Mapping[str, Callable[[Path], None]]] = {
    "rope": _other_rope,
    "weights": lambda folder: _other_weights(folder, 0.3),
    "weights 1 % off": lambda folder: _other_weights(folder, 0.01),
}
"""By name: what makes another checkpoint of a copy."""


class LyingEngine(TransformersPrefillEngine):
    """Sends the KV that a lie gives, once the whole prompt is computed. lie: its name, EACH for all in turn, empty for
    none, or the file that has the name in it now; may be changed. every: in one prompt of so many. told: how often."""

    def __init__(
        self, source: str | Path, context: int, options: EngineOptions, lie: str | Path, *, every: int = 1
    ) -> None:
        super().__init__(source, context, options)
        self.lie, self.every, self.told = lie, every, 0
        self._prompts = 0
        self._source, self._context, self._options = Path(source), context, options
        self._engine_of = cache(self._made)

    def start(  # type: ignore[override]  # a run of its own kind
        self,
        tokens: Sequence[int],
        emit: Callable[[Block], None],
        *,
        start: int = 0,
        wire: WireForm = AS_IS,
        salt: str = "",
        chunk_tokens: int | None = None,
        layers: int | None = None,
    ) -> PrefillRun:
        """See EmittingEngine."""
        self._prompts += 1
        honest = partial(super().start, tokens, start=start, salt=salt, chunk_tokens=chunk_tokens)
        if (file := self._told_to_idle()) is not None:
            return _IdlingRun(honest(emit, wire=wire, layers=layers), file)
        lie = self._lie()
        if lie is None or self._prompts % self.every or start >= len(tokens):
            return honest(emit, wire=wire, layers=layers)
        self.told += 1
        collected = _Collected(self.info.layout)
        run = honest(collected.take)
        split = self.info.split
        layout = self.info.layout if layers is None else split.head(self.info.layout, layers)

        def tell() -> None:
            def compute(other: Sequence[int], checkpoint: str) -> KV:
                return _computed(self._engine_of(checkpoint) if checkpoint else self, other, start, layers)

            kv = self._with_hidden(collected.kv(), tokens, start, layers)
            scene = Scene(tokens, kv, compute, self.info.profile.vocab_size)
            _send(lie(scene), layout, emit, (len(tokens), start), wire)
            if layers is not None:
                emit(ChunkEnd(start, len(tokens)))

        return _LyingRun(run, tell)

    def _with_hidden(self, kv: KV, tokens: Sequence[int], start: int, layers: int | None) -> KV:
        """The KV of a prompt's first layers, of which this is that of all, with the hidden states after them."""
        split = self.info.split
        if layers is None or layers >= split.layers:
            return kv
        rows: list[Rows] = []

        def take(block: Block) -> None:
            if isinstance(block, HiddenBlock):
                if block.wait is not None:
                    block.wait()
                rows.append(_tensor(block.rows, (block.end - block.start, split.hidden), self.info.layout.dtype))

        run = TransformersPrefillEngine.start(self, tokens, take, start=start, layers=layers)
        while not run.done:
            run.step()
        run.close()
        count = split.count(layers)
        return KV(kv.rows[:count], kv.states[:count], torch.cat(rows))

    def _lie(self) -> Callable[[Scene], KV] | None:
        name = self.lie
        if isinstance(name, Path):
            name = name.read_text() if name.exists() else ""
        if name == EACH:
            name = list(LIES)[self.told % len(LIES)]
        return {**LIES, **HIDDEN_LIES}[name] if name else None

    def _told_to_idle(self) -> Path | None:
        """The file that is there as long as this engine makes no progress; None if it is to make some."""
        if not isinstance(self.lie, Path):
            return None
        claimed = self.lie.with_name(self.lie.name + ONCE)
        with suppress(FileNotFoundError):
            if self.lie.read_text() == IDLES:
                return self.lie
            if self.lie.read_text() == IDLES + ONCE:
                return self.lie.rename(claimed)
        return None

    def honestly(self, tokens: Sequence[int], emit: Callable[[Block], None], start: int) -> PrefillRun:
        """The run of an honest engine."""
        return TransformersPrefillEngine.start(self, tokens, emit, start=start)

    def _made(self, checkpoint: str) -> LyingEngine:
        """An engine with another checkpoint."""
        with tempfile.TemporaryDirectory(prefix="disagg-lie-") as folder:
            copy = Path(folder) / "model"
            shutil.copytree(self._source, copy)
            CHECKPOINTS[checkpoint](copy)
            return LyingEngine(copy, self._context, self._options, "")


class _IdlingRun:
    """A PrefillRun that makes no progress while a file is there."""

    def __init__(self, run: PrefillRun, file: Path) -> None:
        self._run, self._file = run, file
        self.held = run.held

    @property
    def remaining(self) -> int:
        return self._run.remaining

    @property
    def done(self) -> bool:
        return self._run.done

    @property
    def timing(self) -> PrefillTiming:
        return self._run.timing

    def step(self, max_tokens: int | None = None) -> None:
        while self._file.exists():
            time.sleep(0.05)
        self._run.step(max_tokens)

    def close(self) -> None:
        self._run.close()


class _LyingRun:
    """A PrefillRun that tells its lie with its last step, or at once if all was held."""

    def __init__(self, run: PrefillRun, tell: Callable[[], None]) -> None:
        self._run, self._tell = run, tell
        self.held = run.held
        if run.done:
            tell()

    @property
    def remaining(self) -> int:
        return self._run.remaining

    @property
    def done(self) -> bool:
        return self._run.done

    @property
    def timing(self) -> PrefillTiming:
        return self._run.timing

    def step(self, max_tokens: int | None = None) -> None:
        self._run.step(max_tokens)
        if self._run.done:
            self._tell()

    def close(self) -> None:
        self._run.close()


@dataclass(slots=True)
class _Collected:
    """Blocks that an engine has emitted as-is."""

    layout: Layout
    _rows: dict[int, list[tuple[Rows, Rows]]] = field(default_factory=dict)
    _states: dict[int, tuple[Rows, ...]] = field(default_factory=dict)

    def take(self, block: Block) -> None:
        assert isinstance(block, KVBlock | StateBlock)
        if block.wait is not None:
            block.wait()
        layer = self.layout.layers[block.layer]
        if isinstance(block, StateBlock):
            shapes = ((state.shape, state.dtype) for state in layer.states)
            self._states[block.layer] = tuple(
                _tensor(view, shape, dtype) for view, (shape, dtype) in zip(block.tensors, shapes, strict=True)
            )
            return
        count = block.end - block.start
        keys, values = (
            torch.stack([_tensor(view, (count, dim), self.layout.dtype) for view in views])
            if dim
            else torch.empty(layer.kv_heads, count, 0)
            for views, dim in ((block.keys, layer.key_dim), (block.values, layer.value_dim))
        )
        self._rows.setdefault(block.layer, []).append((keys, values))

    def kv(self) -> KV:
        rows, states = [], []
        for index in range(len(self.layout.layers)):
            parts = self._rows.get(index) or [(torch.empty(0), torch.empty(0))]
            keys, values = (
                torch.cat(tensors, 1) if len(parts) > 1 else tensors[0] for tensors in zip(*parts, strict=True)
            )
            rows.append((keys, values))
            states.append(self._states.get(index, ()))
        return KV(tuple(rows), tuple(states))


def _tensor(view: memoryview, shape: Sequence[int], dtype: str) -> Rows:
    """A copy of these bytes."""
    return torch.frombuffer(bytearray(view), dtype=getattr(torch, dtype)).reshape(tuple(shape))


def _computed(engine: LyingEngine, tokens: Sequence[int], start: int, layers: int | None = None) -> KV:
    collected = _Collected(engine.info.layout)
    run = engine.honestly(tokens, collected.take, start)
    while not run.done:
        run.step()
    run.close()
    return engine._with_hidden(collected.kv(), tokens, start, layers)


def _send(kv: KV, layout: Layout, emit: Callable[[Block], None], sent: tuple[int, int], wire: WireForm) -> None:
    """Emit this KV as an engine does. sent: all tokens, and the first whose KV is sent."""
    for index, (layer, (keys, values)) in enumerate(zip(layout.layers, kv.rows, strict=True)):
        if rows := layer.rows(*sent):
            key_views, value_views = (
                plane_views(filled_planes(one.contiguous(), wire)) if one.shape[-1] else [] for one in (keys, values)
            )
            emit(KVBlock(index, rows.start, rows.stop, key_views, value_views))
        if kv.states[index]:
            emit(StateBlock(index, [view for one in kv.states[index] for view in head_views(one.contiguous()[None])]))
    if kv.hidden is not None:
        (hidden,) = head_views(kv.hidden.contiguous()[None])
        emit(HiddenBlock(sent[1], sent[0], hidden))


def main() -> int:
    """Serve one host with the lie of the environment."""
    from disagg.servers import run
    from disagg.servers.__main__ import main as serve

    def lying(options: EngineOptions, source: str, context: int, hardware: str) -> LyingEngine:
        told, every = os.environ[LIE_VARIABLE], int(os.environ.get(EVERY_VARIABLE, "1"))
        lie = Path(told) if told.startswith("/") else told
        return LyingEngine(source, context, options, lie, every=every)

    vars(run)["open_prefill"] = lying
    return serve()


if __name__ == "__main__":
    from disagg.engines.process import exit_without_cleanup

    exit_without_cleanup(main())
