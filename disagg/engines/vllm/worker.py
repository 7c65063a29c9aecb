"""A worker's side of the connector: reads the rows of each step from the pages and sends them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from disagg.api.layout import Layout
from disagg.engines.model.architectures.base import ReadByVLLM
from disagg.engines.model.architectures.patches import VLLM_PATCHES
from disagg.engines.model.reference import Reference
from disagg.engines.sending.shipment import Shipment, report_failure
from disagg.engines.staging import RowEmitter
from disagg.engines.vllm import pages as page_forms
from disagg.engines.vllm.scheduler import Begun, PromptPiece, StepOrders
from disagg.engines.vllm.served.description import RankInfo, rank_info
from disagg.engines.vllm.sharding import Sharding
from disagg.engines.vllm.states import StatePages
from disagg.errors import DisaggError, HandoffError, ModelError
from disagg.kv.frames import Header
from disagg.kv.parts import Part


@dataclass(slots=True)
class _Sending:
    """One prompt in a worker. send: takes the rows of one layer; see RowEmitter."""

    shipment: Shipment
    send: RowEmitter


class WorkerSide:
    """Reads the rows of each piece from the pages, and sends those of this rank's heads."""

    def __init__(self, config: Any, groups: Any, rank: int) -> None:
        """config: a VllmConfig. groups: the groups of layers that share a table of blocks."""
        _require_no_context_parallelism(config.parallel_config)
        reference = Reference.open(config.model_config.model, config.model_config.max_model_len)
        self._profile = reference.profile
        dtype = str(config.model_config.dtype).removeprefix("torch.")
        self._layout: Layout = reference.layout(dtype)
        self._fingerprint = reference.fingerprint
        parallel = config.parallel_config
        reference.require_for_vllm(config.device_config.device_type, parallel.tensor_parallel_size)
        self._sharding = Sharding.of(
            self._layout, parallel.tensor_parallel_size, getattr(parallel, "pipeline_parallel_size", 1)
        )
        self._rank = rank
        self._layers: Sequence[int] = ()  # of this stage of a pipeline
        self._part: Part | None = None
        self._config = config
        self._device = torch.device(config.device_config.device_type)
        to_read = ReadByVLLM(reference.text_config, self._device.type)
        for patch in VLLM_PATCHES:  # in this process; the engine's, or `vllm serve`, may be another one
            patch.apply(to_read)
        _require_read(config.model_config, to_read.overrides)
        self._groups = {name: (n, group.kv_cache_spec) for n, group in enumerate(groups) for name in group.layer_names}
        self._forms: dict[str, page_forms.Form] = {}
        self._pages: dict[str, torch.Tensor] = {}
        self._places = Places(reference.split.places, reference.split.layers)
        self._convolved = reference.convolved
        self._states: dict[int, StatePages] = {}  # by the layer of the layout, ascending
        self._unsent: list[int] = []  # of those, the ones that this step has not sent yet
        self._shown: tuple[list[int], ...] | None = None
        self.refusal: ModelError | None = None  # why nothing of this model is sent
        self.seen: str | None = None  # of the states that this step has shown: why they cannot be read, "" if they can
        self._tables = page_forms.PageTables()
        self._sending: dict[str, _Sending] = {}
        self._pieces: list[PromptPiece] = []
        self._layers_run = 0  # of any prompt
        self.on_layer: Callable[[], None] = lambda: None

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        """Check every layer's pages, and find out how they hold rows. ModelError if a layer cannot be read. How they
        hold states is found out by the first prompt."""
        modules = self._config.compilation_config.static_forward_context
        own = {name: tensor for name, tensor in caches.items() if name in self._groups}  # others read those of these
        names = {True: list[str](), False: list[str]()}
        for name in own:
            names[hasattr(modules[name], "get_state_shape")].append(name)
        self._layers = self._require_layers(names[False], names[True])
        self._part = self._sharding.part(self._rank, self._layers)
        for name in names[False]:
            layer, tensor = self._layout.layers[self._places.of(name)], own[name]
            heads, block_size = self._sharding.heads_of(layer), self._groups[name][1].block_size
            page_forms.require_shape(name, tensor, layer, self._layout.dtype, heads=heads, block_size=block_size)
            self._forms[name] = page_forms.detect(tensor, partial(_write, modules[name]), layer)
            self._pages[name] = tensor
        for index, name in sorted((self._places.of(name), name) for name in names[True]):
            layer = self._layout.layers[index]
            pages = StatePages(name, modules[name], layer, self._convolved, self._sharding.ranks)
            pages.require_shapes()
            self._states[index] = pages
            self.refusal = ModelError(
                "no prompt has shown how vLLM's pages hold states", "start the prefill host, which computes one"
            )

    def describe(self) -> RankInfo:
        """What this rank's model computes. For `vllm serve`, where nobody else can ask the workers."""
        modules = self._config.compilation_config.static_forward_context
        own = replace(self._profile, layers=tuple(self._profile.layers[index] for index in self._layers))
        return rank_info(self._config, own, self._convolved, [modules[name] for name in self._forms])

    def begin(self, orders: StepOrders) -> None:
        """A step begins: the shipments of its new prompts are opened, those of dropped ones end."""
        self._tables.clear()
        for id in orders.dropped:
            if (sending := self._sending.pop(id, None)) is not None:
                sending.shipment.abort()
        for sending in self._sending.values():
            sending.shipment.end_step()
        self._shown, self.seen = orders.shown, None
        self._unsent = list(self._states)
        self._pieces = orders.pieces if self._part is not None or self._states else []
        for piece in self._pieces if self._part is not None else ():
            if piece.begun is not None and (opened := self._open(piece.begun)) is not None:
                self._sending[piece.id] = opened
            if (sending := self._sending.get(piece.id)) is not None:
                sending.shipment.step(piece.share)

    def save(self, name: str) -> None:
        """A layer has run: send what this step has added to it. What fails here ends one prompt; raised into vLLM it
        would end all."""
        self.on_layer()
        self._layers_run += 1
        if name in self._pages:
            self._send_states(before=self._places.of(name))
            for piece in self._pieces:
                sending = self._sending.get(piece.id)
                if sending is not None:
                    try:
                        self._send(sending, piece, name)
                    except Exception as error:  # noqa: BLE001 - out of memory, for one
                        sending.shipment.fail(_handoff_error(error))

    def end(self) -> None:
        """The step has ended, or on CUDA is queued."""
        self._send_states(before=len(self._layout.layers))
        if self._shown is not None and self._states:
            self._detect_states(self._shown)
        for piece in self._pieces:
            if piece.last and (sending := self._sending.pop(piece.id, None)) is not None:
                sending.shipment.computed(_end_of_queue() if self._device.type == "cuda" else None)
        self._pieces = []

    def close(self) -> None:
        """Give up what is not sent."""
        for sending in self._sending.values():
            sending.shipment.abort()
        self._sending = {}

    def _open(self, begun: Begun) -> _Sending | None:
        """Open the shipment of a prompt. None, with a report to the engine, if no descriptors, threads or memory are
        left."""
        order, part = begun.order, self._part
        assert part is not None
        if self.refusal is not None:
            report_failure(order, self._sharding.parts, self.refusal)
            return None
        header = Header(
            ticket=order.ticket,
            request_id=order.request_id,
            fingerprint=self._fingerprint,
            layout=self._layout,
            token_hash=begun.token_hash,
            tokens=begun.tokens,
            start=order.start,
            wire=order.wire,
            part=part,
            parts=self._sharding.parts,
            sender=order.sender,
            weights=order.weights,
        )
        try:
            shipment = Shipment(order, header, lambda: self._layers_run)
        except Exception as error:  # noqa: BLE001 - see `save`
            report_failure(order, header.parts, _handoff_error(error))
            return None
        try:
            emitter = RowEmitter(
                self._layout, begun.tokens, self._device, shipment.send, wire=order.wire, start=order.start, copied=True
            )
        except Exception as error:  # noqa: BLE001 - as above
            shipment.fail(_handoff_error(error))
            return None
        return _Sending(shipment, emitter)

    def _send(self, sending: _Sending, piece: PromptPiece, name: str) -> None:
        index = self._places.of(name)
        rows = sending.send.wanted(index, piece.rows)
        if not rows:
            return
        (group, spec), pages = self._groups[name], self._pages[name]
        pieces = spec.block_size // pages.shape[2]
        where = self._tables.of(
            (piece.id, group), rows, piece.tables[group], spec.block_size, pages.device, pieces=pieces
        )
        key_dim = self._layout.layers[index].key_dim
        sending.send(index, rows.start, *page_forms.read(pages, where, self._forms[name], key_dim))

    def _send_states(self, before: int) -> None:
        """Send the states of the layers before this one that have run, of the prompts whose last tokens this step
        computes. vLLM shows a connector no other moment of these layers. All ranks do the same, also those that
        send nothing: they have a part of each state."""
        while self._unsent and self._unsent[0] < before:
            index = self._unsent.pop(0)
            pages = self._states[index]
            for piece in self._pieces:
                sending = self._sending.get(piece.id)
                if not piece.last or self.refusal is not None or (sending is None and self._sharding.ranks == 1):
                    continue
                try:
                    tensors = pages.read(self._state_block(pages.name, piece.tables, piece.rows.stop), _gathered)
                    if sending is not None and self._part is not None and self._part.states:
                        sending.send.state(index, tensors)
                except Exception as error:  # noqa: BLE001 - out of memory, for one
                    if sending is not None:
                        sending.shipment.fail(_handoff_error(error))

    def _state_block(self, name: str, tables: Sequence[Sequence[int]], tokens: int) -> int:
        """The block that holds a layer's state after so many tokens."""
        group, spec = self._groups[name]
        return page_forms.blocks_of(range(tokens - 1, tokens), tables[group], spec.block_size)[0]

    def _detect_states(self, tables: Sequence[Sequence[int]]) -> None:
        """Find out how states lie in the pages, from those of a prompt of one token. All ranks come to the same end:
        later they put states together, for which each waits for the others."""
        if self.refusal is not None:
            self.refusal = self._refusal_of_states(tables)
            if self._sharding.ranks > 1:
                # float32: vLLM's CPU build gathers no integers
                read = _gathered(torch.tensor([self.refusal is None], dtype=torch.float32, device=self._device))
                if self.refusal is None and not read.all():
                    self.refusal = ModelError("another rank cannot read its states", "see the log of vLLM")
        self.seen = "" if self.refusal is None else self.refusal.message

    def _refusal_of_states(self, tables: Sequence[Sequence[int]]) -> ModelError | None:
        """The first reason. All layers are looked at: in Mamba 1 the ranks compute something together for each."""
        found: ModelError | None = None
        for pages in self._states.values():
            try:
                pages.detect(self._state_block(pages.name, tables, 1))
            except DisaggError as error:
                found = found or ModelError(error.message, error.hint)
            except Exception as error:  # noqa: BLE001 - raised into vLLM it would end all its requests
                hint = "use the engine transformers for this model"
                found = found or ModelError(f"vLLM's states cannot be read: {error!r}", hint)
        return found

    def _require_layers(self, rows: Sequence[str], states: Sequence[str]) -> Sequence[int]:
        """The layers of the layout that these names stand for, of those with rows and of those with states: all, or in
        a pipeline some. ModelError if they are others."""
        layers = self._layout.layers
        wanted = [
            [n for n, layer in enumerate(layers) if layer.kv_heads],
            [n for n, layer in enumerate(layers) if layer.states],
        ]
        found = [sorted(self._places.of(name) for name in names) for names in (rows, states)]
        every = self._sharding.stages == 1
        for here, whole in zip(found, wanted, strict=True):
            if len(set(here)) < len(here) or (here != whole if every else not set(here) <= set(whole)):
                raise ModelError(
                    f"vLLM has KV caches for layers {here} of a model with {whole}",
                    "use a model whose layers have attention or a state, each with a KV cache of its own",
                )
        return sorted({*found[0], *found[1]})


