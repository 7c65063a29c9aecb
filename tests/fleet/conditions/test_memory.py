"""What `disagg deploy --dry-run` refuses because the host's memory cannot hold it, before anything is downloaded."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disagg.config import EngineOptions, Fleet, Host, KeeperSettings, Model
from disagg.fleet.conditions.memory import Fit, fit, unmet
from disagg.fleet.conditions.table import CONDITIONS, Subject, nodes
from disagg.fleet.conditions.table import cards as enough_cards
from disagg.fleet.deploy.deployment import planner
from disagg.fleet.facts.host import HardwareFacts
from disagg.nvidia import GPU
from tests.fleet.facts.fixture_facts import facts, fleet, here, spark, studio

GIB = 1 << 30
SPARK = HardwareFacts(memory=119 * GIB, gpus=(GPU("NVIDIA GB10", "580.1"),))
GPT_OSS: dict[str, str] = {
    "vllm": "openai/gpt-oss-120b",
    "transformers": "openai/gpt-oss-120b",
    "mlx": "mlx-community/gpt-oss-120b-MXFP4-Q8",
}
QWEN: dict[str, str] = {
    "vllm": "Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8",
    "transformers": "Qwen/Qwen3-Coder-30B-A3B-Instruct",
    "mlx": "mlx-community/Qwen3-Coder-30B-A3B-Instruct-8bit",
}


def fitted(
    sources: dict[str, str], hardware: HardwareFacts, context: int = 8192, os: str = "Linux", **options: Any
) -> Fit:
    engine = EngineOptions(**{"device": "cuda", **options})
    base = studio() if engine.name == "mlx" else spark()
    found = fit(replace(base, model="m", engine=engine), Model("m", sources, context), hardware, os)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("sources", "options", "context"),
    [
        (GPT_OSS, {"name": "vllm"}, 8192),
        (QWEN, {"name": "vllm", "kv_cache_memory_bytes": 32 * GIB}, 32768),
        (GPT_OSS, {"name": "transformers", "quantization": "mxfp4", "chunk_tokens": 1024}, 8192),
        (QWEN, {"name": "transformers"}, 32768),
    ],
)
def test_what_fits_a_dgx_spark_is_not_refused(sources: dict[str, str], options: dict[str, Any], context: int) -> None:
    found = fitted(sources, SPARK, context, **options)
    assert [*unmet(found)] == []


def test_gpt_oss_that_transformers_would_dequantise_is_refused_with_both_ways_out() -> None:
    (refusal,) = unmet(fitted(GPT_OSS, SPARK, name="transformers", chunk_tokens=1024))
    assert refusal.text == (
        "m needs 224 GiB: weights 218 GiB (MXFP4 dequantised to bfloat16), KV 2.0 GiB, workspace 4.2 GiB; "
        "the machine of 119 GiB has room for 115 GiB"
    )
    assert refusal.hint == (
        'name = "vllm" in [hosts.dgx-spark-1.engine] holds the weights as stored; '
        'with transformers on CUDA: quantization = "mxfp4"; '
        'or layers = "0:18" there, to compute these layers of prompts only'
    )


def test_a_host_that_loads_the_first_layers_needs_the_memory_of_these() -> None:
    dequantised: dict[str, Any] = {"name": "transformers", "chunk_tokens": 1024}
    found = fitted(GPT_OSS, SPARK, layers="0:18", **dequantised)
    assert [*unmet(found)] == []
    assert "the first 18 of 36 layers" in found.needed
    assert found.need.one_request * 2 == fitted(GPT_OSS, SPARK, **dequantised).need.one_request
    (refusal,) = unmet(fitted(GPT_OSS, SPARK, layers="0:19", **dequantised))
    assert refusal.text.startswith("m needs 121 GiB: weights 115 GiB (MXFP4 dequantised to bfloat16, the first 19 of")


def test_more_first_layers_than_the_model_has_are_refused() -> None:
    (refusal,) = unmet(fitted(QWEN, SPARK, name="transformers", layers="0:64"))
    assert refusal.text == 'layers = "0:64" loads 64 layers, and m has 48'


def test_a_kv_cache_beyond_the_memory_is_refused_with_the_value_that_fits() -> None:
    (refusal,) = unmet(fitted(GPT_OSS, SPARK, name="vllm", kv_cache_memory_bytes=64 * GIB))
    assert "KV 64.0 GiB, KV to send 64.0 GiB, workspace" in refusal.text
    assert refusal.hint == f"kv_cache_memory_bytes = {24 * GIB} in [hosts.dgx-spark-1.engine]"
    assert [*unmet(fitted(GPT_OSS, SPARK, name="vllm", kv_cache_memory_bytes=24 * GIB))] == []


def test_a_kv_cache_that_holds_no_whole_request_is_refused_as_vllm_would() -> None:
    (refusal,) = unmet(fitted(QWEN, SPARK, 32768, name="vllm", kv_cache_memory_bytes=GIB))
    assert "one request of the whole context takes 3.0 GiB" in refusal.text
    assert refusal.hint.startswith(f"kv_cache_memory_bytes = {3 * GIB} in [hosts.dgx-spark-1.engine]")


def test_a_card_with_memory_of_its_own_is_what_counts_and_not_the_machines() -> None:
    card = replace(SPARK, gpus=(GPU("RTX 5090", "580.1", 32 * GIB),))
    found = fitted(QWEN, card, 32768, name="vllm")
    assert found.own
    (refusal,) = unmet(found)
    assert "RTX 5090 has room for 32.0 GiB" in refusal.text and "fewer bits per weight" in refusal.hint


def test_two_cards_hold_what_one_cannot() -> None:
    cards = replace(SPARK, gpus=(GPU("RTX 5090", "580.1", 32 * GIB),) * 2)
    assert [*unmet(fitted(QWEN, cards, 32768, name="vllm", tensor_parallel=2))] == []
    shared = fitted(QWEN, SPARK, 32768, name="vllm", tensor_parallel=2)
    assert shared.need.kv == 16 * GIB, "each rank takes its 8 GiB from the same memory"
    assert shared.need.to_send == 16 * GIB, "and so does what waits to be sent"


def test_two_machines_with_shared_memory_hold_half_of_the_weights_and_of_the_kv_each() -> None:
    alone, half = (fitted(QWEN, SPARK, 32768, name="vllm", tensor_parallel=2, nnodes=nodes).need for nodes in (1, 2))
    assert (half.weights, half.kv, half.to_send) == (alone.weights // 2, alone.kv // 2, alone.to_send // 2)


def test_a_pipeline_over_two_machines_has_half_of_the_layers_on_each() -> None:
    alone = fitted(QWEN, SPARK, 32768, name="vllm").need
    half = fitted(QWEN, SPARK, 32768, name="vllm", pipeline_parallel=2, nnodes=2).need
    assert (half.weights, half.one_request) == (alone.weights // 2, alone.one_request // 2)
    engine = EngineOptions("vllm", device="cuda", tensor_parallel=2, pipeline_parallel=2, nnodes=2)
    (refusal,) = enough_cards(spark(engine=engine), replace(facts("spark_bare"), hardware=SPARK))
    assert refusal.text.startswith("tensor_parallel * pipeline_parallel of dgx-spark-1 is 4 on 2 nodes")


def test_each_of_two_nodes_needs_cards_for_its_own_ranks() -> None:
    engine = EngineOptions("vllm", device="cuda", tensor_parallel=4, nnodes=2, head_address="10.0.0.1:29500")
    (refusal,) = enough_cards(spark(engine=engine), replace(facts("spark_bare"), hardware=SPARK))
    assert refusal.text == "tensor_parallel of dgx-spark-1 is 4 on 2 nodes, and the machine has 1 GPU"
    assert refusal.hint.startswith("tensor_parallel = 2 in")
    assert [
        *enough_cards(spark(engine=replace(engine, tensor_parallel=2)), replace(facts("spark_bare"), hardware=SPARK))
    ] == []


def test_a_node_that_would_wait_for_one_which_no_host_is_is_refused() -> None:
    engine = EngineOptions("vllm", tensor_parallel=3, nnodes=3, head_address="10.0.0.1:29500")
    head, other = spark(engine=engine), replace(spark(engine=replace(engine, node_rank=2)), name="dgx-spark-3")
    alone = EngineOptions("vllm", tensor_parallel=3)
    fleet = Fleet("test", Path("hosts.toml"), {}, {host.name: host for host in (head, other)})
    (refusal,) = nodes(fleet, head)
    assert refusal.text == "dgx-spark-1 is one of 3 nodes, and no host is the one of node_rank 1"
    assert refusal.hint == 'add a host whose engine has head_address = "10.0.0.1:29500" and node_rank = 1'
    third = replace(spark(engine=replace(engine, node_rank=1)), name="dgx-spark-2")
    whole = replace(fleet, hosts={**fleet.hosts, third.name: third})
    assert [*nodes(whole, head), *nodes(whole, spark(engine=alone))] == []


@pytest.mark.parametrize(
    ("cards", "ranks", "device", "causes"),
    [
        (1, 2, "cuda", ["tensor_parallel of dgx-spark-1 is 2, and the machine has 1 GPU"]),
        (2, 4, "auto", ["tensor_parallel of dgx-spark-1 is 4, and the machine has 2 GPUs"]),
        (2, 2, "cuda", []),
        (1, 2, "cpu", []),
        (0, 2, "cuda", []),
    ],
)
def test_more_ranks_than_cards_are_refused(cards: int, ranks: int, device: str, causes: list[str]) -> None:
    host = spark(engine=EngineOptions("vllm", device=device, tensor_parallel=ranks))
    hardware = replace(SPARK, gpus=SPARK.gpus * cards)
    assert [refusal.text for refusal in enough_cards(host, replace(facts("spark_bare"), hardware=hardware))] == causes


def test_disagg_plan_refuses_more_ranks_than_cards_for_a_model_of_unknown_size_too() -> None:
    of = fleet(spark(engine=EngineOptions("vllm", device="cuda", tensor_parallel=2)))
    of = replace(of, models={"qwen": Model("qwen", {"vllm": "owner/unknown"}, 4096)})
    plan = planner(here(of))(of.hosts["dgx-spark-1"], replace(facts("spark_bare"), hardware=SPARK))
    assert "tensor_parallel of dgx-spark-1 is 2" in plan.refusals[0].cause


def test_mxfp4_of_a_checkpoint_that_has_none_is_refused() -> None:
    (refusal,) = unmet(fitted(QWEN, SPARK, 32768, name="transformers", quantization="mxfp4"))
    assert refusal.text == 'quantization = "mxfp4" keeps MXFP4 weights as they are, and those of m are not MXFP4'


def test_a_machine_that_was_not_read_has_the_memory_of_its_kind() -> None:
    host = spark(model="m", engine=EngineOptions("transformers", device="cuda"), hardware="dgx-spark")
    found = fit(host, Model("m", GPT_OSS, 8192), HardwareFacts(), "Linux")
    assert found is not None and found.machine == "DGX Spark (GB10) of 119 GiB"
    assert fit(replace(host, hardware=None), Model("m", GPT_OSS, 8192), HardwareFacts(), "Linux") is None


def test_a_mac_that_holds_less_kv_than_hosts_toml_allows_is_noted() -> None:
    mac = HardwareFacts(memory=64 * GIB)
    found = fitted(QWEN, mac, 32768, "Darwin", name="mlx", device="gpu", max_kv_bytes=32 * GIB)
    (note,) = unmet(found)
    assert note.level == "warning" and "KV 32.0 GiB" in note.text
    assert note.hint == f"max_kv_bytes = {28 * GIB} in [hosts.mac-studio-1.engine]"


def test_a_model_of_unknown_size_and_a_simulated_one_are_not_judged() -> None:
    assert fit(spark(), Model("m", {"transformers": "owner/other"}, 4096), SPARK, "Linux") is None
    simulated: Host = spark(engine=EngineOptions("simulated"), hardware="dgx-spark")
    assert fit(simulated, Model("m", {"simulated": "shape:gpt-oss-120b"}, 4096), SPARK, "Linux") is None


def test_disagg_plan_refuses_a_host_whose_memory_is_too_small() -> None:
    of = fleet(spark(engine=EngineOptions("transformers", device="cuda")))
    of = replace(of, models={"qwen": Model("qwen", {"transformers": "openai/gpt-oss-120b"}, 4096)})
    found = replace(facts("spark_bare"), hardware=SPARK)
    plan = planner(here(of))(of.hosts["dgx-spark-1"], found)
    assert [refusal.cause.partition(":")[0] for refusal in plan.refusals] == ["qwen needs 224 GiB"]
    assert plan.steps == ()


@pytest.mark.parametrize("file", ["hosts.toml", "docs/operations.md"])
def test_the_files_that_state_the_size_of_gpt_oss_dequantised_have_the_computed_figure(file: str) -> None:
    (refusal,) = unmet(fitted(GPT_OSS, SPARK, name="transformers", chunk_tokens=1024))
    found = re.search(r"weights (\d+ GiB)", refusal.text)
    stated = re.search(
        r"dequantise[^\n]*gpt-oss[^\n]*?(\d+ GiB)", (Path(__file__).parents[3] / file).read_text(encoding="utf-8")
    )
    assert found and stated and stated[1] == found[1]


SOURCES = {"oss": GPT_OSS, "qwen": QWEN}  # on a Mac 63 and 31 GiB with 8 GiB of KV each


def of_machine(*hosts: Host, memory: int) -> list[str]:
    """What is said of the first host's memory, on a Mac with so many GiB that has all of these."""
    models = {name: Model(name, sources, 8192) for name, sources in SOURCES.items()}
    of = Fleet("lab", Path("/here/hosts.toml"), models, {host.name: host for host in hosts})
    seen = replace(facts("studio_bare", hosts[0].name), hardware=HardwareFacts(memory=memory * GIB))
    (condition,) = [one for one in CONDITIONS if one.name == "memory"]
    return [one.text for one in condition.unmet(Subject(of, hosts[0], seen)) if one.level == "fault"]


