"""KV that an inference engine sends by itself: the order that comes with a prompt, and the report at its end.

A KVOrder travels as `kv_transfer_params["disagg"]` of a request to vLLM, to a connector that may run in several worker
processes. Each worker that sends opens one connection to `report`, writes a ReportHello, and at the end a KVReport,
each as one line of JSON. If either end closes that connection early, the other gives the prompt up.

To a `vllm serve` both ways are JSON over HTTP, and the answer has an OrderAnswer in the same place. `DESCRIBE` instead
of an order asks what the connector is and what it sends.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import Meta

from disagg.api.base import Contract
from disagg.api.names import AS_IS, WireForm
from disagg.api.requests import KVAddress
from disagg.api.status import PreflightFinding

ORDER_FIELD: Final = "disagg"
"""The name of a KVOrder in vLLM's kv_transfer_params."""
DESCRIBE: Final = "describe"
STATES: Final = "states"
"""The finding on the states of a model that has layers with some. A description that comes with the first prompt, which
shows them, does not have it yet."""
MAX_LINE_BYTES: Final = 1 << 16


class KVOrder(Contract, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the KV of one prompt goes. id: a secret that names this order in reports. next_token: the token after those
    that the engine computes, which is part of the hash of the prompt. start: the first token whose KV is wanted.
    deadline_s: seconds for the whole transfer. progress: whether each step is reported, too. sender, weights: for the
    header."""

    id: Annotated[str, Meta(min_length=16, max_length=64)]
    report: KVAddress
    deliver: KVAddress
    ticket: str
    request_id: str
    next_token: Annotated[int, Meta(ge=0, le=2**32 - 1)]
    start: Annotated[int, Meta(ge=0)] = 0
    wire: WireForm = AS_IS
    deadline_s: Annotated[float, Meta(gt=0)]
    progress: bool = False
    sender: str = ""
    weights: str = ""

    def __repr__(self) -> str:
        """The order without its secrets: vLLM logs its requests if a step fails."""
        return f"KVOrder({self.request_id!r}, to {self.deliver.host}:{self.deliver.port})"


class ReportHello(Contract, frozen=True):
    """The first line of a worker. parts: how many workers send a part of this prompt's KV."""

    id: str
    parts: Annotated[int, Meta(ge=1)]


class KVProgress(Contract, frozen=True):
    """A step of vLLM has begun. before, after: tokens of the prompt computed before and after it; those before the
    first step were held. share: of the step's tokens, this prompt's."""

    before: Annotated[int, Meta(ge=0)]
    after: Annotated[int, Meta(ge=0)]
    share: Annotated[float, Meta(gt=0, le=1)]


class KVReport(Contract, frozen=True, kw_only=True):
    """The last line of a worker: one acknowledged part, or the error that ended it. One with `progress` is not the
    last.

    hidden_s: seconds of sending in steps of this prompt, of each its share. exposed_s: from the end of computing the
    last rows to the acknowledgement; vLLM does not wait for the link before. link_bytes_s: the link's rate, if the part
    was large enough to measure it.
    """

    kv_bytes: int = 0
    hidden_s: float = 0.0
    exposed_s: float = 0.0
    link_bytes_s: float | None = None
    error: dict[str, str] | None = None
    progress: KVProgress | None = None


class ConnectorInfo(Contract, frozen=True, kw_only=True):
    """What a `vllm serve` with the connector is and sends. version: of disagg there. context: tokens of its longest
    request. layout, fingerprint: of its model, as in the header of a transfer. kv_bytes: its paged KV cache on all
    ranks. memory_bytes: weights on all ranks. preflight: what its model computes, compared with its checkpoint."""

    version: str
    vllm: str
    torch: str
    device: str
    context: Annotated[int, Meta(ge=1)]
    ranks: Annotated[int, Meta(ge=1)]
    layout: dict[str, Any]
    fingerprint: dict[str, Any]
    kv_bytes: Annotated[int, Meta(ge=0)]
    memory_bytes: Annotated[int, Meta(ge=0)] = 0
    preflight: tuple[PreflightFinding, ...] = ()


class OrderAnswer(Contract, frozen=True, kw_only=True):
    """`kv_transfer_params["disagg"]` of the answer to a request with an order. error: why the order was not taken.
    connector: the answer to DESCRIBE."""

    error: dict[str, str] | None = None
    connector: ConnectorInfo | None = None
