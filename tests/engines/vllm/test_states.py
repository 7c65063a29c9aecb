"""disagg/engines/vllm/states.py: states out of vLLM's pages, in whichever order they lie, and from several ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from disagg.api.layout import LayerLayout
from disagg.engines.model.architectures import architecture_of
from disagg.engines.model.architectures.base import Convolved
from disagg.engines.vllm.states import StatePages, rank_shapes, whole_inputs, windows
from disagg.errors import ModelError
from tests.fleets import needs_vllm, vllm_process
from tests.surveys.tables import known

NAMES = ("qwen3_next", "kimi_linear", "nemotron_h", "falcon_h1", "mamba2", "lfm2", "falcon_mamba", "jamba")
"""One of each kind of state, and one beside rows."""
BLOCKS, BLOCK = 8, 2


def of(name: str) -> tuple[LayerLayout, Convolved]:
    """A layer with a state of this architecture, and what the state consists of."""
    config = CONFIG_MAPPING[name].from_dict(dict(known()[name])).get_text_config(decoder=True)
    architecture = architecture_of(config)
    return next(one.layout for one in architecture.layers(config) if one.layout.states), architecture.convolved(config)


class Module:
    """A layer of vLLM with its pages. by_channel, keys_first: how they hold states."""

    def __init__(self, name: str, *, by_channel: bool = False, keys_first: bool = False) -> None:
        self.layer, self.parts = of(name)
        self._by_channel, self._keys_first = by_channel, keys_first
        self.transforms = 0  # to which the ranks come together
        inputs, *matrices = rank_shapes(self.layer.states, self.parts, 1)
        shapes = [inputs[::-1] if by_channel else inputs, *matrices]
        self.kv_cache = [torch.randn(BLOCKS, *shape) for shape in shapes]
        channels = sum(self.parts.widths)
        self.conv1d = SimpleNamespace(weight=torch.randn(channels, 1, inputs[0] + 1), bias=torch.randn(channels))
        if self.parts.key is None:  # Mamba 1
            self.x_proj = SimpleNamespace(weight=torch.randn(matrices[0][1], channels))
            self._steps = torch.randn(channels)

    def _ssm_transform(self, convolved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A time step for each channel, and what its vectors are written and read with, which are the same here."""
        self.transforms += 1
        projected = convolved @ self.x_proj.weight.T
        return self._steps[:, None], projected, projected

    def _time_proj_bias(self) -> torch.Tensor:
        return 2 * self._steps

    def get_state_shape(self) -> list[tuple[int, ...]]:
        return [tuple(state.shape[1:]) for state in self.kv_cache]

    def pages(self) -> StatePages:
        return StatePages("model.layers.0.mixer", self, self.layer, self.parts, 1)

    def put(self, inputs: torch.Tensor, matrices: torch.Tensor | None) -> None:
        """As a kernel writes a state."""
        self.kv_cache[0][BLOCK] = inputs.T if self._by_channel else inputs
        if matrices is not None:
            written = matrices.transpose(-1, -2).contiguous() if self._keys_first else matrices
            self.kv_cache[1][BLOCK] = written.view(matrices.shape)

    def compute_one_token(self) -> None:
        """The state of a prompt of one token, by the definition of these layers: each head adds a multiple of its value
        times its key, in Mamba 1 each channel its value times its time step times the key."""
        rows, channels = self.layer.states[0].shape[0], sum(self.parts.widths)
        inputs = torch.zeros(rows, channels)
        inputs[-1] = torch.randn(channels)
        window = torch.cat([torch.zeros(1, channels), inputs])
        convolved = (window.T * self.conv1d.weight[:, 0]).sum(1) + self.conv1d.bias
        activated = convolved * convolved.sigmoid()
        if self.parts.key is None:
            steps = torch.log(1 + torch.exp(3 * self._steps))
            self.put(inputs, torch.outer(activated * steps, self.x_proj.weight @ activated))
            return
        split = activated.split(self.parts.widths)
        values, keys = (split[part].view(self.parts.parts[part]) for part in (self.parts.value, self.parts.key))
        shared = len(values) // len(keys)
        products = [(head + 1) * torch.outer(values[head], keys[head // shared]) for head in range(len(values))]
        self.put(inputs, torch.stack(products) if len(self.kv_cache) > 1 else None)


def refuse_to_gather(tensor: torch.Tensor) -> torch.Tensor:
    raise AssertionError("one rank has all of the state")


@pytest.mark.parametrize("keys_first", [False, True])
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_states_come_out_in_the_form_of_the_wire_in_whichever_order_they_lie(
    name: str, by_channel: bool, keys_first: bool
) -> None:
    module = Module(name, by_channel=by_channel, keys_first=keys_first)
    pages = module.pages()
    pages.require_shapes()
    module.compute_one_token()
    pages.detect(BLOCK)
    inputs, *matrices = (torch.randn(shape) for shape in rank_shapes(module.layer.states, module.parts, 1))
    module.put(inputs, matrices[0] if matrices else None)
    read = pages.read(BLOCK, refuse_to_gather)
    assert [tuple(state.shape) for state in read] == [(1, *state.shape) for state in module.layer.states]
    assert torch.equal(torch.cat([state[0] for state in read[: len(windows(module.layer.states))]], -1), inputs)
    assert all(torch.equal(read[-1][0], one) for one in matrices)


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_inputs_in_another_order_are_refused(name: str) -> None:
    module = Module(name)
    pages = module.pages()
    module.compute_one_token()
    module.kv_cache[0][BLOCK] = module.kv_cache[0][BLOCK].flip(0)
    with pytest.raises(ModelError, match="hold inputs in an unknown order"):
        pages.detect(BLOCK)
    assert pages.transposed is None


def test_a_rank_of_mamba_1_that_refuses_its_inputs_computes_what_the_others_wait_for() -> None:
    module = Module("falcon_mamba")
    module.put(torch.zeros_like(module.kv_cache[0][BLOCK]), None)
    with pytest.raises(ModelError, match="hold inputs in an unknown order"):
        module.pages().detect(BLOCK)
    assert module.transforms == 1


@pytest.mark.parametrize("name", ["kimi_linear", "nemotron_h", "falcon_mamba"])
def test_matrices_in_another_order_are_refused(name: str) -> None:
    module = Module(name)
    pages = module.pages()
    module.compute_one_token()
    heads = module.kv_cache[1][BLOCK]
    module.kv_cache[1][BLOCK] = heads.flip(0)
    with pytest.raises(ModelError, match="hold matrices in an unknown order"):
        pages.detect(BLOCK)
    module.kv_cache[1][BLOCK] = 0
    with pytest.raises(ModelError, match="hold matrices in an unknown order"):
        pages.detect(BLOCK)


def test_states_of_another_shape_or_type_are_refused() -> None:
    module = Module("nemotron_h")
    module.kv_cache[0] = torch.zeros(BLOCKS, module.layer.states[0].shape[0] + 2, module.layer.states[0].shape[1])
    with pytest.raises(ModelError, match="have shapes") as refused:
        module.pages().require_shapes()
    assert "speculative decoding" in refused.value.hint
    module = Module("nemotron_h")
    module.kv_cache[1] = module.kv_cache[1].to(torch.float8_e4m3fn)
    with pytest.raises(ModelError, match="are torch"):
        module.pages().require_shapes()


def shard(whole: torch.Tensor, parts: Convolved, ranks: int, rank: int) -> torch.Tensor:
    """The inputs of one rank, of those of the whole model."""
    own = []
    for piece, (heads, width) in zip(whole.split(parts.widths, -1), parts.parts, strict=True):
        first, each = rank * heads // ranks, max(1, heads // ranks)
        own.append(piece[:, first * width : (first + each) * width])
    return torch.cat(own, -1)


@pytest.mark.parametrize(
    ("parts", "ranks"),
    [
        (Convolved(((2, 3), (2, 3), (4, 5))), 2),
        (Convolved(((4, 5), (1, 3), (1, 3))), 2),
        (Convolved(((8, 5), (2, 3), (2, 3))), 4),
        (Convolved(((6, 1),)), 3),
    ],
    ids=["heads", "one group for all", "two ranks for a group", "channels"],
)
def test_the_inputs_of_all_ranks_are_those_of_the_whole_model(parts: Convolved, ranks: int) -> None:
    whole = torch.randn(3, sum(parts.widths))
    shards = [shard(whole, parts, ranks, rank) for rank in range(ranks)]
    assert torch.equal(whole_inputs(torch.stack(shards), parts), whole)


@pytest.mark.parametrize("name", NAMES)
def test_the_states_of_two_ranks_are_put_together(name: str) -> None:
    layer, parts = of(name)
    inputs, *matrices = (torch.randn(shape) for shape in rank_shapes(layer.states, parts, 1))
    shards = [[shard(inputs, parts, 2, rank), *(one.chunk(2)[rank] for one in matrices)] for rank in range(2)]
    first = SimpleNamespace(
        kv_cache=[state[None] for state in shards[0]], get_state_shape=lambda: [state.shape for state in shards[0]]
    )
    pages = StatePages("model.layers.0.mixer", first, layer, parts, 2, transposed=False)
    pages.require_shapes()
    read = pages.read(0, lambda own: torch.stack([states[own.ndim - 2].view(own.shape) for states in shards]))
    assert torch.equal(torch.cat([state[0] for state in read[: len(windows(layer.states))]], -1), inputs)
    assert all(torch.equal(read[-1][0], one) for one in matrices)


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_shapes_are_those_that_vllm_calculates(tmp_path: Path) -> None:
    """For one rank and for two, for every kind of state, also for those that only GPUs compute."""
    answer, errors = tmp_path / "answer", tmp_path / "errors"
    program = vllm_process().start(
        ["states"], os.environ, answer, program="tests.engines.vllm.state_shapes", errors=errors
    )
    try:
        assert program.wait(200) == 0, errors.read_text()[-2000:]
    finally:
        program.kill()
    shapes = json.loads(answer.read_text().splitlines()[-1])
    for kind, name in {
        "gated delta": "qwen3_next",
        "kda": "kimi_linear",
        "mamba 2": "nemotron_h",
        "mamba 1": "falcon_mamba",
        "short": "lfm2",
    }.items():
        layer, parts = of(name)
        for ranks in (1, 2):
            wanted = [tuple(shape) for shape in shapes[kind][str(ranks)]]
            assert rank_shapes(layer.states, parts, ranks) == wanted, (kind, ranks)
