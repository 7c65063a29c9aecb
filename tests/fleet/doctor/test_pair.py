from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from disagg.api.status import ModelFingerprint
from disagg.config import served_digest
from disagg.fleet.doctor.pair import clocks, hides, same_model, settings, tokens, versions
from disagg.fleet.facts.host import Clock
from disagg.fleet.link.measure import MeasuredLink
from disagg.fleet.link.route import NetworkPath
from disagg.planning.checkpoint import kv_bytes_per_token
from tests.fleet.doctor.healthy_hosts import CONFIG, FLEET, mac, spark, status, with_model

MARK = ModelFingerprint("qwen3_moe", 151936, "r1", "t1", "c1", "s1")


MODEL = spark().host.model


def servers(first: Any, second: Any) -> dict[str, Any]:
    return {
        "dgx-spark-1": status(spark(), fingerprint=first),
        "mac-studio-2": status(mac(), fingerprint=second),
    }


def model(prefill: Any = None, decode: Any = None, statuses: Any = None) -> Any:
    return [(one.level, one.text) for one in same_model(MODEL, prefill or spark(), decode or mac(), statuses or {})]


def held(seen: Any, **changes: Any) -> Any:
    return with_model(seen, **changes)


def test_running_servers_decide_whether_both_ends_hold_the_same_model() -> None:
    assert model(statuses=servers(MARK, MARK)) == [("ok", "the same fingerprint on both servers")]
    ((level, text),) = model(statuses=servers(MARK, structs.replace(MARK, tokenizer="t2")))
    assert level == "fault" and text.endswith("serve different models: tokenizer differ")


def test_without_servers_the_files_are_compared() -> None:
    assert model() == [("ok", "same configuration and tokenizer")]


def test_another_architecture_is_a_fault() -> None:
    ((level, text),) = model(decode=held(mac(), config=CONFIG | {"num_hidden_layers": 36}))
    assert level == "fault" and "num_hidden_layers of config.json differ" in text


def test_two_revisions_of_one_source_are_a_fault() -> None:
    decode = held(mac(), source=spark().stored[MODEL].source)
    ((level, text),) = model(decode=decode)
    assert level == "fault" and "a1a1a1a1 and b2b2b2b2" in text


def test_another_tokenizer_is_a_warning_since_files_may_be_spelt_differently() -> None:
    ((level, text),) = model(decode=held(mac(), digests={"tokenizer": "zz", "chat template": "bb"}))
    assert level == "warning" and "tokenizer" in text


def test_a_model_that_is_missing_at_one_end_is_that_hosts_trouble() -> None:
    assert model(decode=held(mac(), state="absent")) == []


def test_a_measured_rate_is_shown_in_prefill_tokens() -> None:
    link = MeasuredLink("dgx-spark-1", "mac-studio-2", "169.254.150.102", NetworkPath(""), int(9.4e9 / 8), 1.0)
    (note,) = hides(link, FLEET.models["qwen3-coder:30b"], spark(), mac())
    assert note.text == "prefill up to 11,953 tok/s (96.0 KiB of KV a token)"


GPT_OSS = {
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}


# Qwen3-Next-80B, as on the hub
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip


@pytest.mark.parametrize(("config", "dtype", "tokens", "expected"), [
    (CONFIG, "bfloat16", 32768, 98304),
    (CONFIG, "float32", 32768, 196608),
    (GPT_OSS, "bfloat16", 8192, 36864 + 36864 * 128 / 8192),
    (GPT_OSS, "bfloat16", 64, 73728),
    ({"text_config": CONFIG}, "bfloat16", 100, 98304),
    ({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}, "bfloat16", 10, 2 * 2 * 64 * 2),
    (CONFIG | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "bfloat16", 10, 48 * 576 * 2),
    (CONFIG | {"layer_types": ["linear_attention"] * 36 + ["full_attention"] * 12}, "bfloat16", 10, None),
    (HYBRID, "bfloat16", 32768, 24576 + 36 * (2097152 + 3 * 8192 * 2) / 32768),
    # hybrids without layer_types, as on the hub: Kimi-Linear, Nemotron-H, Falcon-H1, LFM2
    (CONFIG | {"kv_lora_rank": 512, "linear_attn_config": {"full_attn_layers": [4]}}, "bfloat16", 10, None),
    (CONFIG | {"hybrid_override_pattern": "M-M*"}, "bfloat16", 10, None),
    (CONFIG | {"mamba_d_state": 256}, "bfloat16", 10, None),
    (CONFIG | {"conv_L_cache": 3, "full_attn_idxs": [2]}, "bfloat16", 10, None),
    ({}, "bfloat16", 10, None),
])  # fmt: skip
def test_kv_per_token_follows_from_the_configuration(
    config: Any, dtype: str, tokens: int, expected: int | None
) -> None:
    assert kv_bytes_per_token(config, dtype, tokens) == expected


def test_one_version_everywhere_is_one_line_and_two_are_a_fault() -> None:
    hosts = [spark(), mac()]
    assert [(one.level, one.text) for one in versions(hosts, {})] == [("ok", "disagg 0.1.0 on 2 hosts")]
    other = [spark(), mac(facts={"version": "0.2.0"})]
    (fault,) = versions(other, {})
    assert fault.level == "fault"
    assert fault.text == "disagg differs: 0.1.0 on dgx-spark-1; 0.2.0 on mac-studio-2"


