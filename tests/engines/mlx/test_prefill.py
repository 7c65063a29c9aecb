"""disagg/engines/mlx/prefill.py: whole requests on a prefill engine with MLX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from disagg.api.sampling import Sampling
from disagg.config import EngineOptions
from disagg.engines.base import AnswerRequest, DecodeRequest, Token
from disagg.engines.base.decode import Collector
from disagg.engines.mlx.engine import MLXDecodeEngine
from disagg.engines.mlx.prefill import MLXPrefillEngine
from tests.tiny_models import TinyModel

PROMPT = list(range(20, 60))
SAMPLED = Sampling(max_tokens=24, temperature=0.8, seed=4, ignore_eos=True)


def test_an_answer_ends_and_is_banned_as_on_a_decode_engine(
    tiny: TinyModel, mlx_engine: Callable[[str], MLXDecodeEngine]
) -> None:
    decode = mlx_engine("llama")
    prefill = MLXPrefillEngine(tiny("llama"), 8192, EngineOptions("mlx", dtype="float32"))

    def by_decode(name: str, sampling: Sampling, words: Any = ()) -> list[int]:
        collector = Collector()
        decode.submit(DecodeRequest(name, PROMPT, sampling, bad_words=words), collector)
        collector.timing.result(60)
        return collector.tokens

    def by_prefill(sampling: Sampling, words: Any = ()) -> list[int]:
        made: list[Token] = []
        run = prefill.start_answer(AnswerRequest(PROMPT, sampling, bad_words=words), made.append)
        while not run.done:
            run.step()
        return [token.id for token in made]

    free = by_decode("free", SAMPLED)
    assert by_prefill(SAMPLED) == free
    stops = replace(SAMPLED, stop_token_ids=(free[9],))
    assert by_prefill(stops) == by_decode("stops", stops) == free[: free.index(free[9]) + 1]
    late = replace(stops, min_tokens=15)
    assert len(by_prefill(late)) >= 15 and by_prefill(late) == by_decode("late", late)
    words = [[free[3]], free[5:7]]
    banned = by_prefill(SAMPLED, words)
    assert banned == by_decode("banned", SAMPLED, words) and banned[:3] == free[:3] and free[3] not in banned
    prefill.close()
