"""Whether a model fits a host's memory: weights as its engine holds them, KV, workspace. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from disagg.api.engines import engines_for
from disagg.config import Host, Model
from disagg.config.document import toml_key
from disagg.config.memory import SYSTEM_BYTES, loading_of
from disagg.fleet.facts.findings import Finding, fault, warning
from disagg.fleet.facts.host import HardwareFacts
from disagg.planning.checkpoint import Packing, stored_weights
from disagg.planning.devices import DEVICES
from disagg.planning.memory import Need, layers_that_fit, need
from disagg.planning.sizing import stored
from disagg.units import size


@dataclass(frozen=True, slots=True)
class Fit:
    """What a model needs on a host, and the room there is. machine: what has this room, for messages. own: whether it
    is a card's own memory, and not the system's. machine_room: without hosts.toml's limit for the host. packing: of the
    stored weights, if it is known. layers: of the model, if they are known; fitting: the first of them that fit, if the
    engine can load these alone."""

    host: Host
    need: Need
    room: int
    machine: str
    own: bool
    machine_room: int = 0
    packing: Packing | None = None
    layers: int | None = None
    fitting: int = 0

    @property
    def check(self) -> str:
        return "gpu" if self.own else "memory"

    @property
    def must(self) -> int:
        """Without these bytes the model cannot be served there."""
        return self.need.total if self.host.engine.kind.memory.paged else self.need.least

    @property
    def table(self) -> str:
        """The table of hosts.toml with the engine's options."""
        if self.host.keeper:
            return f"[models.{toml_key(self.host.model)}.engine.{self.host.engine.name}]"
        return f"[hosts.{self.host.name}.engine]"

    @property
    def needed(self) -> str:
        """`needs 38.1 GiB: weights 29.6 GiB (FP8), KV 3 GiB, workspace 5.5 GiB`."""
        to_send = f"KV to send {size(self.need.to_send)}, " if self.need.to_send else ""
        parts = (
            f"weights {size(self.need.weights)} ({self.need.form}), KV {size(self.need.kv)}, "
            f"{to_send}workspace {size(self.need.workspace)}"
        )
        return f"{self.host.model} needs {size(self.need.total)}: {parts}"


def fit(
    host: Host,
    model: Model,
    hardware: HardwareFacts,
    os: str,
    *,
    config: Mapping[str, Any] | None = None,
    nbytes: int | None = None,
) -> Fit | None:
    """What a host needs for its model, and has. config, nbytes: config.json and the size of the files that it holds;
    without them, what is known of the source. None if either side is unknown, or the host's server loads no model."""
    if not host.engine.kind.loads:
        return None
    device = _device(host, hardware, os)
    room = _room(host, hardware, device)
    known = stored_weights(config, model.name, nbytes) if config else stored(model.sources[host.engine.name])
    if room is None or (known is None and nbytes is None):
        return None
    of_machine = room[0]
    budget = host.keeping.memory_bytes if host.keeping is not None else None
    if budget is not None and budget < room[0]:
        room = budget, f"memory_bytes of {host.table}", room[-1]
    loading = loading_of(host, model, device, own=room[-1])
    if known is None:
        return Fit(host, Need(nbytes or 0, loading.kv_bytes, 0, 0, to_send=loading.to_send_bytes), *room, of_machine)
    fitting = layers_that_fit(known, loading, room[0]) if "layers" in host.engine.kind.options else 0
    needed, layers = need(known, loading), known.shape.layers
    return Fit(host, needed, *room, of_machine, known.packing, layers, fitting)


def unmet(found: Fit) -> Iterator[Finding]:
    """Why the model cannot be served there, and what to change; a warning if it can as long as its KV stays below the
    limit of hosts.toml."""
    host, needed, memory = found.host, found.need, found.host.engine.kind.memory
    option = memory.kv_of(host.roles)
    check, table = found.check, found.table
    if host.engine.quantization == "mxfp4" and found.packing not in ("mxfp4", None):
        yield fault(
            check,
            f'quantization = "mxfp4" keeps MXFP4 weights as they are, and those of {host.model} are not MXFP4',
            f"take it out of {table}, or name an MXFP4 checkpoint as the source",
        )
    first = host.engine.first_layers
    if first is not None and found.layers is not None and first > found.layers:
        yield fault(
            check,
            f'layers = "0:{first}" loads {first} layers, and {host.model} has {found.layers}',
            f"take it out of {table}, or load fewer",
        )
    if memory.paged and (kv := getattr(host.engine, option)) < needed.one_request:
        yield fault(
            check,
            f"{option} of {host.name} is {size(kv)}, and one request of "
            f"the whole context takes {size(needed.one_request)}",
            f"{option} = {_up(needed.one_request)} in {table}, or a smaller context of the model",
        )
    room = f"{found.needed}; {found.machine} has room for {size(found.room)}"
    if found.must > found.room:
        yield fault(check, room, _hint(found, table))
    elif found.room < needed.total:
        yield warning(check, room, f"{option} = {_kv_that_fits(found)} in {table}")


