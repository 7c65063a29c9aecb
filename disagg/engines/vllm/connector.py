"""The KV connector that vLLM loads: it sends the KV of prompts that carry a KVOrder, layer by layer.

In Python: KVTransferConfig(kv_connector="DisaggConnector", kv_connector_module_path="disagg.engines.vllm.connector",
kv_role="kv_producer"). vLLM makes the class twice: for the scheduler, and in every worker, which may be other
processes. The scheduler's side decides which rows each step adds (`rows`), the worker's reads and sends them.

Rows are copied out of the pages in the order of the computation, before any later step can reuse a block. So no block
is kept for a transfer, and none can be left behind by one that fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from disagg import logs
from disagg.api.base import InvalidValue
from disagg.api.delivery import ORDER_FIELD, KVOrder
from disagg.engines.model import checkpoint
from disagg.engines.staging.emit import RowEmitter
from disagg.engines.vllm import pages as page_forms
from disagg.engines.vllm.rows import PromptRows, Sharding, wanted
from disagg.engines.vllm.shipment import Shipment
from disagg.errors import DisaggError, ModelError
from disagg.kv.fingerprint import token_hash
from disagg.kv.layout import Layout
from disagg.kv.wire.frames import Header


@dataclass(frozen=True, slots=True)
class Begun:
    """A prompt at its first step. token_hash: of the prompt and the token after it."""

    order: KVOrder
    tokens: int
    token_hash: str


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step adds to one prompt. share: of the step's tokens, this prompt's. last: no more rows follow."""

    id: str
    rows: range
    tables: tuple[list[int], ...]  # per group of layers
    share: float
    held: int
    last: bool
    begun: Begun | None = None


@dataclass
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler's side passes to the workers with one step."""

    pieces: list[Piece] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepShare:
    """One request in the newest step: tokens computed before and after it. share: of the step's tokens, its own."""

    before: int
    after: int
    share: float


class _Prompt:
    """A request of the scheduler's side that carries an order."""

    def __init__(self, request: Any, order: KVOrder) -> None:
        self.request, self.order = request, order
        self.rows = PromptRows(request.num_prompt_tokens)
        self.begun = False

    def begin(self) -> Begun | None:
        if self.begun:
            return None
        self.begun = True
        return Begun(self.order, self.rows.tokens, token_hash([*self.request.prompt_token_ids, self.order.next_token]))


class SchedulerSide:
    """Turns the scheduler's steps into pieces. `shares`: the newest step, by the id that vLLM gave the request."""

    def __init__(self) -> None:
        self._prompts: dict[str, _Prompt] = {}
        self._dropped: list[str] = []
        self.shares: dict[str, StepShare] = {}

    @property
    def prompts(self) -> int:
        """Requests with an order that are not finished."""
        return len(self._prompts)

    def add(self, request: Any) -> None:
        """A request was given blocks. An order that cannot be read is ignored, and the log says so."""
        params = request.kv_transfer_params or {}
        if ORDER_FIELD not in params or request.request_id in self._prompts:
            return
        try:
            order = KVOrder.from_json(params[ORDER_FIELD])
        except InvalidValue as error:
            logs.log.error("kv_order_refused", extra={"fields": {"message": str(error)}})
            return
        self._prompts[request.request_id] = _Prompt(request, order)

    def step(self, output: Any) -> StepOrders:
        """The pieces of the step that the scheduler has planned."""
        computed = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        total = max(1, output.total_num_scheduled_tokens)
        self.shares = {}
        orders = StepOrders(dropped=self._dropped)
        self._dropped = []
        for id, scheduled in output.num_scheduled_tokens.items():
            self.shares[id] = StepShare(computed[id], computed[id] + scheduled, scheduled / total)
            prompt = self._prompts.get(id)
            if prompt is not None and not prompt.rows.complete:
                orders.pieces.append(self._piece(id, prompt, output))
        return orders

    def _piece(self, id: str, prompt: _Prompt, output: Any) -> Piece:
        share = self.shares[id]
        rows = prompt.rows.step(share.before, share.after - share.before)
        tables = output.kv_connector_block_state.get_block_ids(id)
        return Piece(id, rows, tables, share.share, prompt.rows.held or 0, prompt.rows.complete, prompt.begin())

    def finished(self, id: str) -> None:
        """A request ended in any way. One whose rows are not complete was dropped."""
        prompt = self._prompts.pop(id, None)
        if prompt is not None and prompt.begun and not prompt.rows.complete:
            self._dropped.append(id)


@dataclass(slots=True)
class _Sending:
    """One prompt in a worker. send: takes the rows of one layer; see RowEmitter."""

    shipment: Shipment
    send: RowEmitter
    begun: Begun
    seconds: float = 0.0


