"""hosts.toml for hosts that prefill with vLLM, in their own process, on several machines, or beside a `vllm serve`."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.config import EngineOptions, load
from disagg.config.render import render
from tests.config.conftest import FLEET, ExpectFault

SPARK_ENGINE = 'name = "transformers"'
SOURCES = 'sources = {transformers = "Qwen/Qwen"'
VLLM = 'name = "vllm"'
WITH_SOURCE = {SOURCES: 'sources = {vllm = "Qwen/Qwen-FP8"'}


def test_every_option_of_vllm_arrives_in_the_host_and_in_its_own_hosts_toml(tmp_path: Path) -> None:
    options = f"""\
{VLLM}
dtype = "float16"
device = "cuda"
chunk_tokens = 4096
threads = 3
kv_wire = "auto"
kv_cache_memory_bytes = 17_179_869_184
enforce_eager = true"""
    text = FLEET.replace(SOURCES, WITH_SOURCE[SOURCES]).replace(SPARK_ENGINE, options)
    text = text.replace('engine.name = "mlx"', 'engine = {name = "mlx", dtype = "float16"}')
    (tmp_path / "hosts.toml").write_text(text)
    fleet = load(tmp_path / "hosts.toml")
    engine = fleet.hosts["spark"].engine
    assert engine == EngineOptions(
        "vllm",
        dtype="float16",
        device="cuda",
        chunk_tokens=4096,
        threads=3,
        kv_wire="auto",
        kv_cache_memory_bytes=16 << 30,
        enforce_eager=True,
    )
    (tmp_path / "own.toml").write_text(render(fleet, ["spark"], {"qwen:30b": {"vllm": "Qwen/Qwen-FP8"}}))
    assert load(tmp_path / "own.toml").hosts["spark"].engine == engine


@pytest.mark.parametrize(
    ("option", "message", "hint"),
    [
        (
            '«quantization» = "int8"',
            'unknown key "quantization" in [hosts.spark.engine]',
            'this is an option of the engine "transformers"',
        ),
        (
            "kv_cache_memory_bytes = «3»",
            "kv_cache_memory_bytes is out of range",
            f"from {1 << 20} to {1 << 50}",
        ),
        ('device = «"mps"»', '"mps" is not a value for device', 'one of "auto", "cuda", "cpu"'),
    ],
)
def test_what_vllm_cannot_do_is_pointed_at(expect_fault: ExpectFault, option: str, message: str, hint: str) -> None:
    expect_fault({**WITH_SOURCE, SPARK_ENGINE: f"{VLLM}\n{option}"}, message, hint)


def test_a_model_without_a_vllm_source_is_pointed_at(expect_fault: ExpectFault) -> None:
    expect_fault(
        {SPARK_ENGINE: VLLM, '[hosts.spark]\naddress = "10.0.0.1"\nroles = ["prefill"]\nmodel = "qwen:30b"':
            '[hosts.spark]\naddress = "10.0.0.1"\nroles = ["prefill"]\nmodel = «"qwen:30b"»'},
        'model "qwen:30b" has no source for the engine "vllm" of this host',
        'add vllm = "owner/model" to [models."qwen:30b".sources]',
    )  # fmt: skip


NODES = f"""{VLLM}
tensor_parallel = 2
nnodes = 2
head_address = "192.168.100.1:29500\""""
SECOND = """
[hosts.second]
address = "10.0.0.9"
roles = ["prefill"]
model = "qwen:30b"
port = 8000
[hosts.second.engine]
name = "vllm"
tensor_parallel = 2
nnodes = 2
node_rank = 1
head_address = "192.168.100.1:29500"
"""


def test_requests_use_the_head_of_several_nodes_and_the_others_are_hosts_like_any(tmp_path: Path) -> None:
    text = FLEET.replace(SOURCES, WITH_SOURCE[SOURCES]).replace(SPARK_ENGINE, NODES)
    (tmp_path / "hosts.toml").write_text(text + SECOND)
    fleet = load(tmp_path / "hosts.toml")
    assert [host.name for host in fleet.serving("qwen:30b", "prefill")] == ["spark"]
    assert "second" not in [host.name for host in fleet.answering_hosts]
    assert "second" in [host.name for host in fleet.engine_hosts]
    assert [fleet.hosts[name].engine.ranks_here for name in ("spark", "second")] == [1, 1]


