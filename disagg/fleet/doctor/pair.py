"""Findings between hosts: the model of a pair, versions in the fleet, clocks. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from disagg.config import Fleet, Model, served_digest
from disagg.fleet.doctor.gather import HostReadings
from disagg.fleet.facts.findings import Finding, fault, note, ok, warning
from disagg.fleet.lifecycle.status.compare import ROTATE
from disagg.fleet.lifecycle.status.host_status import HostStatus
from disagg.fleet.link.judge import hidden_tokens_per_s
from disagg.fleet.link.measure import MeasuredLink
from disagg.fleet.tokens.there import grouped
from disagg.planning.checkpoint import kv_bytes_per_token
from disagg.units import counted, size

FAST_CLOCK_S: Final = 1.0
"""From this difference on, logs merged by time are in the wrong order."""
FALSE_CLOCK_S: Final = 300.0
"""From this difference on, certificates of package index and hub may be rejected."""
_DECIDING: Final = (
    "model_type",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


def same_model(
    model: str, prefill: HostReadings, decode: HostReadings, statuses: Mapping[str, HostStatus]
) -> Iterator[Finding]:
    """Whether both ends have the same files of a model of theirs: by their servers' fingerprints, else by the files."""
    names = f"{prefill.host.name} and {decode.host.name}"
    which = f"{model}: " if prefill.host.keeps or decode.host.keeps else ""
    pull = f"disagg models rm '{model}' && disagg models pull '{model}'"
    marks = [statuses[one.host.name].fingerprint if one.host.name in statuses else None for one in (prefill, decode)]
    if marks[0] is not None and marks[1] is not None:
        first, second = marks[0].to_json(), marks[1].to_json()
        if differing := sorted(name for name in first if first[name] != second[name]):
            yield fault("model", f"{names} serve different models: {', '.join(differing)} differ", pull)
        else:
            yield ok("model", f"{which}the same fingerprint on both servers")
        return
    ends = [one.stored[model] for one in (prefill, decode) if model in one.stored and one.stored[model].complete]
    if len(ends) < 2:
        return  # each host's own findings name the missing model
    config, tokens = (
        _differing_configs(ends[0].config, ends[1].config),
        _differing_digests(ends[0].digests, ends[1].digests),
    )
    if config:
        yield fault("model", f"{names} hold different models: {', '.join(config)} of config.json differ", pull)
    elif ends[0].source == ends[1].source and ends[0].revision != ends[1].revision:
        revisions = f"{ends[0].revision[:8]} and {ends[1].revision[:8]}"
        yield fault("model", f"{names} hold different revisions of {ends[0].source}: {revisions}", pull)
    elif tokens:
        verify = f"disagg start && disagg verify '{model}'"
        yield warning(
            "model", f"{names} hold different files of {' and '.join(tokens)}: answers may be refused", verify
        )
    else:
        yield ok("model", f"{which}same configuration and tokenizer")