def keeping(name: str = "mac-studio-1", **settings: Any) -> Host:
    """A Mac with both models."""
    kept = KeeperSettings(range(8100, 8104), **settings)
    return replace(studio(), name=name, model="", kv_port=None, models=("oss", "qwen"), keeping=kept)


def test_each_model_of_a_host_with_several_must_fit_alone_and_not_all_together() -> None:
    assert of_machine(keeping(), memory=96) == []
    (text,) = of_machine(keeping(), memory=48)
    assert text.startswith("oss needs ") and text.endswith("the machine of 48.0 GiB has room for 44.0 GiB")


def test_what_is_loaded_at_start_and_what_stays_must_fit_together() -> None:
    assert of_machine(keeping(preload=("oss", "qwen")), memory=128) == []
    (text,) = of_machine(keeping(preload=("oss", "qwen")), memory=96)
    assert "which are loaded at start; the machine of 96.0 GiB has room for 92.0 GiB" in text
    (text,) = of_machine(keeping(pin=("qwen",)), memory=96)
    assert "of which the others stay loaded" in text


def test_the_memory_that_hosts_toml_gives_the_models_of_a_host_is_its_room() -> None:
    (text,) = of_machine(keeping(memory_bytes=40 * GIB), memory=512)
    assert text.startswith("oss needs ") and text.endswith("memory_bytes of mac-studio-1 has room for 40.0 GiB")


def test_what_all_hosts_of_a_machine_load_at_start_is_summed() -> None:
    loads, other = replace(studio(), model="oss"), replace(studio(), name="mac-2", model="qwen", port=8002)
    assert of_machine(loads, memory=96) == of_machine(loads, other, memory=128) == []
    (text,) = of_machine(loads, other, memory=96)
    assert "oss on mac-studio-1" in text and "qwen on mac-2" in text and "on one machine, which has room for" in text
    elsewhere = replace(other, address="10.0.0.99")
    assert of_machine(loads, elsewhere, memory=96) == of_machine(loads, keeping("mac-2"), memory=96) == []
    assert of_machine(keeping(preload=("oss",)), other, memory=96) != []