def test_what_runs_counts_more_than_what_is_deployed() -> None:
    hosts = [spark(), mac(facts={"version": "0.2.0"})]
    assert [one.level for one in versions(hosts, servers(MARK, MARK))] == ["ok"]


@pytest.mark.parametrize(
    ("deployed", "running", "said", "hint"),
    [
        ("aa", "aa", "ok", ""),
        ("aa", "bb", "of disagg differs: aa on dgx-spark-1; bb on mac-studio-2", "disagg restart"),
        ("bb", "bb", "of disagg differs: aa on dgx-spark-1; bb on mac-studio-2", "disagg deploy && disagg restart"),
        ("bb", "", "of disagg differs: aa on dgx-spark-1; bb on mac-studio-2", "disagg deploy && disagg restart"),
        ("bb", "aa", "that is deployed differs: aa on dgx-spark-1; bb on", "disagg deploy && disagg restart"),
    ],
)
def test_hosts_of_one_version_and_different_code_are_a_fault(deployed: str, running: str, said: str, hint: str) -> None:
    """The version is the same at every commit. running: of a Mac whose server runs; the Spark has `aa`."""
    hosts = [spark(facts={"code": "aa"}), mac(facts={"code": deployed})]
    statuses = {"dgx-spark-1": status(spark(), code="aa")}
    if running:
        statuses["mac-studio-2"] = status(mac(), code=running)
    (found,) = versions(hosts, statuses)
    assert (found.level == "fault", found.hint) == (said != "ok", hint)
    assert said == "ok" or said in found.text


def test_settings_that_are_not_those_of_this_file_are_a_fault_on_the_hosts_that_have_them() -> None:
    here = {one.host.name: served_digest(FLEET, one.host) for one in (spark(), mac())}
    hosts = [spark(facts={"config": here["dgx-spark-1"]}), mac(facts={"config": here["mac-studio-2"]})]
    (found,) = settings(FLEET, hosts, {})
    assert (found.level, found.text) == ("ok", "those of hosts.toml on 2 hosts")
    (found,) = settings(FLEET, hosts, {"mac-studio-2": status(mac(), config="other")})
    assert (found.level, found.text) == ("fault", "other settings than hosts.toml here: mac-studio-2")
    assert found.hint == "disagg deploy --host mac-studio-2 && disagg restart --host mac-studio-2"


@pytest.mark.parametrize(
    ("digests", "here", "warned"),
    [(("a" * 64,), False, False), (("a" * 64,), True, True), (("a" * 64, "b" * 64), False, True)],
)
def test_a_rotation_that_is_not_finished_is_a_warning_with_the_command_that_finishes_it(
    digests: tuple[str, ...], here: bool, warned: bool
) -> None:
    found = list(tokens([spark(), mac(facts={"token_digests": digests})], here))
    assert [(one.level, one.hint) for one in found] == ([("warning", "disagg token rotate")] if warned else [])


def test_frameworks_that_differ_between_hosts_are_a_warning() -> None:
    statuses = {
        "dgx-spark-1": status(spark(), versions={"torch": "2.13.0"}),
        "dgx-spark-2": status(spark("dgx-spark-2"), versions={"torch": "2.12.1"}),
    }
    found = list(versions([spark(), spark("dgx-spark-2")], statuses))
    assert found[-1].text == "torch differs: 2.13.0 on dgx-spark-1; 2.12.1 on dgx-spark-2"


def ticking(**ahead: Any) -> Any:
    hosts = {"spark": spark(), "mac": mac(), "other": spark("dgx-spark-2")}
    return [replace(hosts[name], clock=Clock(value, 0.02)) for name, value in ahead.items()]


def test_clocks_that_agree_are_one_line() -> None:
    (line,) = clocks(ticking(spark=0.004, mac=-0.03))
    assert (line.level, line.text) == ("ok", "within 34 ms of each other")


def test_a_clock_that_is_off_is_named_with_the_command_of_its_system() -> None:
    (linux,) = clocks(ticking(spark=4.2, mac=0.0))
    assert (linux.level, linux.text) == ("warning", "dgx-spark-1 is 4.2 s ahead of this machine")
    assert linux.hint == "disagg ssh dgx-spark-1 -- sudo timedatectl set-ntp true"
    (macos,) = clocks(ticking(spark=0.0, mac=-3600.0))
    assert (macos.level, macos.text) == ("fault", "mac-studio-2 is 60 min behind this machine")
    assert macos.hint == "disagg ssh mac-studio-2 -- sudo sntp -sS time.apple.com"


def test_where_all_hosts_are_off_alike_it_is_this_machine() -> None:
    (line,) = clocks(ticking(spark=30.0, mac=30.1, other=29.9))
    assert line.text == "this machine is 29.9 s behind all hosts"


def test_a_slow_round_trip_is_no_evidence() -> None:
    slow = [replace(one, clock=Clock(1.5, 1.0)) for one in (spark(), mac())]
    assert [one.level for one in clocks(slow)] == ["ok"]
