"""The transfer of one prompt's KV, from the request that asks for it to its end: who sends it, where, in which form."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from disagg import logs
from disagg.api.layout import Layout
from disagg.api.names import AS_IS, INT8, WireForm
from disagg.api.requests import KVAddress, PromptSpeed
from disagg.config import Fleet, Host, KVWire, load
from disagg.engines.base import EmittingEngine, PrefillEngine, PrefillRun, PrefillTiming, SendingEngine, SendingRun
from disagg.errors import Cancelled, DisaggError, RequestError
from disagg.files import stamp
from disagg.kv.frames import Header
from disagg.kv.sent import LinkWait, SentKV
from disagg.kv.transfer import Transfer

E = TypeVar("E", bound=PrefillEngine)
MARGIN = 1.25  # how much longer the transfer must be than the compute: rates are known to about a tenth
RATED_TOKENS = 512  # the speed of a shorter prompt does not predict that of longer ones
FRESH_S = 600.0  # older measurements are ignored, so that as-is transfers measure the link again
MIN_TRANSFERS = 2  # the first transfer to a decode host ran at a quarter of the rate: its memory was not touched yet
MAX_TRANSFERS = 8
Address = tuple[str, int]


class Receivers:
    """The decode hosts that the KV of one host's model may go to: those of this model that hosts.toml names. The lists
    of hosts with several models change while a process of such a host runs, which reads them again for an address that
    it does not know."""

    def __init__(self, fleet: Fleet, host: Host) -> None:
        self._fleet, self._host = fleet, host
        self._read: object = None

    def require(self, to: KVAddress) -> None:
        """Raises RequestError for any other address."""
        if not self._has(to):
            self._read_again()
        if not self._has(to):
            raise RequestError(
                f"deliver: {to.host}:{to.port} is no decode host of {self._host.model}",
                "give both hosts the same hosts.toml",
            )

    def _has(self, to: KVAddress) -> bool:
        known = self._fleet.serving(self._host.model, "decode")
        return any(to.host == host.kv_address and to.port in host.kv_ports for host in known)

    def _read_again(self) -> None:
        now = stamp(self._fleet.path)
        if self._host.keeper and now is not None and now != self._read:
            self._read = now
            try:
                self._fleet = load(self._fleet.path)
            except DisaggError as error:
                logs.event(logging.WARNING, "hosts_not_read", **error.to_json())


class Delivery(ABC, Generic[E]):
    """The transfer of a prompt's KV to `to`, as `header` states. tokens: all of the prompt; the KV is that of all but
    the last.

    `start` and `finish` are called on worker threads, the rest anywhere.
    """

    def __init__(
        self,
        engine: E,
        tokens: Sequence[int],
        to: tuple[str, int],
        header: Header,
        *,
        deadline: float,
        salt: str,
        beats: Callable[[], int],
    ) -> None:
        """beats: how many pieces of work the engine has finished; the transfer states them while it sends nothing."""
        self._engine, self._tokens, self._salt = engine, tokens, salt
        self._to, self._header, self._deadline, self._beats = to, header, deadline, beats
        self._ended = False

    @abstractmethod
    def start(self) -> PrefillRun:
        """The run that computes the prompt, and the transfer of its KV. Raises Cancelled after `end`."""

    @abstractmethod
    def finish(self, timing: PrefillTiming, waits: Sequence[LinkWait]) -> SentKV:
        """Wait until the decode host has acknowledged all KV of a prompt that was computed so, with these waits for the
        link."""

    @abstractmethod
    def queued_bytes(self) -> int:
        """KV that waits to be sent."""

    def starved(self) -> bool:
        """Whether the decode host, which computes the rest of the layers, takes no more for now."""
        return False

    @abstractmethod
    def end(self) -> None:
        """Abort the transfer unless it has finished. Does not wait."""


def delivery_by(engine: PrefillEngine) -> type[Delivery[Any]]:
    """How the KV of this engine's prompts is delivered: by itself if it can."""
    return EngineDelivery if isinstance(engine, SendingEngine) else OwnDelivery


class OwnDelivery(Delivery[EmittingEngine]):
    """A Transfer of the blocks that the engine emits, opened when its computation begins."""

    _transfer: Transfer | None = None

    def start(self) -> PrefillRun:
        header, engine = self._header, self._engine
        return engine.start(
            self._tokens[:-1],
            self._open().send,
            start=header.start,
            wire=header.wire,
            salt=self._salt,
            layers=(header.layers or engine.info.split.layers) if header.chunks else None,
        )

    def finish(self, timing: PrefillTiming, waits: Sequence[LinkWait]) -> SentKV:
        result = self._open().finish()
        self._ended = True
        return result.sent(timing.ended, timing.steps, waits)

    def queued_bytes(self) -> int:
        """0 after a failure, which the next step is to find."""
        transfer = self._transfer
        return transfer.queued_bytes if transfer is not None and transfer.failed is None else 0

    def starved(self) -> bool:
        """False after a failure, as above."""
        transfer = self._transfer
        return transfer is not None and transfer.failed is None and transfer.starved

    def end(self) -> None:
        finished, self._ended = self._ended, True
        if self._transfer is not None and not finished:
            threading.Thread(target=self._transfer.abort, name="kv-abort", daemon=True).start()

    def _open(self) -> Transfer:
        if self._transfer is None:
            self._transfer = Transfer(*self._to, self._header, deadline=self._deadline, beats=self._beats)
            if self._ended:  # meanwhile
                self._transfer.abort()
        if self._ended:
            raise Cancelled("the request was cancelled before its KV was sent")
        return self._transfer