def _differing_configs(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    return [key for key in _DECIDING if key in first and key in second and first[key] != second[key]]


def _differing_digests(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    return [key for key in sorted(first) if first[key] and second.get(key) and first[key] != second[key]]


def hides(link: MeasuredLink, model: Model, prefill: HostReadings, decode: HostReadings) -> Iterator[Finding]:
    """The prefill rate that the measured link hides for the pair's model; a faster prefill waits for the link."""
    held = [one.stored[model.name] for one in (prefill, decode) if model.name in one.stored]
    config = next((one.config for one in held if one.config), None)
    if link.bits_per_s is None or config is None:
        return
    per_token = kv_bytes_per_token(config, prefill.host.engine.dtype, model.context)
    if per_token:
        speed = hidden_tokens_per_s(link.bits_per_s, per_token)
        name = f"{model.name}: " if prefill.host.keeps or decode.host.keeps else ""
        yield note("hides", f"{name}prefill up to {speed:,.0f} tok/s ({size(per_token)} of KV a token)")


def versions(hosts: Sequence[HostReadings], statuses: Mapping[str, HostStatus]) -> Iterator[Finding]:
    """Whether all hosts run the same disagg, by version and by code (by the servers, else as deployed), will run it
    after their next restart, and have the same versions of the frameworks."""
    running = {one.host.name: statuses[one.host.name] for one in hosts if one.host.name in statuses}
    reported = {name: status.version for name, status in running.items() if status.version}
    found = {name: text for one in hosts if (text := reported.get(name := one.host.name, one.facts.version))}
    stated = {name: status.code for name, status in running.items() if status.code}
    code = {name: text for one in hosts if (text := stated.get(name := one.host.name, one.facts.code))}
    then = {name: one.facts.code or code.get(name, "") for one in hosts if (name := one.host.name)}
    then = {name: text for name, text in then.items() if text}
    hint = "disagg deploy && disagg restart"
    if len(set(found.values())) > 1:
        yield fault("versions", f"disagg differs: {grouped(found)}", hint)
    elif len(set(code.values())) > 1:
        even = "disagg restart" if len(set(then.values())) == 1 else hint
        yield fault("versions", f"the code of disagg differs: {grouped(code)}", even)
    elif len(set(then.values())) > 1:
        yield fault("versions", f"the code of disagg that is deployed differs: {grouped(then)}", hint)
    elif found:
        yield ok("versions", f"disagg {next(iter(found.values()))} on {counted(len(found), 'host')}")
    for package in sorted({name for status in running.values() for name in status.versions}):
        there = {name: status.versions[package] for name, status in running.items() if package in status.versions}
        if len(set(there.values())) > 1:
            yield warning("versions", f"{package} differs: {grouped(there)}", hint)


def settings(fleet: Fleet, hosts: Sequence[HostReadings], statuses: Mapping[str, HostStatus]) -> Iterator[Finding]:
    """Whether hosts run, and have deployed, what this hosts.toml says about them."""
    other, known = list[str](), 0
    for one in hosts:
        status, here = statuses.get(one.host.name), served_digest(fleet, one.host)
        stated = {one.facts.config, status.config if status is not None else ""} - {"", None}
        known += bool(stated)
        other += [one.host.name] if stated - {here} else []
    if other:
        chosen = "".join(f" --host {name}" for name in other)
        hint = f"disagg deploy{chosen} && disagg restart{chosen}"
        yield fault("settings", f"other settings than {fleet.path.name} here: {', '.join(other)}", hint)
    elif known:
        yield ok("settings", f"those of {fleet.path.name} on {counted(known, 'host')}")


def tokens(hosts: Sequence[HostReadings], rotating: bool) -> Iterator[Finding]:
    """Whether a rotation of the token is unfinished. rotating: this machine has begun one."""
    known = {one.host.name: ", ".join(digest[:8] for digest in one.facts.token_digests) for one in hosts}
    there = {name: digests for name, digests in known.items() if digests}
    if rotating or any(len(one.facts.token_digests) > 1 for one in hosts):
        where = f": {grouped(there)}" if there else ""
        yield warning("token", f"a rotation of the token is not finished{where}", ROTATE)


def clocks(hosts: Sequence[HostReadings]) -> Iterator[Finding]:
    """Whether the hosts' clocks agree. If all differ from this machine's equally, this machine's is wrong."""
    readings = {one.host.name: one for one in hosts if one.clock is not None and one.host.server_kind.ssh}
    if not readings:
        return
    ahead = {name: one.clock.ahead for name, one in readings.items() if one.clock is not None}
    spread = max(ahead.values()) - min(ahead.values())
    sure = max(one.clock.error for one in readings.values() if one.clock is not None)
    off = {name: value for name, value in ahead.items() if abs(value) > FAST_CLOCK_S + sure}
    if len(ahead) > 1 and len(off) == len(ahead) and spread < FAST_CLOCK_S:
        value = min(ahead.values(), key=abs)
        yield warning("clocks", f"this machine is {_offset(-value)} all hosts", "set this machine's clock")
        return
    for name, value in off.items():
        text = f"{name} is {_offset(value)} this machine"
        yield (fault if abs(value) > FALSE_CLOCK_S else warning)("clocks", text, _set_clock(readings[name]))
    if not off:
        yield ok("clocks", f"within {max(spread, sure) * 1e3:.0f} ms of each other")


def _set_clock(readings: HostReadings) -> str:
    name = readings.host.name
    if readings.facts.os == "Darwin":
        return f"disagg ssh {name} -- sudo sntp -sS time.apple.com"
    return f"disagg ssh {name} -- sudo timedatectl set-ntp true"


def _offset(value: float) -> str:
    apart = abs(value)
    amount = f"{apart:.1f} s" if apart < 120 else f"{apart / 60:.0f} min" if apart < 7200 else f"{apart / 3600:.0f} h"
    return f"{amount} {'ahead of' if value > 0 else 'behind'}"
