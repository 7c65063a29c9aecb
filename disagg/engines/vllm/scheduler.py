"""The scheduler's side of the connector: which rows each step of vLLM's scheduler adds to which prompt. Imports no
framework, so that it is tested without one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from disagg.api.base import InvalidValue
from disagg.api.delivery import DESCRIBE, ORDER_FIELD, STATES, ConnectorInfo, KVOrder, KVProgress, OrderAnswer
from disagg.api.status import PreflightFinding
from disagg.errors import HandoffError
from disagg.kv.fingerprint import token_hash

Shares = Mapping[str, KVProgress]
MAX_PLANNED: Final = 256  # steps; a `vllm serve` takes none of them


@dataclass(frozen=True, slots=True)
class Begun:
    """A prompt at its first step. token_hash: that of the prompt and the token after it."""

    order: KVOrder
    tokens: int
    token_hash: str


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """What one step adds to one prompt. last: no more rows follow. share: the prompt's part of the step."""

    id: str
    rows: range
    tables: tuple[list[int], ...]  # per group of layers
    last: bool
    share: KVProgress
    begun: Begun | None = None


@dataclass
class StepOrders:
    """What this side passes to the workers with one step."""

    pieces: list[PromptPiece] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    shown: tuple[list[int], ...] | None = None
    """The tables of a prompt of which this step computes the first token, and no more: its states show their order."""


@dataclass(slots=True)
class PromptRows:
    """What has been sent of one prompt. tokens: how many the prompt has. sent: rows before this one were sent, or never
    will be."""

    tokens: int
    sent: int = 0

    def step(self, computed: int, scheduled: int) -> range:
        """The rows that become available in a step which computes `scheduled` tokens after `computed` ones. The first
        step also has those of a cached prefix; after a preemption none comes twice."""
        rows = range(self.sent, max(self.sent, min(computed + scheduled, self.tokens)))
        self.sent = rows.stop
        return rows

    @property
    def complete(self) -> bool:
        """Whether no row is left."""
        return self.sent >= self.tokens


class _Prompt:
    """A request of the scheduler's side that carries an order."""

    def __init__(self, request: Any, order: KVOrder) -> None:
        self.request, self.order = request, order
        self.rows = PromptRows(request.num_prompt_tokens)
        self.begun = False

    def begin(self) -> Begun | None:
        if self.begun:
            return None
        hashed = token_hash([*self.request.prompt_token_ids, self.order.next_token])
        self.begun = True
        return Begun(self.order, self.rows.tokens, hashed)


