"""What one request cost, and where the time went: computed from the times that its caller noted and the figures that
its hosts sent. Pure.

TTFT = failed_attempts + loading + client + queue + tokenise + prefill + tail + exposed_transfer + ingest + first_step +
whole + network,
with every part >= 0. `failed_attempts`, `loading`, `client` and `whole` are measured on the caller's monotonic clock,
`network` is the rest, and every other part is measured on one server's clock.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from disagg.api.events import DoneEvent, ShippedEvent, Timing
from disagg.api.names import WireForm
from disagg.inference.attempt import Attempt, Method

FASTEST_TOKENS_S: Final = 5000.0
"""An answer that arrives faster was held up on its way and came in one burst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TTFTParts:
    """Seconds. They add up to `Metrics.ttft`."""

    failed_attempts: float = 0.0  # hosts tried before the one that served, KV that was refuted, waits for busy hosts
    loading: float = 0.0  # the model was loaded, on hosts that load what is asked for
    client: float = 0.0  # this program: from the call, and from the slot event, until the request is written
    queue: float = 0.0  # waiting for the prefill engine, and for a place in the decode batch
    tokenise: float = 0.0  # on both hosts
    prefill: float = 0.0  # compute; of a prompt that both hosts compute, that of the prefill host's layers
    tail: float = 0.0  # the decode host's layers of such a prompt, while nothing else of it was in work
    exposed_transfer: float = 0.0  # the prefill waited for the link, and its end -> last KV byte accepted
    ingest: float = 0.0  # received bytes -> engine cache, and its audit
    first_step: float = 0.0  # the last prompt token through the model
    whole: float = 0.0  # a whole-request host, which states no parts: request written -> first piece of the answer
    network: float = 0.0  # the rest: wire latency, HTTP and scheduling

    @property
    def total(self) -> float:
        return float(sum(asdict(self).values()))


@dataclass(frozen=True, slots=True)
class Metrics:
    """One request. Times in seconds, speeds in tokens per second.

    prefill_time: prefill compute; of a prompt that both hosts compute, until all of its layers are. decode_time: first
    token -> last token, on the host that generates them; 0 if a whole-request host's answer arrived in one burst.
    total_time: sent -> last token (E2E).
    prefill_speed = computed prompt tokens / prefill_time; None if no host computed more than the last, or it is
    unknown.
    decode_speed = (completion_tokens - 1) / decode_time; None if there is one token only, or decode_time is 0.
    hidden_transfer: seconds of sending while this prompt's prefill computed, at most prefill_time.
    decode_computed_tokens: prompt tokens that the decode host ran through the model itself, for the answer.
    audited_tokens: those that it ran to audit the KV that it received. deviation: what that KV differed by, as a share
    of the bound beyond which it is refuted; None if it was not audited.
    decode_server: the host that generated the answer, also a whole-request host; None if a prefill host did, alone.
    kv_wire: the form in which the decode host received the KV, "as-is" or "int8-g64"; None if it received none.
    simulated: no model ran; the times are predicted.
    local: why the decode host computed the rest of the prompt without a hand-off; empty if it did not.
    held_tokens: prompt tokens whose KV the decode host had from earlier requests.
    layers: of the model, that the prefill host computed of the prompt, while the decode host computed the others; None:
    one host computed all. resumed_at: prompt tokens whose KV had arrived when the prefill host failed, after which the
    decode host went on alone; None if that did not happen. tail_time: what the decode host's layers took, most of it
    while the prefill host computed.
    resumed_tokens: tokens of the answer that came from hosts that failed before its end. If there are any, ttft and its
    parts are those of the attempt that brought the first token; what its answering host would have stated is lost with
    it and part of `network`. Prefill, transfers and kv_bytes are those of all attempts from that one on, as far as
    their hosts stated them, and decode_time is on the caller's clock, with what the changes of hosts took. The hosts,
    and what an answering host counts, are those of the attempt that ended the answer.
    """

    method: Method
    model: str
    prefill_server: str | None
    decode_server: str | None
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prefill_time: float
    decode_time: float
    total_time: float
    prefill_speed: float | None
    decode_speed: float | None
    ttft: float
    ttft_parts: TTFTParts
    hidden_transfer: float
    exposed_transfer: float
    kv_bytes: int
    decode_computed_tokens: int
    kv_wire: WireForm | None = None
    simulated: bool = False
    local: str = ""
    held_tokens: int = 0
    resumed_tokens: int = 0
    audited_tokens: int = 0
    deviation: float | None = None
    layers: int | None = None
    resumed_at: int | None = None
    tail_time: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Trace:
    """The caller's times of one attempt, by time.monotonic(); 0 until they are known.

    A hand-off is two requests: the first, to the decode host, is written at `requested`; the second, to the prefill
    host, at `ordered`, which stays 0 if one host does everything.

    called: the caller asked for the answer. began: the attempt began; later than `called` if others failed before it.
    resumed_tokens: tokens of the answer that had arrived by then. earlier: the attempts before this one, from that on
    which brought the first of them.
    shipped: the prefill host's figures, once the attempt has ended, if they arrived before. replaced_s: for so long the
    first prefill host computed until it failed and the second was asked, to which `slot` and `ordered` belong.
    loading_s: of the time before `began`, that in which the model was loaded.
    requested, ordered: the body of the request was about to be written. slot: the slot event of the first arrived.
    """

    attempt: Attempt
    model: str
    called: float
    began: float
    requested: float = 0.0
    slot: float = 0.0
    ordered: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    resumed_tokens: int = 0
    earlier: tuple[Trace, ...] = ()
    shipped: ShippedEvent | None = None
    replaced_s: float = 0.0
    loading_s: float = 0.0

    def follow(self, before: Trace, tokens: int) -> None:
        """This attempt goes on after `tokens` tokens of the answer, the last of which the attempt before it brought."""
        self.resumed_tokens, self.earlier = tokens, (*before.earlier, before)
        self.first_token, self.last_token = before.first_token, before.last_token

    def ended(self, now: float) -> None:
        """The answer is complete. One without tokens begins and ends now."""
        self.first_token = self.first_token or now
        self.last_token = self.last_token or now