RANKS = "tensor_parallel * pipeline_parallel = 3, or a multiple of it"


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ("nnodes = «3»", "the ranks do not divide among so many nodes", RANKS),
        ("nnodes = 2\nnode_rank = «2»", "there is no such node", "from 0 to 1"),
    ],
)
def test_nodes_that_do_not_fit_together_are_pointed_at(
    expect_fault: ExpectFault, options: str, message: str, hint: str
) -> None:
    shared = f'{VLLM}\ntensor_parallel = 2\nhead_address = "10.0.0.1:29500"\n{options}'
    expect_fault({**WITH_SOURCE, SPARK_ENGINE: shared}, message, hint)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"node_rank = 1": "node_rank = 0"}, "spark has this head and node_rank = 0 too"),
        ({"tensor_parallel = 2": "tensor_parallel = 4"}, "spark has this head and another tensor_parallel"),
        ({"nnodes = 2": 'nnodes = 2\ndtype = "float16"'}, "spark has this head and another dtype"),
        ({"parallel = 2": "parallel = 3", "nnodes = 2": "nnodes = 3"}, "spark has this head and another nnodes"),
        ({'model = "qwen:30b"': 'model = "qwen:3b"'}, "spark has this head and another model"),
    ],
)
def test_nodes_of_one_head_that_differ_are_pointed_at(
    expect_fault: ExpectFault, changes: dict[str, str], fault: str
) -> None:
    second = SECOND.replace('"192.168.100.1:29500"', '«"192.168.100.1:29500"»')
    for old, new in changes.items():
        second = second.replace(old, new)
    small = '[models."qwen:3b"]\ncontext = 64\nsources = {vllm = "Qwen/Qwen-3B"}\n\n[hosts.mac]'
    hint = "the nodes of one head differ in node_rank alone; another vLLM has another head_address"
    expect_fault(
        {
            **WITH_SOURCE,
            SPARK_ENGINE: NODES,
            "[hosts.mac]": small,
            'engine.name = "mlx"\n': f'engine.name = "mlx"\n{second}',
        },
        fault,
        hint,
    )


def test_the_stages_of_a_pipeline_have_ranks_of_their_own_on_the_nodes(tmp_path: Path) -> None:
    text = FLEET.replace(SOURCES, WITH_SOURCE[SOURCES]).replace(SPARK_ENGINE, f"{NODES}\npipeline_parallel = 3")
    (tmp_path / "hosts.toml").write_text(text)
    engine = load(tmp_path / "hosts.toml").hosts["spark"].engine
    assert (engine.ranks, engine.ranks_here) == (6, 3)
    assert engine.prompts_kv_bytes == 6 * engine.kv_cache_memory_bytes


def test_more_ranks_than_a_transfer_has_parts_are_pointed_at(expect_fault: ExpectFault) -> None:
    options = f"{VLLM}\ntensor_parallel = 32\npipeline_parallel = «4»"
    hint = "tensor_parallel * pipeline_parallel is at most 64"
    expect_fault({**WITH_SOURCE, SPARK_ENGINE: options}, "these are 128 ranks", hint)


def test_a_head_address_without_nodes_is_pointed_at(expect_fault: ExpectFault) -> None:
    shared = f'{VLLM}\n«head_address» = "10.0.0.1:29500"'
    hint = "add nnodes = 2, or remove this line"
    expect_fault({**WITH_SOURCE, SPARK_ENGINE: shared}, "head_address is for several nodes", hint)


@pytest.mark.parametrize("address", ["10.0.0.1", "10.0.0.1:", ":29500", "10.0.0.1:0", "10.0.0.1:70000"])
def test_the_head_address_of_nodes_has_a_port(expect_fault: ExpectFault, address: str) -> None:
    shared = f'{VLLM}\ntensor_parallel = 2\nnnodes = 2\nhead_address = «"{address}"»'
    hint = 'address:port, as in "192.168.100.1:29500"'
    expect_fault({**WITH_SOURCE, SPARK_ENGINE: shared}, "this is no address with a port", hint)


SERVED = 'name = "vllm-server"\nurl = "http://127.0.0.1:8100"'
OF_SERVED = {SOURCES: 'sources = {vllm-server = "Qwen/Qwen-FP8"'}


def test_a_host_beside_a_vllm_serve_knows_where_its_key_is_and_so_does_its_own_hosts_toml(tmp_path: Path) -> None:
    text = FLEET.replace(SOURCES, OF_SERVED[SOURCES])
    text = text.replace(SPARK_ENGINE, f'{SERVED}\nkey_file = "~/.config/vllm.key"')
    (tmp_path / "hosts.toml").write_text(text)
    fleet = load(tmp_path / "hosts.toml")
    assert fleet.hosts["spark"].engine.key_file == "~/.config/vllm.key"
    (tmp_path / "own.toml").write_text(render(fleet, ["spark"], {"qwen:30b": {"vllm-server": "Qwen/Qwen-FP8"}}))
    assert load(tmp_path / "own.toml").hosts["spark"].engine == fleet.hosts["spark"].engine


def test_a_deployed_host_beside_a_vllm_serve_has_no_variable_with_its_key(expect_fault: ExpectFault) -> None:
    options = f'{SERVED}\n«key_variable» = "VLLM_API_KEY"'
    message = "the server spark has no such variable"
    expect_fault({**OF_SERVED, SPARK_ENGINE: options}, message, "name a file on its machine: key_file")