class WorkerSide:
    """Reads the rows of each piece from the pages, and sends those of this rank's heads."""

    def __init__(self, config: VllmConfig, groups: Any) -> None:
        path = checkpoint.resolve(config.model_config.model)
        reference = checkpoint.reference_profile(path, config.model_config.max_model_len)
        dtype = str(config.model_config.dtype).removeprefix("torch.")
        self._layout: Layout = checkpoint.layout(reference, dtype)
        self._fingerprint = checkpoint.fingerprint(reference)
        self._sharding = Sharding.of(self._layout, config.parallel_config.tensor_parallel_size)
        self._rank = get_tensor_model_parallel_rank()
        self._part = self._sharding.part(self._rank)
        self._config = config
        self._groups = {name: (n, group.kv_cache_spec) for n, group in enumerate(groups) for name in group.layer_names}
        self._reads: dict[str, page_forms.Read] = {}
        self._places = page_forms.Places()
        self._sending: dict[str, _Sending] = {}
        self._pieces: list[Piece] = []
        self._began = 0.0
        self.on_layer: Callable[[], None] = lambda: None

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        """Check every layer's pages, and find out how they hold rows. ModelError if a layer cannot be read."""
        layers = {layer_index(name) for name in caches}
        if layers != set(range(len(self._layout.layers))):
            raise ModelError(
                f"vLLM has KV caches for layers {sorted(layers)} of a model with {len(self._layout.layers)}",
                "use a model of plain attention layers, and pipeline_parallel_size 1",
            )
        heads = max(1, self._sharding.heads // self._sharding.ranks)
        modules = self._config.compilation_config.static_forward_context
        for name, tensor in caches.items():
            layer, module = self._layout.layers[layer_index(name)], modules[name]
            page_forms.require_shape(name, tensor, layer, heads, self._layout.dtype)

            def write(
                keys: torch.Tensor,
                values: torch.Tensor,
                slots: torch.Tensor,
                tensor: Any = tensor,
                module: Any = module,
            ) -> None:
                module.impl.do_kv_cache_update(module, keys, values, tensor, slots)

            self._reads[name] = page_forms.detect(tensor, write, layer)

    def begin(self, orders: StepOrders) -> None:
        """A step begins: the shipments of its new prompts are opened, those of dropped ones end."""
        self._began = time.monotonic()
        self._places.clear()
        for id in orders.dropped:
            if (sending := self._sending.pop(id, None)) is not None:
                sending.shipment.abort()
        self._pieces = orders.pieces if self._part is not None else []
        for piece in self._pieces:
            if piece.begun is not None:
                self._sending[piece.id] = self._open(piece.begun)

    def save(self, name: str, tensor: torch.Tensor) -> None:
        """A layer has run: send what this step has added to it."""
        self.on_layer()
        for piece in self._pieces:
            sending = self._sending.get(piece.id)
            if sending is not None:
                try:
                    self._send(sending, piece, name, tensor)
                except DisaggError as error:
                    sending.shipment.fail(error)

    def end(self) -> None:
        """The step has ended."""
        seconds = time.monotonic() - self._began
        for piece in self._pieces:
            sending = self._sending.get(piece.id)
            if sending is not None:
                sending.seconds += piece.share * seconds
                if piece.last:
                    sending.shipment.computed(sending.seconds, piece.held)
                    del self._sending[piece.id]
        self._pieces = []

    def close(self) -> None:
        """Give up what is not sent."""
        for sending in self._sending.values():
            sending.shipment.abort()
        self._sending = {}

    def _open(self, begun: Begun) -> _Sending:
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
        )
        shipment = Shipment(order, header)
        device = torch.device(self._config.device_config.device_type)
        emitter = RowEmitter(
            self._layout, begun.tokens, device, shipment.send, wire=order.wire, start=order.start, copied=True
        )
        return _Sending(shipment, emitter, begun)

    def _send(self, sending: _Sending, piece: Piece, name: str, tensor: torch.Tensor) -> None:
        index = layer_index(name)
        rows = wanted(self._layout.layers[index], piece.rows, sending.begun.tokens, sending.shipment.start)
        if not rows:
            return
        group, spec = self._groups[name]
        blocks, offsets = self._places.of((piece.id, group), rows, piece.tables[group], spec.block_size, tensor.device)
        keys, values = self._reads[name](tensor, blocks, offsets)
        sending.send(index, rows.start, keys, values)


def layer_index(name: str) -> int:
    """3 for "model.layers.3.self_attn.attn"."""
    return next(int(part) for part in name.split(".") if part.isdecimal())


class DisaggConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """What vLLM calls. The methods of either side pass on to it."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.scheduler = SchedulerSide()
        self.worker: WorkerSide | None = None
        if role == KVConnectorRole.WORKER:
            self.worker = WorkerSide(vllm_config, kv_cache_config.kv_cache_groups)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """A full CUDA graph would skip save_kv_layer."""
        return True

    # the scheduler's side

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Nothing is received here."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler.add(request)

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        return self.scheduler.step(scheduler_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The blocks are free at once: their rows have been copied."""
        return self.request_finished(request, [])

    # the worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepOrders)
        self._worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is received here."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is received here."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        self._worker.save(layer_name, kv_layer)

    def wait_for_save(self) -> None:
        self._worker.end()

    def shutdown(self) -> None:
        if self.worker is not None:
            self.worker.close()

    @property
    def _worker(self) -> WorkerSide:
        assert self.worker is not None, "this is the scheduler's side"
        return self.worker