def metrics(trace: Trace, done: DoneEvent, shipped: ShippedEvent | None = None) -> Metrics:
    """The request's figures. `shipped`: the prefill host's figures of a hand-off, None if there are none.

    The network's share of TTFT is what the other parts leave. No two parts cover the same moment, so that it is never
    negative: the client's end when a request is about to be written, before the server can have read it.
    """
    timing, attempt = done.timing, trace.attempt
    if done.refuted:  # what was sent has not contributed
        shipped = None
    ttft = (trace.first_token or trace.last_token or trace.called) - trace.called
    attempts = [(trace, timing, shipped), *((one, _left(one), one.shipped) for one in trace.earlier)]
    sent = [stated for *_, stated in attempts if stated is not None]
    prefill_s = sum(one.compute_s + one.starved_s for one in sent) + timing.tail_s
    prefill_s += 0.0 if shipped else timing.compute_s
    computed = sum(one.computed_tokens for one in sent) + (0 if shipped else done.computed_prompt_tokens)
    opening = trace.earlier[0] if trace.earlier else None
    parts = _parts(opening, ttft, _left(opening), opening.shipped) if opening else _parts(trace, ttft, timing, shipped)
    # A host's own: several events that arrive in one packet would give speeds that no engine has.
    decode_s = _arrival(trace, done) if attempt.method == "whole" or opening else timing.decode_s
    return Metrics(
        method="local" if done.local else "fallback" if done.refuted else attempt.method,
        model=trace.model,
        prefill_server=attempt.prefill.name if attempt.prefill and not (done.local or done.refuted) else None,
        decode_server=attempt.decode.name if attempt.decode else None,
        prompt_tokens=done.prompt_tokens,
        completion_tokens=done.completion_tokens,
        total_tokens=done.prompt_tokens + done.completion_tokens,
        prefill_time=prefill_s,
        decode_time=decode_s,
        total_time=trace.last_token - trace.called,
        prefill_speed=_prefill_speed(done, computed, prefill_s),
        decode_speed=_rate(done.completion_tokens - 1, decode_s),
        ttft=ttft,
        ttft_parts=parts,
        hidden_transfer=sum(one.hidden_transfer_s for one in sent),
        exposed_transfer=sum(_exposed(one, stated, its) for one, its, stated in attempts),
        kv_bytes=sum(one.kv_bytes for one in sent),
        decode_computed_tokens=done.computed_prompt_tokens if attempt.decode else 0,
        kv_wire=done.kv_wire,
        simulated=done.simulated,
        local=done.local,
        held_tokens=done.held_tokens,
        resumed_tokens=trace.resumed_tokens,
        audited_tokens=done.audited_tokens,
        deviation=done.deviation,
        layers=done.layers,
        resumed_at=done.resumed_at,
        tail_time=timing.tail_compute_s,
    )


