from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from disagg.config import EngineOptions
from disagg.errors import FleetError
from disagg.fleet.doctor.host import findings
from disagg.fleet.facts.host import HardwareFacts, Python, Systemd, parse_hardware
from disagg.fleet.facts.probe import ProbeOutput
from disagg.fleet.models.inventory import RequiredModel, StoredModel
from disagg.nvidia import GPU
from tests.fleet.doctor.healthy_hosts import CONFIG, FLEET, RELEASE, TOKEN, mac, spark, status, with_model
from tests.planning.published_configs import QWEN_FP8

GIB = 1 << 30


def found(seen: Any, health: Any = "healthy", **changes: Any) -> Any:
    reply = status(seen, health, **changes) if health else None
    return findings(FLEET, seen, reply, TOKEN)


def ill(seen: Any, health: Any = "healthy", **changes: Any) -> Any:
    """What is not well: (check, level, text, hint)."""
    return [(one.check, one.level, one.text, one.hint) for one in found(seen, health, **changes) if one.level != "ok"]


def only(seen: Any, health: Any = "healthy", **changes: Any) -> Any:
    (one,) = ill(seen, health, **changes)
    return one


def test_hosts_in_good_health_have_nothing_but_short_lines() -> None:
    for seen in (spark(), mac(), mac("mac-studio-1", hardware={"memory": 512 * GIB})):
        assert ill(seen) == []
        assert all(len(one.text) < 64 for one in found(seen))


def test_everything_that_is_looked_at_is_named() -> None:
    assert [one.check for one in found(spark())] == [
        "ssh", "python", "disk", "memory", "gpu", "model", "verdict", "service", "token", "server",
    ]  # fmt: skip
    assert [one.check for one in found(mac())] == [
        "ssh", "python", "disk", "memory", "wired limit", "model", "verdict", "service", "token", "server",
        "local network", "thunderbolt",
    ]  # fmt: skip


def test_every_trouble_names_a_command() -> None:
    sick = spark(
        facts={"folder": False, "current": "", "environments": {}, "pythons": (), "systemd": None, "disk_free": GIB},
        hardware={"smi": "", "gpus": ()},
        stored={spark().host.model: StoredModel("x/y", "absent")},
    )
    assert len(ill(sick)) == 6
    assert all(hint for _, _, _, hint in ill(sick))


# python


@pytest.mark.parametrize(("pythons", "text", "hint"), [
    ((), "there is no Python 3.11 or newer", "apt install python3 python3-venv"),
    ((Python("/usr/bin/python3", (3, 10, 12)),), "every Python there is older than 3.11: /usr/bin/python3 is 3.10.12",
     "apt install"),
    ((Python("/usr/bin/python3", (3, 12, 3), False),), "/usr/bin/python3 has no venv module", "python3.12-venv"),
])  # fmt: skip
def test_a_python_that_cannot_serve_is_a_fault(pythons: tuple[Any, ...], text: str, hint: str) -> None:
    check, level, said, command = only(spark(facts={"pythons": pythons, "environments": {}}))
    assert (check, level, said) == ("python", "fault", text)
    assert hint in command and command.startswith("disagg ssh dgx-spark-1 -- ")


def test_uv_makes_up_for_a_missing_python() -> None:
    assert ill(spark(facts={"pythons": (), "environments": {}, "uv": "/usr/bin/uv"})) == []


def test_a_python_of_hosts_toml_that_does_not_run_is_named() -> None:
    seen = spark(host={"python": "/opt/python"}, facts={"no_python": "/opt/python", "environments": {}})
    assert only(seen)[2] == "/opt/python does not run there" and "hosts.toml" in only(seen)[3]


# disk and memory


def test_little_disk_is_a_warning_with_what_shows_the_large_folders() -> None:
    check, level, text, hint = only(spark(facts={"disk_free": 5 * GIB}))
    assert (check, level, text) == ("disk", "warning", "5.0 GiB free in /home/ubuntu")
    assert "du -sh" in hint


def test_a_home_that_cannot_be_written_to_is_a_fault() -> None:
    assert only(spark(facts={"writable": False}))[:2] == ("disk", "fault")