class Places:
    """Which layer of the layout vLLM's name of one stands for. places: the layers of the model that the layout has.
    layers: how many the model has."""

    def __init__(self, places: Sequence[int], layers: int) -> None:
        self._index = {place: index for index, place in enumerate(places)}
        self._layers = layers

    def of(self, name: str) -> int:
        """3 for "model.layers.3.self_attn.attn" if all layers before it keep something. falcon_h1 numbers the states of
        its layers after all of them. ModelError for a layer that should keep nothing."""
        number = next(int(part) for part in name.split(".") if part.isdecimal())
        if number not in self._index and number - self._layers in self._index:
            number -= self._layers
        if number not in self._index:
            raise ModelError(
                f"vLLM has a KV cache for {name}, and the checkpoint none", "start vLLM without speculative decoding"
            )
        return self._index[number]


def _require_read(model: Any, overrides: Mapping[str, Any]) -> None:
    """ModelError if vLLM has read something else in config.json than it needs to compute the model alike: a `vllm
    serve` that was started without these. model: its ModelConfig."""
    for key, value in overrides.items():
        if getattr(model.hf_text_config, key, None) != value:
            whole = {key: value} if model.hf_text_config is model.hf_config else {"text_config": {key: value}}
            raise ModelError(
                f"vLLM computes this model otherwise than its config.json states, without another {key}",
                f"start it with --hf-overrides '{json.dumps(whole)}'",
            )