class SchedulerSide:
    """Turns the scheduler's steps into pieces. planned: who has which share of each step that nobody has taken from
    it yet, by the id that vLLM gave the request. info: what is answered to DESCRIBE. Requests with DESCRIBE are prompts
    of one token, which show the workers in which order states lie. seen: why these cannot be read, "" if they can; None
    before the end of the first such step."""

    def __init__(self) -> None:
        self.info: ConnectorInfo | None = None
        self.seen: str | None = None
        self._described: set[str] = set()
        self._prompts: dict[str, _Prompt] = {}
        self._dropped: list[str] = []
        self.planned: deque[Shares] = deque(maxlen=MAX_PLANNED)

    @property
    def prompts(self) -> int:
        """Requests with an order that are not finished."""
        return len(self._prompts)

    def add(self, request: Any) -> None:
        """A request was given blocks, perhaps not for the first time."""
        if request.request_id not in self._prompts:
            order = _order(request)
            if isinstance(order, KVOrder):
                self._prompts[request.request_id] = _Prompt(request, order)
            elif order == DESCRIBE:
                self._described.add(request.request_id)

    def answer(self, request: Any) -> OrderAnswer | None:
        """What a request that ends is answered, for `vllm serve`; None if it has no order."""
        order = _order(request)
        if order is None or isinstance(order, OrderAnswer):
            return order
        return OrderAnswer(connector=self._description() if order == DESCRIBE else None)

    def _description(self) -> ConnectorInfo | None:
        if self.info is None or self.seen is None:
            return self.info
        finding = PreflightFinding(STATES, "refused" if self.seen else "ok", self.seen or "as one token shows them")
        return replace(self.info, preflight=(*self.info.preflight, finding))

    def step(self, output: Any) -> StepOrders:
        """The pieces of the step that the scheduler has planned."""
        computed = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        total = max(1, output.total_num_scheduled_tokens)
        shares: dict[str, KVProgress] = {}
        self.planned.append(shares)
        orders = StepOrders(dropped=self._dropped)
        self._dropped = []
        for id, scheduled in output.num_scheduled_tokens.items():
            share = shares[id] = KVProgress(computed[id], computed[id] + scheduled, scheduled / total)
            if id in self._described and share == KVProgress(0, 1, share.share):
                orders.shown = output.kv_connector_block_state.get_block_ids(id)
            prompt = self._prompts.get(id)
            if prompt is not None and not prompt.rows.complete:
                try:
                    orders.pieces.append(self._piece(id, prompt, share, output))
                except Exception as error:  # noqa: BLE001 - raised here, it would end vLLM for all its callers
                    orders.dropped += self._give_up(id, prompt, error)
        return orders

    def _piece(self, id: str, prompt: _Prompt, share: KVProgress, output: Any) -> PromptPiece:
        rows = prompt.rows.step(share.before, share.after - share.before)
        tables = output.kv_connector_block_state.get_block_ids(id)
        return PromptPiece(id, rows, tables, prompt.rows.complete, share, prompt.begin())

    def _give_up(self, id: str, prompt: _Prompt, error: Exception) -> list[str]:
        """Answer this prompt with an error; vLLM computes it all the same. The ids that its workers are to drop."""
        del self._prompts[id]
        failure = HandoffError(f"a step of the prompt cannot be sent: {error!r}", "report this with vLLM's version")
        prompt.request.kv_transfer_params[ORDER_FIELD] = OrderAnswer(error=failure.to_json())
        return [id] if prompt.begun else []

    def finished(self, id: str) -> None:
        """A request ended in any way. One whose rows are not complete was dropped."""
        self._described.discard(id)
        prompt = self._prompts.pop(id, None)
        if prompt is not None and prompt.begun and not prompt.rows.complete:
            self._dropped.append(id)


class ComputedStep(NamedTuple):
    """A step that has ended, by time.monotonic(), and who had which share of it."""

    began: float
    ended: float
    shares: Shares


class StepTimes:
    """When steps were computed. In a pipeline several are under way: a step is planned by one call of the engine, and
    ends in a later one. The time of a step begins when the one before it ended, if that was after its plan."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[float, Shares]] = deque()
        self._ended = 0.0

    def plan(self, began: float, shares: Shares) -> None:
        """A step was planned in a call of the engine that began then."""
        self._under_way.append((began, shares))

    def end(self, now: float, left: int) -> Iterator[ComputedStep]:
        """The steps that have ended by now, all but the newest `left` ones."""
        while len(self._under_way) > left:
            planned, shares = self._under_way.popleft()
            yield ComputedStep(max(planned, self._ended), now, shares)
            self._ended = now


def _order(request: Any) -> KVOrder | str | OrderAnswer | None:
    """The order of a request: as it is from the same process, and as JSON from `vllm serve`. DESCRIBE as it is. The
    answer to one that is refused; None without one. JSON is replaced by what is returned, for vLLM logs a request's
    parameters if a step fails, and the JSON has secrets."""
    params = request.kv_transfer_params
    if not isinstance(params, dict):  # a caller of vLLM can make it anything
        return None
    given = params.get(ORDER_FIELD)
    if given is None or given == DESCRIBE or isinstance(given, KVOrder | OrderAnswer):
        return given
    params[ORDER_FIELD] = order = _read(given, request)
    return order


def _read(given: Any, request: Any) -> KVOrder | OrderAnswer:
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        failure = HandoffError("a prompt of embeddings has no hash of its tokens", "send token ids")
        return OrderAnswer(error=failure.to_json())
    try:
        return KVOrder.from_json(given)
    except InvalidValue as error:
        failure = HandoffError(
            f"the order of KV cannot be read: {error}",
            "install the same version of disagg on the prefill host and beside vLLM",
        )
        return OrderAnswer(error=failure.to_json())