def test_a_model_larger_than_unified_memory_is_a_fault() -> None:
    seen = spark(host={"engine": EngineOptions("transformers", device="cuda")})
    big = with_model(seen, bytes=130 * GIB)
    check, level, text, _ = only(big)
    assert (check, level) == ("memory", "fault")
    assert text == (
        "qwen3-coder:30b needs 134 GiB: weights 130 GiB (FP8), KV 3.0 GiB, workspace 1.2 GiB; "
        "the machine of 119 GiB has room for 115 GiB"
    )


def test_only_linear_layers_count_as_quantized_while_a_model_loads() -> None:
    dense = {name: value for name, value in CONFIG.items() if "expert" not in name}
    dense |= {"model_type": "qwen3", "intermediate_size": 12 * 768, "tie_word_embeddings": True}
    seen = spark(host={"engine": EngineOptions("transformers", device="cuda", quantization="int8")})
    mixture, plain = (with_model(seen, bytes=150 * GIB, config=c) for c in (CONFIG, dense))
    assert only(mixture)[:2] == ("memory", "fault")
    assert ill(plain) == []


def test_a_kv_cache_that_vllm_cannot_take_at_start_is_a_fault_with_the_value_that_fits() -> None:
    seen = spark(host={"engine": EngineOptions("vllm", device="cuda", kv_cache_memory_bytes=96 * GIB)})
    fp8 = with_model(seen, bytes=29 * GIB, config=QWEN_FP8)
    check, level, text, hint = only(fp8)
    assert (check, level) == ("memory", "fault") and "weights 29.0 GiB (FP8), KV 96.0 GiB" in text
    assert hint == (
        f"kv_cache_memory_bytes = {40 * GIB} in [hosts.dgx-spark-1.engine]; then: disagg deploy --host dgx-spark-1"
    )


def test_gb10_without_gpu_memory_is_well_and_said_to_share_its_memory() -> None:
    (line,) = (one.text for one in found(spark()) if one.check == "gpu")
    assert line == "NVIDIA GB10, driver 580.95.05, shared memory"


def test_a_model_larger_than_the_cards_own_memory_is_a_fault() -> None:
    seen = spark(hardware={"gpus": (GPU("RTX 4090", "580.1", 24 * GIB),)})
    check, level, text, _ = only(seen)
    assert (check, level) == ("gpu", "fault") and "RTX 4090 has room for 24.0 GiB" in text


# GPU


def test_a_missing_driver_is_a_fault_with_the_package_that_brings_it() -> None:
    check, level, text, hint = only(spark(hardware={"smi": "", "gpus": (), "devices": ("pci",)}))
    assert (check, level) == ("gpu", "fault")
    assert text == "there is an NVIDIA card and no driver: nvidia-smi is missing"
    assert hint.startswith('disagg ssh dgx-spark-1 -- "sudo apt install nvidia-driver-580-open"')


def test_a_driver_that_cannot_reach_its_card_is_reported_in_its_own_words() -> None:
    words = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    check, level, text, hint = only(spark(hardware={"gpus": (), "smi_failed": words}))
    assert (check, level, text) == ("gpu", "fault", f"nvidia-smi: {words}") and hint.startswith("restart")


def test_a_driver_that_is_too_old_is_a_fault() -> None:
    seen = spark(hardware={"gpus": (GPU("NVIDIA GB10", "570.86.10"),)})
    assert [one.check for one in found(seen)].count("gpu") == 1
    check, level, text, _ = only(seen)
    assert (check, level) == ("gpu", "fault") and "driver 570.86.10 of NVIDIA GB10 is older than 580" in text


def test_memory_errors_of_a_card_are_a_fault() -> None:
    check, level, text, _ = only(spark(hardware={"gpus": (GPU("H200", "580.1", 141 * GIB, ecc_errors=3),)}))
    assert (check, level) == ("gpu", "fault") and "3 uncorrected memory errors" in text


def test_a_prefill_host_on_the_cpu_needs_no_card() -> None:
    seen = spark(host={"engine": replace(spark().host.engine, device="cpu")}, hardware={"smi": "", "gpus": ()})
    assert ill(seen) == []


