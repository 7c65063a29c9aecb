"""Prefill a tiny random model of an architecture that is handed over with vLLM.

vLLM loads each model in a process of its own, forked from one that has imported vLLM (tests/surveys/vllm_calls.py),
computes three prompts and sends their KV to mlx-lm in this process. What it computes in bfloat16 alone is compared as
`disagg verify` does, beside what transformers hands over in bfloat16."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import torch

from disagg.api.requests import KVAddress
from disagg.api.verify import PrefillCall, PrefillReady, PrefillReply
from disagg.config import DType, EngineOptions
from disagg.engines.mlx import load
from disagg.engines.mlx.engine import MLXDecodeEngine
from disagg.engines.transformers.engine import TransformersPrefillEngine
from disagg.errors import DisaggError
from disagg.kv.arena import Arenas
from disagg.kv.fingerprint import token_hash
from disagg.kv.receive import KVServer
from disagg.kv.receive.incoming import Expected
from disagg.kv.receive.tickets import KVOutcome, Tickets
from disagg.kv.received import ReceivedKV
from disagg.verify.compare import Comparisons, EngineRun, Logits, Runs, bounds, bounds_alone
from tests.engines.architectures.handoff import hand_over
from tests.engines.architectures.pairs import make
from tests.engines.mlx.mlx_parts import prompt, start
from tests.fleets import VLLM_VARIABLES, vllm_process
from tests.surveys import vllm_served
from tests.surveys.architectures import Asked, clear_prompt
from tests.surveys.tables import ENDED, GOOD, NEAR, NOT_TRIED, failure, short, state
from tests.surveys.vllm_calls import CONTEXT

LENGTHS = (2, 65, 200)
TOKENS = 16
FORCED = 48
"""Tokens along which logits in bfloat16 are compared."""
PIECES = 50
"""Tokens of a prompt at a time, if an engine is compared with itself."""
LEAST_DISTINCT = 4
LIMIT_S = 120.0
OPTIONS = EngineOptions("mlx", device="cpu", threads=1)
HEADS = ("num_attention_heads", "n_head", "swa_num_attention_heads")
KV_HEADS = ("num_key_value_heads", "swa_num_key_value_heads")
WIDTHS = {
    "head_dim": 32,
    "swa_head_dim": 32,
    "global_head_dim": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
# As every published checkpoint has it. vLLM refuses other values, or would compute something else (see refusals).
PUBLISHED: Mapping[str, dict[str, Any]] = {
    "cohere": {"rms_norm_eps": None},
    "cohere2": {"rms_norm_eps": None},
    "falcon_h1": {"mamba_proj_bias": False, "projectors_bias": False},
    "gpt_oss": {"rms_norm_eps": 1e-5},
    "lfm2": {"conv_dim": 64, "conv_dim_out": 64},
    "mamba2": {"num_heads": 4},
    "mimo_v2_flash": {"num_key_value_heads": 1},
    "minicpm3": {"v_head_dim": 32},
    "mistral4": {"qk_nope_head_dim": 64},
    "olmoe": {"rms_norm_eps": 1e-5, "norm_topk_prob": False},
}


@dataclass(frozen=True, slots=True)
class Answers:
    """To one prompt: after a hand-off, and of each engine alone."""

    handed_over: Sequence[int]
    mlx: Sequence[int]
    vllm: Sequence[int]


def verdict(answers: Mapping[int, Answers]) -> str:
    """What a comparison of answers shows. answers: by the length of their prompts."""
    for length, of in answers.items():
        if of.handed_over != of.vllm:
            which = "also without a hand-off" if of.mlx != of.vllm else "by the hand-off"
            return f"**differs** from vLLM at {length} tokens, {which}"
        if of.handed_over != of.mlx:
            return f"**differs** from mlx-lm at {length} tokens"
    if max(len(set(of.handed_over)) for of in answers.values()) < LEAST_DISTINCT:
        return "**nothing shown**: the answers repeat a token"
    return "exact"


def near(by_vllm: Comparisons, by_transformers: Comparisons) -> str:
    """What a comparison in bfloat16 shows, judged as by `disagg verify`: of what vLLM hands over, and of what
    transformers does."""
    limits = bounds(
        "bfloat16",
        same_weights=True,
        alone=by_vllm.prefill_vs_decode,
        again=(by_vllm.prefill_again, by_vllm.decode_again),
    )
    found = "near" if by_vllm.within(limits, bounds_alone("bfloat16", same_weights=True)) else "**differs**"
    figures = [
        f"{pair.mean_kl:.0e}"
        for of in (by_vllm, by_transformers)
        for pair in (of.handoff_vs_prefill, of.handoff_vs_decode)
    ]
    return "{} (bfloat16): KL {} from vLLM and {} from mlx-lm alone (of transformers {} and {})".format(found, *figures)


def along(tokens: Sequence[int]) -> list[int]:
    """A prompt and the text along which its logits are compared."""
    return [*tokens, *prompt(FORCED, seed=1)[:-1]]


def cells(entry: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Of the row of a model: alone, and with two ranks if it serves it alone. What is exact here is also served.
    folder: of its own."""
    found, prompts = {"vllm": NOT_TRIED, "ranks": NOT_TRIED}, dict[int, Asked]()
    for ranks, column in enumerate(found, 1):
        place = folder / column
        cell = row(entry, place, ranks).partition(" | ")[0]
        if cell in GOOD:
            cell = vllm_served.verdict(place / "model", place / "servers", ranks, prompts)
        found[column] = cell
        if state(found[column]) not in (*GOOD, NEAR):
            break
    return found


