"""The KV connector that vLLM loads: it sends the KV of prompts that carry a KVOrder, layer by layer.

In Python: KVTransferConfig(kv_connector="DisaggConnector", kv_connector_module_path="disagg.engines.vllm.connector",
kv_role="kv_producer"); to `vllm serve`, --kv-transfer-config with the same as JSON. vLLM makes the class twice: for the
scheduler, and in every worker, which may be other processes. The scheduler's side (`scheduler`) decides which rows each
step adds, the worker's (`worker`) reads and sends them.

Rows are copied out of the pages in the order of the computation, before any later step can reuse a block. So no block
is kept for a transfer, and none can be left behind by one that fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from disagg.api.delivery import ORDER_FIELD
from disagg.engines.vllm.nodes import end_with_parent
from disagg.engines.vllm.scheduler import SchedulerSide, StepOrders
from disagg.engines.vllm.served.description import RankInfo, connector_info
from disagg.engines.vllm.worker import WorkerSide


@dataclass
class RankMetadata(KVConnectorHandshakeMetadata):
    """RankInfo as vLLM passes it to the scheduler's side."""

    info: RankInfo


@dataclass
class SeenMetadata(KVConnectorWorkerMetadata):
    """Why a rank cannot read the states that a step has shown, "" if it can; as vLLM passes it to the scheduler's
    side."""

    refusal: str

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """The first refusal of all ranks."""
        return self if self.refusal else other


@dataclass
class StepMetadata(KVConnectorMetadata):
    """StepOrders as vLLM passes them to its workers."""

    orders: StepOrders


class DisaggConnector(KVConnectorBase_V1, SupportsHMA):
    """What vLLM calls. The methods of either side pass on to it."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.scheduler = SchedulerSide()
        self._describe = partial(connector_info, vllm_config, kv_cache_config)
        self.worker: WorkerSide | None = None
        if role == KVConnectorRole.WORKER:
            if vllm_config.parallel_config.nnodes > 1:
                end_with_parent()
            self.worker = WorkerSide(vllm_config, kv_cache_config.kv_cache_groups, get_tensor_model_parallel_rank())

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

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return StepMetadata(self.scheduler.step(scheduler_output))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler.finished(request.request_id)
        answer = self.scheduler.answer(request)
        return False, None if answer is None else {ORDER_FIELD: answer.to_json()}

    def update_connector_output(self, connector_output: Any) -> None:
        """A step has ended on all ranks."""
        if isinstance(seen := connector_output.kv_connector_worker_meta, SeenMetadata):
            self.scheduler.seen = seen.refusal

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """What the ranks are, from `get_handshake_metadata` of each. The key: its stage, and its rank there."""
        self.scheduler.info = self._describe([one.info for _, one in sorted(metadata.items())])

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The blocks are free at once: their rows have been copied."""
        return self.request_finished(request, [])

    # the worker's side

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What this rank is, for the scheduler's side in `vllm serve`."""
        return RankMetadata(self._worker.describe()) if envs.VLLM_ENABLE_V1_MULTIPROCESSING else None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        self._worker.begin(connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is received here."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is received here."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        self._worker.save(layer_name)

    def wait_for_save(self) -> None:
        self._worker.end()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What this step has shown of the states."""
        return None if self._worker.seen is None else SeenMetadata(self._worker.seen)

    def shutdown(self) -> None:
        if self.worker is not None:
            self.worker.close()

    @property
    def _worker(self) -> WorkerSide:
        assert self.worker is not None, "this is the scheduler's side"
        return self.worker