def test_more_ranks_than_cards_are_a_fault() -> None:
    seen = spark(host={"engine": EngineOptions("vllm", device="cuda", tensor_parallel=2)})
    faults = [one for one in ill(seen) if one[0] == "gpu"]
    assert [(level, text) for _, level, text, _ in faults] == [
        ("fault", "tensor_parallel of dgx-spark-1 is 2, and the machine has 1 GPU")
    ]


# wired limit


def test_a_model_over_the_wired_limit_is_a_warning_with_both_ways_to_raise_it() -> None:
    seen = mac(hardware={"memory": 128 * GIB, "wired_limit": 49152})
    check, level, text, hint = only(seen)
    assert (check, level) == ("wired limit", "warning")
    assert text == "the GPU may wire 48.0 GiB, and qwen3-coder:30b with max_kv_bytes takes 65.2 GiB"
    assert "wired_limit_mb = 70848 in [hosts.mac-studio-2]" in hint
    assert "disagg ssh mac-studio-2 -- sudo sysctl iogpu.wired_limit_mb=70848" in hint


def test_zero_means_three_quarters_of_memory() -> None:
    (line,) = (one.text for one in found(mac()) if one.check == "wired limit")
    assert line == "96.0 GiB (macOS' own)"
    assert ill(mac(hardware={"memory": 80 * GIB}))[0][:2] == ("wired limit", "warning")


def test_a_limit_that_was_not_set_after_the_reboot_is_named_with_its_daemon() -> None:
    check, level, text, hint = only(mac(host={"wired_limit_mb": 110000}))
    assert (check, level, text) == ("wired limit", "warning", "iogpu.wired_limit_mb is 0, not the 110000 of hosts.toml")
    assert "system/disagg.mac-studio-2.wired-limit" in hint


def test_a_model_that_no_limit_makes_fit_needs_a_smaller_kv_cache() -> None:
    seen = mac(hardware={"memory": 64 * GIB})
    seen = with_model(seen, bytes=40 * GIB)
    (trouble,) = ill(seen)
    assert trouble[:2] == ("memory", "warning")
    assert trouble[3].startswith(f"max_kv_bytes = {18 * GIB} in [hosts.mac-studio-2.engine]")


# model, service, token, server


def test_a_missing_model_is_pulled() -> None:
    name = spark().host.model
    need = {name: RequiredModel(spark().host, "Qwen/Qwen3")}
    check, level, text, hint = only(spark(stored={name: StoredModel("Qwen/Qwen3", "absent")}, required=need))
    assert (check, level, text) == ("model", "fault", "Qwen/Qwen3 is not there")
    assert hint == "disagg models pull 'qwen3-coder:30b' --host dgx-spark-1"


def test_half_a_model_says_what_lacks() -> None:
    held = StoredModel("Qwen/Qwen3", "partial", 9, missing_files=("model-00002-of-00016.safetensors",))
    assert "partial: misses model-00002-of-00016.safetensors" in only(spark(stored={spark().host.model: held}))[2]


def test_services_that_end_with_the_login_are_a_warning() -> None:
    check, level, _, hint = only(spark(facts={"systemd": Systemd(255, True, False)}))
    assert (check, level) == ("service", "warning")
    assert hint == "disagg ssh dgx-spark-1 -- sudo loginctl enable-linger ubuntu"


def test_a_silent_systemd_and_a_missing_launchd_are_faults() -> None:
    assert only(spark(facts={"systemd": Systemd(255, False, True)}))[:2] == ("service", "fault")
    assert only(mac(facts={"launchd": False}))[:2] == ("service", "fault")


def test_sudo_with_a_password_is_a_warning_on_a_mac() -> None:
    assert only(mac(facts={"sudo": False}))[:2] == ("service", "warning")


@pytest.mark.parametrize(("facts", "text"), [
    ({"token_digests": ()}, "the fleet's token is not there"),
    ({"token_mode": "-rw-r--r--"}, "others can read /home/ubuntu/.disagg/hosts/dgx-spark-1/token (-rw-r--r--)"),
    ({"token_digests": ("0" * 64,)}, "its token differs from the one on this machine"),
])  # fmt: skip
def test_a_token_that_is_missing_readable_or_wrong_is_a_fault(facts: dict[str, Any], text: str) -> None:
    assert only(spark(facts=facts))[:3] == ("token", "fault", text)


