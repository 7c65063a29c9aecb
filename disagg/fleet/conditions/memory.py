"""Whether a model fits a host's memory: weights as its engine holds them, KV, workspace. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from disagg.api.engines import engines_for
from disagg.config import Host, Model
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
    is a card's own memory, and not the system's. packing: of the stored weights, if it is known. layers: of the model,
    if they are known; fitting: the first of them that fit, if the engine can load these alone."""

    host: Host
    need: Need
    room: int
    machine: str
    own: bool
    packing: Packing | None = None
    layers: int | None = None
    fitting: int = 0

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
    loading = loading_of(host, model, device, own=room[-1])
    if known is None:
        return Fit(host, Need(nbytes or 0, loading.kv_bytes, 0, 0, to_send=loading.to_send_bytes), *room)
    fitting = layers_that_fit(known, loading, room[0]) if "layers" in host.engine.kind.options else 0
    return Fit(host, need(known, loading), *room, packing=known.packing, layers=known.shape.layers, fitting=fitting)


def unmet(found: Fit) -> Iterator[Finding]:
    """Why the model cannot be served there, and what to change; a warning if it can as long as its KV stays below the
    limit of hosts.toml."""
    host, needed, memory = found.host, found.need, found.host.engine.kind.memory
    option = memory.kv_of(host.roles)
    check, table = "gpu" if found.own else "memory", f"[hosts.{host.name}.engine]"
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
    must = needed.total if memory.paged else needed.least
    room = f"{found.needed}; {found.machine} has room for {size(found.room)}"
    if must > found.room:
        yield fault(check, room, _hint(found, table))
    elif found.room < needed.total:
        yield warning(check, room, f"{option} = {_kv_that_fits(found)} in {table}")


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