def _require_no_context_parallelism(parallel: Any) -> None:
    """ModelError if the ranks hold other rows of a prompt, which their pages do not show."""
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            raise ModelError(f"vLLM runs with {name} = {size}, whose pages are not read", f"set {name} to 1")


def _write(module: Any, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """Write rows [T, heads, dim] as vLLM does when it computes them: into the pages that the module has, which on some
    GPUs are cut into smaller blocks than the ones that are registered. Latent attention has no heads, and its rotated
    part comes as the values."""
    if hasattr(module, "kv_lora_rank"):
        scale = module.kv_cache_dtype, module._k_scale
        module.impl.do_kv_cache_update(keys[:, 0], values, module.kv_cache, slots, *scale)
    else:
        module.impl.do_kv_cache_update(module, keys, values, module.kv_cache, slots)


def _end_of_queue() -> Callable[[], None]:
    """A wait for what the computing stream has been given so far."""
    event = torch.cuda.Event()
    event.record()
    wait: Callable[[], None] = event.synchronize
    return wait


def _handoff_error(error: Exception) -> DisaggError:
    if isinstance(error, DisaggError):
        return error
    return HandoffError(f"the KV could not be read or sent: {error!r}", "see the server's log")


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The tensors of all ranks that share the heads, in order."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    gathered: torch.Tensor = group.all_gather(tensor[None].contiguous(), dim=0)
    return gathered