def test_a_bare_host_is_to_be_deployed() -> None:
    bare = spark(facts={"folder": False, "current": "", "pid": None, "release": "", "token_digests": ()})
    assert only(bare, None) == ("disagg", "warning", "nothing is deployed", "disagg deploy --host dgx-spark-1")


def test_a_deployment_that_was_broken_off_before_its_token_is_no_fault_of_the_token() -> None:
    begun = spark(facts={"folder": True, "current": "", "pid": None, "release": "", "token_digests": ()})
    assert only(begun, None)[:3] == ("disagg", "warning", "nothing is deployed")


def test_an_older_release_that_still_runs_is_to_be_restarted() -> None:
    check, level, text, hint = only(spark(facts={"pid": 1, "release": "b" * 16}))
    assert (check, level, hint) == ("disagg", "warning", "disagg restart --host dgx-spark-1")
    assert text == f"release {'b' * 8} still runs, and {RELEASE[:8]} is deployed"


def test_a_server_that_does_not_run_is_to_be_started() -> None:
    check, level, _, hint = only(spark(), "not running")
    assert (check, level, hint) == ("server", "fault", "disagg start --host dgx-spark-1")


def test_a_kv_port_that_another_program_has_is_a_fault() -> None:
    check, level, text, hint = only(mac(facts={"listening": (9001,)}), "not running")
    assert (check, level) == ("server", "fault") and "kv_port 9001" in text and "lsof" in hint


def test_a_server_that_failed_says_why() -> None:
    assert only(spark(), "failed", why="out of memory", hint="disagg logs")[:3] == ("server", "fault", "out of memory")


# macOS


def test_a_server_that_is_denied_the_local_network_is_told_from_a_broken_link() -> None:
    check, level, text, hint = only(mac(facts={"errno_65": 7}))
    assert (check, level) == ("local network", "fault")
    assert "Local Network Privacy denies the server these connections" in text and "7 times" in text
    assert "System Settings > Privacy & Security > Local Network" in hint
    check, level, text, hint = only(mac(facts={"errno_65": 7}, reach={"169.254.150.103 22": 65}))
    assert text == "no route from here to 169.254.150.103 (errno 65)" and "ping" in hint


def test_a_plain_process_that_is_denied_the_network_is_to_become_a_daemon() -> None:
    seen = mac(host={"service": "process"}, facts={"errno_65": 1})
    assert 'service = "launchd" in [hosts.mac-studio-2]' in only(seen)[3]


def test_what_could_not_be_read_is_told() -> None:
    seen = spark(errors=(FleetError("dgx-spark-1: a probe did not say", "disagg ssh dgx-spark-1"),))
    assert only(seen)[:2] == ("probe", "fault")


# what the probe prints


def printed(*lines: str) -> HardwareFacts:
    return parse_hardware(ProbeOutput.parse("x", "\n".join((*lines, "end\n"))))


def test_nvidia_smi_of_a_gb10_has_no_memory_and_no_ecc() -> None:
    hardware = printed("available\t104857600", "gpu\tNVIDIA GB10, 580.95.05, [N/A], [N/A], [N/A], 41, 7")
    assert hardware.gpus == (GPU("NVIDIA GB10", "580.95.05", temperature=41, utilisation=0.07),)
    assert hardware.available == 100 * GIB


def test_nvidia_smi_of_a_server_card_has_both() -> None:
    hardware = printed("gpu\tNVIDIA H100 80GB HBM3, 580.82.07, 81559, 81079, 2, 35, 0")
    assert hardware.gpus == (GPU("NVIDIA H100 80GB HBM3", "580.82.07", 81559 << 20, 81079 << 20, 2, 35, 0.0),)


def test_the_reason_that_nvidia_smi_prints_is_kept() -> None:
    assert printed("smi_failed\t9\tno devices were found").smi_failed == "no devices were found"
    assert printed("smi_failed\t124\t").smi_failed == "exit code 124"


def test_a_probe_that_did_not_end_is_an_error() -> None:
    with pytest.raises(FleetError, match="ended early"):
        ProbeOutput.parse("x", "available\t1\n")
