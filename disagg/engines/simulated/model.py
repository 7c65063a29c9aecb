"""The model that both simulated engines share: sizes and predicted times, but no weights.

The layout of its KV, its vocabulary and its times are those of the real model. Tokens are letters drawn from a hash of
the prompt, so that both engines answer a prompt alike. An answer that must have a form has it, with letters where the
form leaves a choice.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy

from disagg.api.keeper import ModelFacts
from disagg.api.layout import Layout, SplitLayout
from disagg.api.requests import Ending, Messages
from disagg.api.sampling import MAX_TOKENS, Sampling
from disagg.config import EngineOptions
from disagg.engines.base import EngineInfo, Token
from disagg.engines.model.bans import Bans, ends_of
from disagg.engines.model.constraint import Constraint, Constraints
from disagg.engines.model.fill import not_known
from disagg.engines.model.format import AnswerFormat
from disagg.engines.model.prefix_cache import PrefixCache
from disagg.engines.model.profile import LayerProfile, ModelProfile
from disagg.engines.model.stream import StopStrings
from disagg.engines.model.text import NOTHING, TextStream, check_ids, check_message, word_tokens
from disagg.errors import ModelError, RequestError
from disagg.kv.fingerprint import Fingerprint, short_hash
from disagg.planning.devices import Device, device
from disagg.planning.shapes import ModelShape
from disagg.planning.sizing import read_size
from disagg.planning.times import Prefill, piece, prefill
from disagg.version import VERSION

LETTERS = b"etaoin shrdlu"
BYTES = 256
# The tokens of llguidance's tokenizer "byte": the bytes, and special ones, of which the last ends an answer.
CONSTRAINED = 262
END = CONSTRAINED - 1
# In a string of JSON: it has 40 letters on average, as many as a sentence of a real model has tokens.
IN_STRINGS = LETTERS * 3 + b'"'
EXPONENT = frozenset(b"eE")


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """A model on a machine, as the roofline model describes them."""

    device: Device
    shape: ModelShape
    options: EngineOptions
    info: EngineInfo
    tokenizer: ByteTokenizer

    def prefill(self, tokens: int, chunk_tokens: int | None = None) -> Prefill:
        """The predicted prefill of this many tokens."""
        return prefill(self.device, self.shape, tokens, self.options.dtype, chunk_tokens or self.options.chunk_tokens)

    def piece(self, tokens: int, chunk: range, layers: range | None = None) -> Prefill:
        """The predicted computation of these tokens of a prompt of `tokens` tokens. layers: that are computed; None:
        all."""
        return piece(self.device, self.shape, tokens, self.options.dtype, chunk, layers=layers)

    def answer(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        answered: int = 0,
        constraint: Constraint | None = None,
        banned: Bans | None = None,
    ) -> Iterator[Token]:
        """The answer to a prompt after its first `answered` tokens, without probabilities: max_tokens long, or to the
        end of its form. Raises RequestError if it cannot go on in its form."""
        seed = hashlib.sha256(struct.pack(f"<{len(tokens)}I", *tokens)).digest()
        ends = ends_of(sampling, (END,))
        for index in range(answered, sampling.max_tokens):
            drawn = hashlib.blake2b(index.to_bytes(8, "little"), key=seed, digest_size=1).digest()[0]
            token = _choose(drawn, constraint, banned)
            if token in ends:
                yield Token(token, 0.0, finish="stop")
                return
            yield Token(token, 0.0, finish="length" if index + 1 == sampling.max_tokens else None)


def load(source: str | Path, context: int, options: EngineOptions, hardware: str) -> SimulatedModel:
    """The model of `source` ("shape:NAME", or the path of a config.json or its folder) on the machine `hardware`.
    UsageError if either is unknown, ModelError if the model does not fit the machine."""
    sizes = read_size(str(source))
    machine = device(hardware)
    first = options.first_layers
    if first is not None and first > sizes.layers:
        raise ModelError(
            f"{sizes.name} has {sizes.layers} layers, not {first}", f'give layers = "0:{sizes.layers}" at most'
        )
    loaded = sizes if first is None else sizes.first(first)
    if loaded.weight_bytes > machine.memory_gb * 1e9:
        raise ModelError(
            f"simulated: {sizes.name} ({loaded.weight_bytes / 1e9:.0f} GB) is too large for {machine.title}",
            f"it has {machine.memory_gb:g} GB of memory: choose other hardware or another model",
        )
    tokenizer = ByteTokenizer(sizes.vocab)
    info = replace(
        _info(sizes, machine, context, options, tokenizer),
        memory_bytes=round(loaded.weight_bytes),
        loaded=None if loaded.layers == sizes.layers else loaded.layers,
    )
    return SimulatedModel(machine, sizes, options, info, tokenizer)


def no_logits() -> ModelError:
    """The error of a simulated engine's `logits`."""
    return ModelError("a simulated engine has no logits: no model runs", "use a host with a real engine")