def row(entry: Mapping[str, Any], folder: Path, ranks: int = 1) -> str:
    """The verdict and the largest difference. ranks: that share the heads."""
    model = folder / "model"
    try:
        make(with_wide_heads(entry), model)
        return tried(model, ranks, dtype_of(entry))
    except DisaggError as error:
        return f"{failure(error, model)} | "


def dtype_of(entry: Mapping[str, Any]) -> DType:
    """What vLLM's CPU build computes this configuration in: gated delta nets of Qwen in bfloat16 alone."""
    text = entry.get("text_config", entry)
    return "bfloat16" if str(text["model_type"]).startswith(("qwen3_next", "qwen3_5")) else "float32"


def with_wide_heads(entry: Mapping[str, Any]) -> dict[str, Any]:
    """With heads of 32, the smallest that vLLM's attention on CPUs has; of latent attention with its only widths."""
    if "text_config" in entry:
        return {**entry, "text_config": with_wide_heads(entry["text_config"])}
    heads = {key: 2 for key in HEADS if key in entry or key == "num_attention_heads"}
    heads |= {key: min(2, entry.get(key) or 2) for key in KV_HEADS if key in entry or key == "num_key_value_heads"}
    widths: dict[str, Any] = {key: width for key, width in WIDTHS.items() if entry.get(key)}
    for key in ("rope_parameters", "rope_scaling"):  # its parts of a head, together half of it
        if section := (entry.get(key) or {}).get("mrope_section"):
            width = entry.get("head_dim") or entry["hidden_size"] // entry["num_attention_heads"]
            wider = [part * WIDTHS["head_dim"] // width for part in section]
            widths[key] = {**entry[key], "mrope_section": wider}
    return {**entry, **heads, **widths, **PUBLISHED.get(entry["model_type"], {})}


def tried(model: Path, ranks: int, dtype: DType) -> str:
    """What became of the checkpoint in this folder. Raises the DisaggError for which an engine refuses it."""
    options = replace(OPTIONS, dtype=dtype)
    with experts_in_float32(), closing(MLXDecodeEngine(model, CONTEXT, options)) as decode:
        tickets = Tickets(Arenas(decode.allocate))
        with KVServer("127.0.0.1", 0, tickets) as server:
            exchange = Exchange(decode, tickets, KVAddress("127.0.0.1", server.port), model.parent, dtype)
            failure = exchange.run(model, ranks)
        if failure:
            return failure
        if dtype == "float32":
            return exchange.compared()
        return exchange.noise(TransformersPrefillEngine(model, CONTEXT, replace(options, name="transformers")))


@contextmanager
def experts_in_float32() -> Iterator[None]:
    """mlx multiplies experts on a CPU only so, and models with some are refused there in other types."""
    from mlx import core as mx

    own: Callable[..., Any] = mx.gather_mm

    def multiplied(rows: Any, weights: Any, **options: Any) -> Any:
        return own(rows.astype(mx.float32), weights.astype(mx.float32), **options).astype(rows.dtype)

    with patch.object(mx, "gather_mm", multiplied), patch.object(load, "_require_computable"):
        yield


class Exchange:
    """The calls to one vLLM, and what it answers. folder: of the files between the two processes."""

    def __init__(
        self, decode: MLXDecodeEngine, tickets: Tickets, to: KVAddress, folder: Path, dtype: DType = "float32"
    ) -> None:
        self._decode, self._tickets, self._to, self._folder, self._dtype = decode, tickets, to, folder, dtype
        self._prompts = {
            length: clear_prompt(decode, length, TOKENS) if dtype == "float32" else prompt(length, seed=length)
            for length in LENGTHS
        }
        self._whole = [*prompt(200, seed=200), *prompt(TOKENS, seed=1)[:-1]]
        self._logits = folder / "logits.npy"
        exact = dtype == "float32"
        sent = {str(length): tokens for length, tokens in self._prompts.items()}
        sent |= {"logits": self._whole[: 1 - TOKENS]} if exact else {}
        self._kv: dict[str, Future[KVOutcome]] = {name: Future() for name in sent}
        self._calls = [*(self._exact() if exact else self._forced()), *(self._send(*one) for one in sent.items())]
        self._answers: list[PrefillReply] = []

    def _exact(self) -> Iterator[PrefillCall]:
        for tokens in self._prompts.values():
            yield PrefillCall(call="answer", tokens=tuple(tokens), count=TOKENS)
        yield PrefillCall(call="logits", tokens=tuple(self._whole), count=TOKENS, file=str(self._logits))

    def _forced(self) -> Iterator[PrefillCall]:
        for length, tokens in self._prompts.items():
            for pieces in (None, PIECES):
                file = str(self._file(length, pieces))
                forced = tuple(along(tokens))
                yield PrefillCall(call="logits", tokens=forced, count=FORCED, chunk_tokens=pieces, file=file)

    def _file(self, length: int, pieces: int | None) -> Path:
        return self._folder / f"{length}-{pieces}.npy"

    def run(self, model: Path, ranks: int) -> str:
        """Ask vLLM. The cells of the row if it did not answer, "" if it did. DisaggError if it refused."""
        calls, replies, log = (self._folder / name for name in ("calls", "replies", "log"))
        calls.write_bytes(b"".join(call.to_bytes() + b"\n" for call in self._calls))
        process = vllm_process().start(
            [str(model), str(calls), str(replies), str(ranks), self._dtype],
            {**os.environ, **VLLM_VARIABLES},
            log,
            program="tests.surveys.vllm_calls",
        )
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"{ENDED}: not answered within {LIMIT_S:g} s | "
        finally:
            process.kill()
        lines = replies.read_bytes().splitlines() if replies.exists() else []
        if lines:
            _raise(PrefillReady.from_bytes(lines[0]).error)
        if len(lines) <= len(self._calls):
            last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
            return f"{ENDED} with exit code {code}: {short(last, model)} | "
        self._answers = [PrefillReply.from_bytes(line) for line in lines[1:]]
        for outcome in self._kv.values():  # of a transfer that failed the receiver has the reason
            if outcome.done():
                _received(outcome)
        for answer in self._answers:
            _raise(answer.error)
        return ""

    def compared(self) -> str:
        """The same, of the answers that `run` got."""
        running = {
            length: start(self._decode, tokens, _received(self._kv[str(length)]), max_tokens=TOKENS)
            for length, tokens in self._prompts.items()
        }
        answers = {
            length: Answers(
                running[length].result(),
                start(self._decode, tokens, max_tokens=TOKENS).result(),
                [token.id for token in answer.tokens],
            )
            for (length, tokens), answer in zip(self._prompts.items(), self._answers, strict=False)
        }
        assert all(one.timing.computed_prompt_tokens == 1 for one in running.values()), "a prompt was computed"
        return f"{verdict(answers)} | {self._difference():.0e}"

    def _difference(self) -> float:
        """The largest difference of log-probabilities along an answer, handed over against vLLM alone."""
        ours = torch.tensor(self._decode.logits(self._whole, TOKENS, _received(self._kv["logits"])))
        theirs = torch.tensor(numpy.load(self._logits))
        return float((ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().max())

    def noise(self, transformers: TransformersPrefillEngine) -> str:
        """The cells after `run` in bfloat16. transformers: with the same model."""
        alone, again = self._decoded(), self._decoded(pieces=PIECES)

        def compared(kv: Mapping[int, ReceivedKV], logits: Callable[[int, int | None], Logits]) -> Comparisons:
            whole, pieces = (
                EngineRun([], numpy.concatenate([logits(n, size) for n in LENGTHS])) for size in (None, PIECES)
            )
            return Comparisons.of(Runs(self._decoded(kv), whole, alone, pieces, again))

        def by_transformers(length: int, pieces: int | None) -> Logits:
            return transformers.logits(along(self._prompts[length]), FORCED, chunk_tokens=pieces)

        kv = {length: _received(self._kv[str(length)]) for length in LENGTHS}
        of_vllm = compared(kv, lambda length, pieces: numpy.load(self._file(length, pieces)))
        kv = {n: hand_over(transformers, self._decode, tokens[:-1]) for n, tokens in self._prompts.items()}
        of_transformers = compared(kv, by_transformers)
        largest = max(of_vllm.handoff_vs_prefill.max_logit_diff, of_vllm.handoff_vs_decode.max_logit_diff)
        return f"{near(of_vllm, of_transformers)} | {largest:.0e}"

    def _decoded(self, kv: Mapping[int, ReceivedKV] | None = None, pieces: int | None = None) -> EngineRun:
        """mlx-lm's logits of all prompts, after a hand-off or alone."""
        rows = (
            self._decode.logits(along(tokens), FORCED, None if kv is None else kv[length], chunk_tokens=pieces)
            for length, tokens in self._prompts.items()
        )
        return EngineRun([], numpy.concatenate([*rows]))

    def _send(self, name: str, tokens: Sequence[int]) -> PrefillCall:
        info = self._decode.info
        expected = Expected("verify", info.layout, info.fingerprint, token_hash(tokens), len(tokens) - 1)
        slot = self._tickets.issue(expected, self._kv[name].set_result, deadline=time.monotonic() + LIMIT_S)
        return PrefillCall(call="send", tokens=tuple(tokens), to=self._to, ticket=slot.ticket)


def _received(outcome: Future[KVOutcome]) -> ReceivedKV:
    found = outcome.result(LIMIT_S)
    if isinstance(found, DisaggError):
        raise found
    return found


def _raise(error: dict[str, str] | None) -> None:
    if error is not None:
        raise DisaggError.from_json(dict(error))