class EngineDelivery(Delivery[SendingEngine]):
    """A transfer by the engine itself. Closing the run, which its scheduler does, aborts it."""

    _run: SendingRun | None = None

    def start(self) -> PrefillRun:
        if self._ended:
            raise Cancelled("the request was cancelled before its KV was sent")
        self._run = self._engine.send(
            self._tokens[:-1],
            self._to,
            self._header,
            deadline=self._deadline,
            next_token=self._tokens[-1],
            salt=self._salt,
        )
        return self._run

    def finish(self, timing: PrefillTiming, waits: Sequence[LinkWait]) -> SentKV:
        """The engine's workers know themselves when they computed, and never wait for the link."""
        assert self._run is not None, "nothing was started"
        return self._run.sent()

    def queued_bytes(self) -> int:
        """0: what waits is with the engine's workers. `Policy.kv_bytes` bounds it, for all started prompts together."""
        return 0

    def end(self) -> None:
        self._ended = True


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates of this host's computation, of all layers, and of one link; None if not measured yet."""

    tokens_s: float | None = None
    link_bytes_s: float | None = None


def choose_form(wanted: KVWire, layout: Layout, tokens: int, rates: Rates, layers: float = 1.0) -> WireForm:
    """The form for the KV of a prompt of `tokens` tokens. Never a quantised form that is not smaller. layers: the share
    of the model's layers that is computed here, whose layout this is."""
    nbytes = layout.nbytes(tokens)
    if wanted == "as-is" or layout.nbytes(tokens, wire=INT8) == nbytes:
        return AS_IS
    if wanted == "int8":
        return INT8
    if rates.link_bytes_s is None or rates.tokens_s is None:
        return AS_IS
    return INT8 if nbytes / rates.link_bytes_s > MARGIN * layers * tokens / rates.tokens_s else AS_IS


@dataclass(frozen=True, slots=True)
class _Measurement:
    bytes_s: float
    ended: float  # time.monotonic()


class _Link:
    """What recent transfers have shown of one link: those that were bound by it, and what all have carried at least."""

    def __init__(self) -> None:
        self.rates: deque[_Measurement] = deque(maxlen=MAX_TRANSFERS)
        self.carried: deque[_Measurement] = deque(maxlen=MAX_TRANSFERS)


class MeasuredRates:
    """The rates of recent transfers, by destination: decode hosts of hosts.toml, a bounded number."""

    def __init__(self) -> None:
        self._tokens_s: float | None = None
        self._by_length: dict[int, PromptSpeed] = {}  # of the last prompts, by the bits of their numbers of tokens
        self._links: dict[Address, _Link] = {}

    @property
    def speeds(self) -> Sequence[PromptSpeed]:
        """Of prompts of different lengths: attention makes long ones slower."""
        return list(self._by_length.values())

    def add(self, to: Address, timing: PrefillTiming, sent: SentKV, layers: float = 1.0) -> None:
        """Record a transfer that was acknowledged. layers: as of `choose_form`."""
        if timing.tokens >= RATED_TOKENS and timing.compute_s > 0:
            self._tokens_s = speed = layers * timing.tokens / timing.compute_s
            self._by_length[timing.tokens.bit_length()] = PromptSpeed(timing.tokens, speed)
        link = self._links.setdefault(to, _Link())
        for seen, rate in ((link.rates, sent.link_bytes_s), (link.carried, sent.carried_bytes_s)):
            if rate is not None:
                seen.append(_Measurement(rate, sent.acknowledged))

    def rates(self, to: Address, now: float | None = None) -> Rates:
        """The rates at `now` (time.monotonic()): the best of the link's recent transfers. Those that kept up with the
        computation raise it, but do not give it: a link that was never the bottleneck has none."""
        since = (time.monotonic() if now is None else now) - FRESH_S
        link = self._links.get(to, _Link())
        rates, carried = (
            [one.bytes_s for one in list(seen) if one.ended > since] for seen in (link.rates, link.carried)
        )
        return Rates(self._tokens_s, max(*rates, *carried) if len(rates) >= MIN_TRANSFERS else None)

    def links(self, now: float | None = None) -> dict[str, float]:
        """The rate of each link that is known at `now`, by "address:port"."""
        known = {f"{host}:{port}": self.rates((host, port), now).link_bytes_s for host, port in list(self._links)}
        return {name: rate for name, rate in known.items() if rate is not None}