def sleep_until(moment: float) -> None:
    """Sleep until `moment` on time.monotonic(); return at once if it has passed."""
    left = moment - time.monotonic()
    if left > 0:
        time.sleep(left)


class CountedKV:
    """Held KV that is counted, not stored: a PrefixCache for KV of a model. `hold` is for one thread at a time."""

    def __init__(self, info: EngineInfo, limit: int) -> None:
        self._info = info
        windows = [layer.window or 0 for layer in info.layout.layers if not layer.keeps_every_row]
        self._rewindable = min(windows, default=None)
        self.store: PrefixCache[CountedRows, CountedSnapshot] = PrefixCache(limit, self._rewindable)

    def find(self, tokens: Sequence[int], salt: str) -> int:
        """How many of these tokens are held."""
        found = self.store.find(tokens, salt)
        if found is None:
            return 0
        found.release()
        return found.tokens

    def hold(self, prompt: Sequence[int], answer: Sequence[int], salt: str, head: int | None = None) -> None:
        """Hold the KV of a request that has ended. head: of the model's first so many layers; None: of all."""
        split, tokens = self._info.split, [*prompt, *answer]
        layout = split.head(self._info.layout, split.layers if head is None else head)
        others = replace(layout, layers=tuple(at for at in layout.layers if not at.keeps_every_row))
        row_bytes = layout.nbytes(1) - others.nbytes(1)
        snapshots = {at: self._snapshot(others, at) for at in (len(prompt) - 1, len(tokens))}
        rows = partial(_counted_rows, row_bytes)
        self.store.add(tokens, salt, rows, snapshots)

    def _snapshot(self, others: Layout, tokens: int) -> CountedSnapshot:
        complete = tokens <= (self._rewindable or 0)
        return CountedSnapshot(others.nbytes(tokens), 0 if complete else tokens)


def _counted_rows(token_bytes: int, start: int, end: int) -> CountedRows:
    return CountedRows(end - start, token_bytes)


@dataclass(frozen=True, slots=True)
class CountedRows:
    """Rows of this many tokens. token_bytes: the size of one, in the layers that keep every row."""

    tokens: int
    token_bytes: int

    @property
    def nbytes(self) -> int:
        return self.tokens * self.token_bytes

    def split(self, at: int) -> tuple[CountedRows, CountedRows]:
        return replace(self, tokens=at), replace(self, tokens=self.tokens - at)


@dataclass(frozen=True, slots=True)
class CountedSnapshot:
    """A snapshot of the layers that do not keep every row."""

    nbytes: int
    usable_from: int


