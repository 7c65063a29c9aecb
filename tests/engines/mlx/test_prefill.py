"""MLXPrefillEngine: KV of a prompt by mlx-lm for another host, whole or of its first layers, and answers alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from msgspec.structs import replace

from disagg.api.names import AS_IS, INT8, WireForm
from disagg.api.sampling import Sampling
from disagg.config import EngineOptions
from disagg.engines.base import AnswerRequest, ChunkScores, DecodeRequest, Token
from disagg.engines.base.decode import Collector
from disagg.engines.mlx.engine import MLXDecodeEngine
from disagg.engines.mlx.prefill import MLXPrefillEngine
from disagg.errors import Cancelled, ModelError
from disagg.kv.blocks import Block, ChunkEnd, HiddenBlock, KVBlock
from tests.engines.architectures import pairs
from tests.engines.architectures.configs import config
from tests.engines.architectures.handoff import hand_over
from tests.engines.conftest import Constrain
from tests.engines.heads import Head
from tests.engines.mlx.mlx_parts import References, prompt, start
from tests.tiny_models import TinyModel

OPTIONS = EngineOptions("mlx", dtype="float32", device="cpu", chunk_tokens=48)
MODELS = ("llama", "gpt_oss", "gemma3_text")

Engine = Callable[[str], MLXPrefillEngine]
Decode = Callable[[str], MLXDecodeEngine]


@pytest.fixture(scope="module")
def engine(tiny: TinyModel) -> Iterator[Engine]:
    """By architecture."""
    engines: dict[str, MLXPrefillEngine] = {}

    def get(model: str) -> MLXPrefillEngine:
        if model not in engines:
            engines[model] = MLXPrefillEngine(tiny(model), 2048, OPTIONS)
        return engines[model]

    yield get
    for one in engines.values():
        one.close()


def blocks(engine: MLXPrefillEngine, tokens: Sequence[int], **options: Any) -> tuple[int, list[Any]]:
    """The tokens that were held, and what is emitted."""
    emitted: list[Any] = []
    run = engine.start(tokens, emitted.append, **options)
    while not run.done:
        run.step()
    run.close()
    return run.held, emitted


def content(emitted: Sequence[Any]) -> dict[tuple[int, int, int], bytes]:
    """The bytes of each row of the keys, by layer, token and head."""
    rows = {}
    for block in emitted:
        if isinstance(block, KVBlock):
            for head, view in enumerate(block.keys):
                size = len(view) // (block.end - block.start)
                for index, token in enumerate(range(block.start, block.end)):
                    rows[block.layer, token, head] = bytes(view[index * size : (index + 1) * size])
    return rows


@pytest.mark.parametrize("wire", [AS_IS, INT8])
@pytest.mark.parametrize("model", MODELS)
def test_a_hand_off_is_answered_as_by_the_decode_host_alone(
    model: str, wire: WireForm, engine: Engine, mlx_engine: Decode
) -> None:
    tokens = prompt(200)
    decode = mlx_engine(model)
    answer = start(decode, tokens, hand_over(engine(model), decode, tokens[:-1], wire=wire)).result()
    alone = start(decode, tokens).result()
    assert answer == alone if wire == AS_IS else answer[:4] == alone[:4]


@pytest.mark.parametrize("model", MODELS)
def test_chunks_have_the_rows_that_are_kept_at_their_ends_then_hidden_states_then_their_end(
    model: str, engine: Engine
) -> None:
    _, emitted = blocks(engine(model), prompt(100), layers=2)
    layout = engine(model).info.layout
    ends = [index for index, block in enumerate(emitted) if isinstance(block, ChunkEnd)]
    begun = 0
    for (first, end), last in zip([(0, 48), (48, 96), (96, 100)], ends, strict=True):
        chunk: list[Block] = emitted[begun : last + 1]
        assert [(b.layer, b.start, b.end) for b in chunk if isinstance(b, KVBlock)] == [
            (index, layout.layers[index].rows(end, first).start, end) for index in range(2)
        ]
        hidden = chunk[2]
        assert isinstance(hidden, HiddenBlock) and (hidden.start, hidden.end) == (first, end)
        assert len(hidden.rows) == (end - first) * engine(model).info.split.hidden * 4
        assert chunk[3] == ChunkEnd(first, end)
        begun = last + 1


@pytest.mark.parametrize("model", MODELS)
def test_the_rest_of_a_held_prompt_is_computed_as_if_all_of_it_were(
    model: str, engine: Engine, tiny: TinyModel
) -> None:
    nothing_held = MLXPrefillEngine(tiny(model), 2048, EngineOptions(**{**_fields(OPTIONS), "max_held_bytes": 0}))
    try:
        tokens = prompt(300, seed=11)
        blocks(engine(model), tokens[:193], salt="a")  # the last chunk has one token
        held, shared = blocks(engine(model), tokens, salt="a", start=150)
        none, alone = blocks(nothing_held, tokens, salt="a", start=150)
        assert (held, none) == (193, 0)
        mine, theirs = content(shared), content(alone)
        assert mine.keys() == theirs.keys()
        for row, found in mine.items():  # a chunk of one token is multiplied by another kernel
            ours, others = numpy.frombuffer(found, numpy.float32), numpy.frombuffer(theirs[row], numpy.float32)
            assert numpy.allclose(ours, others, atol=1e-4)
        assert blocks(engine(model), tokens, salt="b")[0] == 0, "another salt"
        assert engine(model).held_bytes > 0
        assert nothing_held.held_bytes == 0
    finally:
        nothing_held.close()


def _fields(options: EngineOptions) -> dict[str, Any]:
    return {"name": "mlx", "dtype": options.dtype, "device": options.device, "chunk_tokens": options.chunk_tokens}


@pytest.mark.parametrize("model", MODELS)
def test_a_head_uses_what_it_holds_of_the_same_layers_and_not_beyond_its_start(model: str, engine: Engine) -> None:
    tokens = prompt(300, seed=12)
    _, whole = blocks(engine(model), tokens, layers=2, salt="h")
    assert blocks(engine(model), tokens, layers=1, salt="h")[0] == 0, "of other layers"
    assert blocks(engine(model), tokens, salt="h")[0] == 0, "of all layers"
    held, rest = blocks(engine(model), tokens, layers=2, salt="h", start=299)
    assert held == (299 if model == "llama" else held)
    assert held <= 299
    held, some = blocks(engine(model), tokens, layers=2, salt="h", start=120)
    assert held <= 120
    for emitted in (rest, some):
        mine = content(emitted)
        assert mine and mine.items() <= content(whole).items()
    hidden = [block for block in some if isinstance(block, HiddenBlock)]
    assert [hidden[0].start, hidden[-1].end] == [120, 300]


def test_greedy_text_alone_is_that_of_transformers(engine: Engine, reference: References) -> None:
    for model in MODELS:
        tokens = prompt(120, seed=13)
        made = [token.id for token in engine(model).generate(tokens, Sampling(max_tokens=32, ignore_eos=True))]
        assert made == reference(model).greedy(tokens, 32, draft=made), model


def test_a_sampled_answer_alone_is_that_of_a_decode_host(engine: Engine, mlx_engine: Decode) -> None:
    tokens = prompt(90, seed=14)
    chosen: dict[str, Any] = {
        "max_tokens": 24,
        "temperature": 0.9,
        "top_p": 0.9,
        "seed": 7,
        "repetition_penalty": 1.1,
        "logprobs": 3,
    }
    theirs = start(mlx_engine("llama"), tokens, **chosen)
    ours: list[Token] = []
    request = AnswerRequest(tokens, Sampling(**chosen, ignore_eos=True))
    run = engine("llama").start_answer(request, ours.append)
    while not run.done:
        run.step()
    run.close()
    assert [token.id for token in ours] == theirs.result()
    assert [token.finish for token in ours] == [None] * 23 + ["length"]
    for mine, other in zip(ours, theirs.tokens, strict=True):
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [one for one, _ in mine.top] == [one for one, _ in other.top]


def test_an_answer_has_the_form_that_is_asked_for(engine: Engine, constrain: Constrain) -> None:
    llama = engine("llama")
    constraint = constrain(llama.tokenizer, 'start: "yes" | "no"')
    made: list[Token] = []
    run = llama.start_answer(AnswerRequest(prompt(40), Sampling(max_tokens=16), constraint=constraint), made.append)
    while not run.done:
        run.step()
    run.close()
    text = b"".join(llama.tokenizer.token_bytes(token.id) for token in made[:-1])
    assert text in (b"yes", b"no")
    assert made[-1].finish == "stop"


def test_scores_of_a_prompt_are_those_of_its_logits(engine: Engine) -> None:
    llama, tokens = engine("llama"), prompt(130, seed=20)
    chunks: list[ChunkScores] = []
    run = llama.start_scores(tokens, 2, chunks.append)
    while not run.done:
        run.step(50)
    run.close()
    assert run.timing.tokens == 129 and len(chunks) == 3
    logits = torch.tensor(llama.logits(tokens, 130))[:-1].log_softmax(-1)
    scores = torch.tensor(numpy.concatenate([chunk.logprobs for chunk in chunks]))
    assert torch.allclose(scores, logits.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0], atol=1e-4)


def test_it_beats_with_each_layer_of_each_chunk_and_each_token(engine: Engine) -> None:
    beats: list[None] = []
    llama = engine("llama")
    llama.on_beat = lambda: beats.append(None)
    try:
        blocks(llama, prompt(100, seed=15))
        assert len(beats) == 3 * 3
        list(llama.generate(prompt(40, seed=99), Sampling(max_tokens=4, ignore_eos=True)))
        assert len(beats) == 9 + 1 * 3 + 4
    finally:
        llama.on_beat = lambda: None


def test_an_error_in_emit_ends_the_prompt_and_not_the_engine(engine: Engine) -> None:
    def refuse(block: Block) -> None:
        raise Cancelled("the receiver is gone")

    run = engine("llama").start(prompt(100, seed=16), refuse)
    with pytest.raises(Cancelled, match="the receiver is gone"):
        run.step()
    run.close()
    assert blocks(engine("llama"), prompt(60, seed=16))[1]


def test_layers_that_the_model_does_not_have_are_refused(engine: Engine) -> None:
    with pytest.raises(ModelError, match="the model has 3 layers: its first 4 cannot be computed"):
        engine("llama").start([1, 2], lambda block: None, layers=4)


def test_what_is_emitted_stays_unchanged_until_the_last_chunk(engine: Engine) -> None:
    seen: list[tuple[memoryview, bytes]] = []

    def note(block: Block) -> None:
        if isinstance(block, KVBlock):
            seen.extend((view, bytes(view)) for view in (*block.keys, *block.values))

    run = engine("gpt_oss").start(prompt(300, seed=17), note)
    while not run.done:
        run.step()
    assert all(bytes(view) == first for view, first in seen)
    run.close()


def test_evidence_and_warm_up_leave_nothing_behind(engine: Engine) -> None:
    llama = engine("llama")
    held = llama.held_bytes
    llama.warm_up()
    assert llama.info.evidence is not None
    assert llama.held_bytes == held


@pytest.mark.parametrize("layers", [1, 3])
def test_in_eight_bits_the_rows_of_a_head_are_those_of_a_hand_off(
    layers: int, engine: Engine, mlx_engine: Decode
) -> None:
    tokens = prompt(150, seed=18)
    decode = mlx_engine("gpt_oss")
    head = Head(engine("gpt_oss"), decode, tokens, layers, wire=INT8)
    got = _finished(head)
    whole = hand_over(engine("gpt_oss"), decode, tokens[:-1], wire=INT8)
    for index in range(layers):
        for mine, other in zip(
            got.keys[index] + got.values[index], whole.keys[index] + whole.values[index], strict=True
        ):
            assert bytes(mine) == bytes(other)


def _finished(head: Head) -> Any:
    """The KV of a head whose hidden states nobody wants."""
    while not head.done:
        head.step()
        while (chunk := head.arriving.take()) is not None:
            head.arriving.taken(chunk)
    return head.finish().partial()


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


@pytest.mark.parametrize("model", ["llama", "gpt_oss_yarn"])
def test_the_first_layers_loaded_alone_are_the_head_of_the_whole_model(model: str, tiny: TinyModel) -> None:
    whole = MLXPrefillEngine(tiny(model), 2048, OPTIONS)
    part = MLXPrefillEngine(tiny(model), 2048, EngineOptions(**_fields(OPTIONS), layers="0:2"))
    try:
        part.warm_up()
        assert (part.info.loaded, whole.info.loaded) == (2, None)
        assert part.info.memory_bytes < whole.info.memory_bytes
        assert part.info.layout == whole.info.layout
        tokens = prompt(150, seed=19)
        for layers in (1, 2):
            mine, theirs = (blocks(engine, tokens, layers=layers)[1] for engine in (part, whole))
            assert content(mine) == content(theirs)
            hidden = [[bytes(b.rows) for b in one if isinstance(b, HiddenBlock)] for one in (mine, theirs)]
            assert hidden[0] == hidden[1]
        reason = f"only the first 2 of the model's {whole.info.split.layers} layers are loaded here"
        with pytest.raises(ModelError, match=reason):
            part.start(tokens, lambda block: None, layers=3)
        with pytest.raises(ModelError, match=reason):
            part.start_answer(AnswerRequest(tokens, Sampling()), lambda token: None)
        with pytest.raises(ModelError, match=reason):
            part.logits(tokens, 1)
    finally:
        whole.close()
        part.close()


@pytest.mark.parametrize(
    ("layers", "reason"), [("0:9", "the model has 3 layers, not the 9"), ("0:2", "cannot be divided between hosts")]
)
def test_a_part_that_is_of_no_use_is_not_loaded(layers: str, reason: str, tiny: TinyModel, tmp_path: Path) -> None:
    folder = tiny("llama")
    if "divided" in reason:
        pairs.make(config("gemma3n"), tmp_path)
        folder = tmp_path
    with pytest.raises(ModelError, match=reason):
        MLXPrefillEngine(folder, 2048, EngineOptions(**_fields(OPTIONS), layers=layers))
