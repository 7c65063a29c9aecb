"""The simulated prefill engine: real bytes of the real layout, one after the other."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from disagg.api.sampling import Sampling
from disagg.config import EngineOptions
from disagg.engines.simulated.prefill import SimulatedPrefillEngine
from disagg.errors import Cancelled, ModelError, RequestError, UsageError
from disagg.kv.blocks import Block, KVBlock, StateBlock
from tests.simulated import write_config

OPTIONS = EngineOptions("simulated", chunk_tokens=64)


def engine(tmp_path: Path, hardware: str = "h200-sxm", **changes: object) -> SimulatedPrefillEngine:
    return SimulatedPrefillEngine(write_config(tmp_path, **changes), 4096, OPTIONS, hardware)


@pytest.mark.parametrize("tokens", [0, 1, 64, 65, 200])
def test_every_row_that_the_layout_keeps_is_emitted_once(tmp_path: Path, tokens: int) -> None:
    kinds = ["sliding_attention", "full_attention"] * 4
    prefill = engine(tmp_path, layer_types=kinds, sliding_window=32)
    blocks: list[Block] = []
    timing = prefill.prefill(range(tokens), blocks.append)
    layout = prefill.info.layout
    assert {layer.window for layer in layout.layers} == {32, None}
    for index, layer in enumerate(layout.layers):
        mine = [b for b in blocks if isinstance(b, KVBlock) and b.layer == index]
        assert [row for block in mine for row in range(block.start, block.end)] == list(layer.rows(tokens))
    sizes = [len(view) for b in blocks if isinstance(b, KVBlock) for view in (*b.keys, *b.values)]
    assert sum(sizes) == layout.nbytes(tokens)
    assert timing.tokens == tokens


def test_states_are_emitted_once_after_the_rows_also_of_a_prompt_that_is_held(tmp_path: Path) -> None:
    prefill = SimulatedPrefillEngine("shape:qwen3-next-80b", 4096, OPTIONS, "m3-ultra")
    layout = prefill.info.layout
    for _ in range(2):
        blocks: list[Block] = []
        prefill.prefill(range(8), blocks.append)
        states = [block for block in blocks if isinstance(block, StateBlock)]
        assert [block.layer for block in states] == [i for i, one in enumerate(layout.layers) if one.kind == "state"]
        assert blocks[-len(states) :] == states
        rows = [view for b in blocks if isinstance(b, KVBlock) for view in (*b.keys, *b.values)]
        assert sum(map(len, [*rows, *(view for b in states for view in b.tensors)])) == layout.nbytes(8)


def test_the_chunk_size_may_be_given_per_call(tmp_path: Path) -> None:
    blocks: list[Block] = []
    engine(tmp_path).prefill(range(300), blocks.append, chunk_tokens=100)
    assert [(b.start, b.end) for b in blocks if isinstance(b, KVBlock) and b.layer == 0] == [
        (0, 100),
        (100, 200),
        (200, 300),
    ]


def test_blocks_hold_noise_and_not_one_stretch_of_it_again_and_again(tmp_path: Path) -> None:
    blocks: list[Block] = []
    engine(tmp_path).prefill(range(64), blocks.append)
    views = [bytes(view) for b in blocks if isinstance(b, KVBlock) for view in (*b.keys, *b.values)]
    assert len(set(views)) == len(views)
    assert len(set(views[0])) > 200


def test_it_takes_no_less_than_predicted(tmp_path: Path) -> None:
    prefill = engine(tmp_path, "m3-ultra")
    began = time.monotonic()
    timing = prefill.prefill(range(256), lambda block: None)
    predicted = prefill._model.prefill(256).seconds
    assert predicted <= timing.compute_s <= time.monotonic() - began


def test_an_error_while_emitting_ends_it(tmp_path: Path) -> None:
    def refuse(block: Block) -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        engine(tmp_path).prefill(range(64), refuse)


def test_cancelling_ends_it_between_two_chunks(tmp_path: Path) -> None:
    blocks: list[Block] = []
    simulated = engine(tmp_path)
    layers = len(simulated.info.layout.layers)
    with pytest.raises(Cancelled):
        simulated.prefill(range(64), blocks.append, chunk_tokens=16, cancelled=lambda: len(blocks) >= layers)
    assert len(blocks) == layers
    assert simulated.held_bytes == 0
    assert simulated.start(range(64), blocks.append).held == 0, "its KV was not computed to the end"


def test_a_prompt_that_begins_like_an_earlier_one_takes_the_time_of_the_rest_and_sends_all(tmp_path: Path) -> None:
    simulated, first, second = engine(tmp_path), list(range(200)), list(range(300))
    simulated.prefill(first, lambda block: None)
    assert simulated.held_bytes == simulated.info.layout.nbytes(200)
    blocks: list[Block] = []
    run = simulated.start(second, blocks.append, start=150)
    assert (run.held, run.remaining) == (200, 100)
    while not run.done:
        run.step()
    assert run.timing.tokens == 100
    rows = [
        row
        for block in blocks
        if isinstance(block, KVBlock) and not block.layer
        for row in range(block.start, block.end)
    ]
    assert rows == list(range(150, 300))
    assert simulated.start(second, blocks.append, salt="another").held == 0


def test_the_answer_is_the_prompts_own_and_as_long_as_asked(tmp_path: Path) -> None:
    prefill = engine(tmp_path)
    first, again, other = (
        [token.id for token in prefill.generate(prompt, Sampling(max_tokens=20))] for prompt in ([5, 6], [5, 6], [5, 7])
    )
    assert first == again != other
    assert len(first) == 20
    finishes = [token.finish for token in prefill.generate([5], Sampling(max_tokens=3))]
    assert finishes == [None, None, "length"]


def test_generating_can_be_cancelled(tmp_path: Path) -> None:
    with pytest.raises(Cancelled):
        list(engine(tmp_path).generate([1, 2, 3], Sampling(max_tokens=5), cancelled=lambda: True))


def test_everything_about_it_is_marked_as_simulated(tmp_path: Path) -> None:
    info = engine(tmp_path, "dgx-spark").info
    assert info.backend == "simulated/dgx-spark"
    assert info.profile.source == "simulated"
    assert info.fingerprint.architecture.startswith("simulated/")


def test_it_has_no_logits(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model runs"):
        engine(tmp_path).logits([1, 2], 1)


def test_a_model_that_the_machine_could_not_hold_is_refused() -> None:
    with pytest.raises(ModelError, match=r"simulated: llama-3.1-8b|simulated: gpt-oss-120b"):
        SimulatedPrefillEngine("shape:gpt-oss-120b", 4096, OPTIONS, "rtx-4090")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown model shape"):
        SimulatedPrefillEngine("shape:nothing", 4096, OPTIONS, "dgx-spark")
    with pytest.raises(UsageError, match="unknown device"):
        SimulatedPrefillEngine("shape:qwen3-8b", 4096, OPTIONS, "nothing")


def test_texts_are_their_bytes_and_ids_stay_as_they_are(tmp_path: Path) -> None:
    tokenizer = engine(tmp_path).tokenizer
    assert tokenizer.encode("hé") == list("hé".encode())
    assert tokenizer.encode([31999, 0]) == [31999, 0]
    assert tokenizer.encode([{"role": "user", "content": "hi"}]) == list(b"user: hi\n")
    stream = tokenizer.stream(stop=["stop"])
    text = "".join(stream.push(token) for token in [*"hé st".encode(), 9000, *b"stop now"]) + stream.finish()
    assert (text, bool(stream.stopped)) == ("hé st.", True)


@pytest.mark.parametrize("prompt", ["", [], [32000], [-1], ["a"], [{"role": "king", "content": "x"}]])
def test_a_prompt_that_is_none_is_refused(tmp_path: Path, prompt: object) -> None:
    with pytest.raises(RequestError):
        engine(tmp_path).tokenizer.encode(prompt)  # type: ignore[arg-type]  # that is the fault