class ByteTokenizer:
    """A PromptTokenizer without files: the tokens of a text are its UTF-8 bytes."""

    eos_ids = frozenset({END})
    ends_of_fill = ()
    format = AnswerFormat()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._constraints = Constraints(lambda: "byte", CONSTRAINED, self.eos_ids)
        self.digest = short_hash(f"bytes {vocab_size}".encode())

    def encode(
        self,
        prompt: str | Messages | Sequence[int],
        template: Mapping[str, Any] = NOTHING,
        *,
        limit: int = MAX_TOKENS,
        ending: Ending = "begun",
        suffix: str = "",
    ) -> list[int]:
        """Chat messages are lines, `role: content`, after the template's variables as JSON."""
        if suffix:
            raise not_known()
        if isinstance(prompt, str):
            ids = list(prompt.encode())
        elif prompt and isinstance(prompt[0], Mapping):
            variables = json.dumps(dict(template), sort_keys=True) + "\n" if template else ""
            lines = _lines(prompt).removesuffix("\n") if ending == "within" else _lines(prompt)
            ids = list((variables + lines).encode())
        else:
            ids = check_ids(prompt, self.vocab_size)
        if not ids:
            raise RequestError("the prompt is empty", "give at least one token of text, or one message")
        return ids

    def stream(
        self, stop: Sequence[str] = (), *, marks: bool = False, kept: bool = False, after: int = 0
    ) -> TextStream:
        return _ByteStream(StopStrings(stop, kept=kept), after)

    def words(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        return word_tokens(texts, lambda text: list(text.encode()))

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < BYTES else b"."

    async def constrain(
        self, grammar: str, answer: Sequence[int], after: str = "", owner: str = "", field: str = "json_schema"
    ) -> Constraint:
        """There are no marks."""
        return await self._constraints.make(grammar, answer, owner=owner, field=field)


class _ByteStream:
    """A TextStream of bytes; the end has no text, and other ids beyond a byte are shown as dots."""

    def __init__(self, stops: StopStrings, after: int) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = stops
        self._unstopped = after

    @property
    def stopped(self) -> str:
        return self._stops.reached

    def push(self, token: int) -> str:
        if token == END:
            return ""
        self._unstopped -= 1
        text = self._decoder.decode(bytes([token]) if token < BYTES else b".")
        return text if self._unstopped >= 0 else self._stops.push(text)

    def finish(self) -> str:
        return self._stops.push(self._decoder.decode(b"", final=True)) + self._stops.finish()


def _choose(drawn: int, constraint: Constraint | None, banned: Bans | None) -> int:
    """The next token. drawn: 0 to 255."""
    allowed = constraint.allowed() if constraint is not None else None
    if constraint is not None and constraint.error is not None:
        raise constraint.error
    if allowed is not None:
        choice = _fitting(allowed if banned is None else banned.within(allowed))
    else:
        without = () if banned is None else banned.now(BYTES)
        choice = [letter for letter in LETTERS if letter not in without] or LETTERS
    token = choice[drawn % len(choice)]
    if banned is not None:
        banned.add(token)
    if constraint is not None:
        constraint.accept(token)
    return token


def _fitting(allowed: numpy.ndarray[Any, numpy.dtype[numpy.bool_]]) -> Sequence[int]:
    """Letters in a string; elsewhere all that is allowed but an exponent, with which most numbers are infinite."""
    if allowed[list(LETTERS)].all():
        return [token for token in IN_STRINGS if allowed[token]]
    tokens = numpy.flatnonzero(allowed).tolist()
    return [token for token in tokens if token not in EXPONENT] or tokens


def _lines(messages: Sequence[Any]) -> str:
    for index, message in enumerate(messages):
        check_message(index, message)
    return "".join(f"{message['role']}: {message['content']}\n" for message in messages)


def _info(
    sizes: ModelShape, machine: Device, context: int, options: EngineOptions, tokenizer: ByteTokenizer
) -> EngineInfo:
    layout = sizes.layout(options.dtype)
    architecture, none = f"simulated/{sizes.name}", short_hash(b"")
    return EngineInfo(
        backend=f"simulated/{machine.name}",
        versions={"disagg": VERSION},
        profile=ModelProfile(
            source="simulated",
            architecture=architecture,
            vocab_size=sizes.vocab,
            context=min(context, sizes.context),
            layers=tuple(LayerProfile(layer, None) for layer in layout.layers),
            tokenizer=tokenizer.digest,
            chat_template=none,
            special_tokens=none,
            eos_ids=tokenizer.eos_ids,
        ),
        layout=layout,
        fingerprint=Fingerprint(architecture, sizes.vocab, none, tokenizer.digest, none, none),
        split=SplitLayout(sizes.layers, tuple(range(sizes.layers)), sizes.hidden),
        eos_ids=tokenizer.eos_ids,
        facts=ModelFacts(
            size_bytes=int(sizes.weight_bytes),
            parameters=sizes.total_params,
            architecture=architecture,
            context=sizes.context,
        ),
    )
