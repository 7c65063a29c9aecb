"""A worker's side of the connector: reads the rows of each step from the pages and sends them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from disagg.api.layout import Layout
from disagg.engines.model.reference import Reference
from disagg.engines.sending.shipment import Shipment, report_failure
from disagg.engines.staging import RowEmitter
from disagg.engines.vllm import pages as page_forms
from disagg.engines.vllm.scheduler import Begun, PromptPiece, StepOrders
from disagg.engines.vllm.served.description import RankInfo, rank_info
from disagg.engines.vllm.sharding import Sharding
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
        self._sharding = Sharding.of(
            self._layout, parallel.tensor_parallel_size, getattr(parallel, "pipeline_parallel_size", 1)
        )
        self._rank = rank
        self._layers: Sequence[int] = ()  # of this stage of a pipeline
        self._part: Part | None = None
        self._config = config
        self._device = torch.device(config.device_config.device_type)
        self._groups = {name: (n, group.kv_cache_spec) for n, group in enumerate(groups) for name in group.layer_names}
        self._forms: dict[str, page_forms.Form] = {}
        self._pages: dict[str, torch.Tensor] = {}
        self._tables = page_forms.PageTables()
        self._sending: dict[str, _Sending] = {}
        self._pieces: list[PromptPiece] = []
        self._layers_run = 0  # of any prompt
        self.on_layer: Callable[[], None] = lambda: None

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        """Check every layer's pages, and find out how they hold rows. ModelError if a layer cannot be read."""
        self._layers = self._require_layers(caches)
        self._part = self._sharding.part(self._rank, self._layers)
        modules = self._config.compilation_config.static_forward_context
        for name, tensor in caches.items():
            layer, module = self._layout.layers[layer_index(name)], modules[name]
            heads, block_size = self._sharding.heads_of(layer), self._groups[name][1].block_size
            page_forms.require_shape(name, tensor, layer, self._layout.dtype, heads=heads, block_size=block_size)
            self._forms[name] = page_forms.detect(tensor, partial(_write, module), layer)
            self._pages[name] = tensor

    def describe(self) -> RankInfo:
        """What this rank's model computes. For `vllm serve`, where nobody else can ask the workers."""
        modules = self._config.compilation_config.static_forward_context
        own = replace(self._profile, layers=tuple(self._profile.layers[index] for index in self._layers))
        return rank_info(self._config, own, [modules[name] for name in self._forms])

    def begin(self, orders: StepOrders) -> None:
        """A step begins: the shipments of its new prompts are opened, those of dropped ones end."""
        self._tables.clear()
        for id in orders.dropped:
            if (sending := self._sending.pop(id, None)) is not None:
                sending.shipment.abort()
        for sending in self._sending.values():
            sending.shipment.end_step()
        self._pieces = orders.pieces if self._part is not None else []
        for piece in self._pieces:
            if piece.begun is not None and (opened := self._open(piece.begun)) is not None:
                self._sending[piece.id] = opened
            if (sending := self._sending.get(piece.id)) is not None:
                sending.shipment.step(piece.share)

    def save(self, name: str) -> None:
        """A layer has run: send what this step has added to it. What fails here ends one prompt; raised into vLLM it
        would end all."""
        self.on_layer()
        self._layers_run += 1
        for piece in self._pieces:
            sending = self._sending.get(piece.id)
            if sending is not None:
                try:
                    self._send(sending, piece, name)
                except Exception as error:  # noqa: BLE001 - out of memory, for one
                    sending.shipment.fail(_handoff_error(error))

    def end(self) -> None:
        """The step has ended, or on CUDA is queued."""
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
        index = layer_index(name)
        rows = sending.send.wanted(index, piece.rows)
        if not rows:
            return
        (group, spec), pages = self._groups[name], self._pages[name]
        where = self._tables.of((piece.id, group), rows, piece.tables[group], spec.block_size, pages.device)
        key_dim = self._layout.layers[index].key_dim
        sending.send(index, rows.start, *page_forms.read(pages, where, self._forms[name], key_dim))

    def _require_layers(self, names: Collection[str]) -> Sequence[int]:
        """The layers that these names stand for: all, or in a pipeline some. ModelError if they are others."""
        found, every = sorted({layer_index(name) for name in names}), range(len(self._layout.layers))
        if not (set(found) < set(every) if self._sharding.stages > 1 else found == list(every)):
            raise ModelError(
                f"vLLM has KV caches for layers {found} of a model with {len(every)}",
                "use a model whose layers have attention, each with a KV cache of its own",
            )
        if shared := [layer_index(name) for name in names if name not in self._groups]:
            raise ModelError(
                f"vLLM's layers {shared} read the KV of earlier ones, which is not told apart from their own",
                "use the engine transformers for this model",
            )
        return found


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


def layer_index(name: str) -> int:
    """3 for "model.layers.3.self_attn.attn"."""
    return next(int(part) for part in name.split(".") if part.isdecimal())