def _left(trace: Trace) -> Timing:
    """What is known of the timing of an answering host that failed: if its attempt brought the first token, the KV was
    accepted by then."""
    return Timing(kv_wait_s=math.inf if trace.earlier else trace.first_token - trace.slot)


def _prefill_speed(done: DoneEvent, computed_tokens: int, seconds: float) -> float | None:
    """Computed prompt tokens per second; None if all but the last were held: a pass over one shows no prompt's
    speed."""
    if done.prompt_tokens - done.held_tokens <= 1:
        return None
    return _rate(computed_tokens, seconds)


def _arrival(trace: Trace, done: DoneEvent) -> float:
    """First piece -> last piece, as they arrived here; 0, unknown, if they came in one burst."""
    seconds = trace.last_token - trace.first_token
    return seconds if done.completion_tokens - 1 <= FASTEST_TOKENS_S * seconds else 0.0


def _parts(trace: Trace, ttft: float, timing: Timing, shipped: ShippedEvent | None) -> TTFTParts:
    """Where the time to the first token went, which this attempt brought. If the prefill host states no figures and the
    decode host has computed the prompt itself, the wait for the KV counts as lost."""
    waited_s = timing.kv_wait_s if shipped is None and timing.compute_s else 0.0
    lost_s = timing.refuted_s + waited_s
    known = TTFTParts(
        failed_attempts=trace.began - trace.called - trace.loading_s + trace.replaced_s + lost_s,
        loading=trace.loading_s,
        client=max(0.0, trace.requested - trace.began) + (0.0 if lost_s else _order_s(trace)),
        queue=timing.queue_s + (shipped.queue_s if shipped else 0.0),
        tokenise=timing.tokenise_s + (shipped.tokenise_s if shipped else 0.0),
        prefill=shipped.compute_s + min(0.0, _accepted_s(trace, shipped, timing)) if shipped else timing.compute_s,
        tail=(shipped.starved_s if shipped else 0.0) + timing.tail_s,
        exposed_transfer=_exposed(trace, shipped, timing),
        ingest=timing.ingest_s,
        first_step=timing.first_step_s,
        whole=max(0.0, trace.called + ttft - trace.requested) if trace.attempt.method == "whole" else 0.0,
    )
    return replace(known, network=ttft - known.total)


def _order_s(trace: Trace) -> float:
    """The caller's time from the slot event until the request to the prefill host."""
    return max(0.0, trace.ordered - trace.slot)


def _exposed(trace: Trace, shipped: ShippedEvent | None, timing: Timing) -> float:
    """The prompt waited for the link, and end of prefill compute -> KV accepted. Each host sees one end only: the
    smaller of two upper bounds.

    The prefill host's bound includes the acknowledgement's way back to it, during which the decode host already works
    (48 ms were seen on a busy machine). The decode host's is `_accepted_s`.
    """
    if shipped is None:
        return 0.0
    return max(0.0, min(shipped.exposed_transfer_s, _accepted_s(trace, shipped, timing)))


def _accepted_s(trace: Trace, shipped: ShippedEvent, timing: Timing) -> float:
    """What of the time until the KV was accepted was neither queue nor compute. It includes the caller's time until the
    request to the prefill host, which is not transfer, and that request's way. Less than 0 if the prefill host learnt
    late that its rows were computed, as of vLLM's workers: by then this request did not wait for it any more."""
    stated_s = shipped.tokenise_s + shipped.queue_s + shipped.compute_s + shipped.starved_s
    return timing.kv_wait_s - (_order_s(trace) + stated_s)


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if tokens > 0 and seconds > 0 else None