def unmet_together(found: Sequence[Fit], others: Sequence[Fit]) -> Iterator[Finding]:
    """Why models that each fit alone do not fit together. found: of the models of one host; others: of those that other
    hosts of this machine have loaded from their start on. A model that is loaded when it is asked for has room if it
    fits beside those that stay."""
    fitting = [one for one in found if one.must <= one.room]
    stay = [one for one in fitting if _stays(one.host)]
    for kept, why in ((stay, "stay loaded"), ([one for one in fitting if _starts(one.host)], "are loaded at start")):
        if len(kept) > 1 and sum(one.must for one in kept) > kept[0].room:
            hint = f"fewer in preload and pin of [hosts.{kept[0].host.table}], or smaller max_kv_bytes"
            yield fault(kept[0].check, f"{_sum(kept)}, which {why}; {_room_of(kept[0])}", hint)
            return
    for one in fitting:
        beside = [other for other in stay if other is not one]
        if beside and sum(other.must for other in (one, *beside)) > one.room:
            hint = f"take one out of pin of [hosts.{one.host.table}]"
            yield fault(one.check, f"{_sum([one, *beside])}, of which the others stay loaded; {_room_of(one)}", hint)
    mine = [one for one in fitting if _starts(one.host)]
    for one in mine[:1]:
        same = [other for other in others if (other.own, other.host.engine.device) == (one.own, one.host.engine.device)]
        room = max(other.machine_room for other in (one, *same))
        if same and sum(other.must for other in (*mine, *same)) > room:
            hint = "models = [...] with ports in place of model loads what is asked for; or a smaller max_kv_bytes"
            what = f"{_sum([*mine, *same])}, on one machine, which has room for {size(room)}"
            yield fault(one.check, what, hint)


def loaded_at_start(found: Sequence[Fit]) -> list[Fit]:
    """Those whose model is loaded from the start of their server on."""
    return [one for one in found if _starts(one.host)]


def _starts(host: Host) -> bool:
    return host.keeping is None or host.model in host.keeping.preload


def _stays(host: Host) -> bool:
    return host.keeping is None or host.model in host.keeping.pin


def _sum(found: Sequence[Fit]) -> str:
    parts = ", ".join(f"{one.host.model} on {one.host.table} {size(one.must)}" for one in found)
    return f"{size(sum(one.must for one in found))} for {parts}"


def _room_of(found: Fit) -> str:
    return f"{found.machine} has room for {size(found.room)}"


def _device(host: Host, hardware: HardwareFacts, os: str) -> str:
    """What computes: "cuda", "gpu" (Apple's) or "cpu"."""
    name = host.engine.device
    if name != "auto":
        return "gpu" if name == "mps" else name.partition(":")[0]
    return "gpu" if os == "Darwin" else "cuda" if hardware.gpus and "cuda" in host.engine.kind.devices else "cpu"


def _room(host: Host, hardware: HardwareFacts, device: str) -> tuple[int, str, bool] | None:
    """Bytes for the model, what has them, and whether they are a card's own."""
    card = next((gpu for gpu in hardware.gpus if gpu.memory), None)
    if device == "cuda" and card is not None and card.memory is not None:
        return card.memory, card.name, True
    if hardware.memory is not None:
        return hardware.memory - SYSTEM_BYTES, f"the machine of {size(hardware.memory)}", False
    if host.hardware is None:
        return None
    device_model = DEVICES[host.hardware]
    nbytes = int(device_model.memory_gb * 1e9)
    return nbytes - SYSTEM_BYTES, f"{device_model.title} of {size(nbytes)}", False


def _hint(found: Fit, table: str) -> str:
    host, needed = found.host, found.need
    if _kv_that_fits(found) >= needed.one_request:
        return f"{host.engine.kind.memory.kv_of(host.roles)} = {_kv_that_fits(found)} in {table}"
    head = f'; or layers = "0:{found.fitting}" there, to compute these layers of prompts only' if found.fitting else ""
    return _smaller(found, table) + head


def _smaller(found: Fit, table: str) -> str:
    """Which form of the weights would take less."""
    host, needed = found.host, found.need
    other = next((one.name for one in engines_for("prefill", loads=True) if not one.memory.dequantises), "")
    if "dequantised" in needed.form:
        kept = f'; with {host.engine.name} on CUDA: quantization = "mxfp4"' if "MXFP4" in needed.form else ""
        return f'name = "{other}" in {table} holds the weights as stored{kept}'
    if host.engine.kind.memory.dequantises and host.engine.quantization != "mxfp4":
        return f'name = "{other}" in {table} and a `{other}` source with FP8 or MXFP4 weights; or a larger machine'
    return "a checkpoint with fewer bits per weight, a smaller model, or a larger machine"


def _kv_that_fits(found: Fit) -> int:
    """Bytes of KV beside weights and workspace, in whole GiB if there is one. With KV to send, for each rank."""
    left = found.room - found.need.weights - found.need.workspace
    if found.need.to_send:
        left //= 2 * found.host.engine.ranks_here
    return left >> 30 << 30 if left >= 1 << 30 else left


def _up(nbytes: int) -> int:
    """The next whole GiB."""
    return -(-nbytes >> 30) << 30
