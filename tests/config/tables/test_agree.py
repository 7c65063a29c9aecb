"""One KV dtype for the prefill and decode hosts of a model, and splits of the layers that they have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from disagg.config import load
from disagg.errors import ConfigError

Expect = Callable[[dict[str, str], str, str], ConfigError]

SPARK = 'name = "transformers"'
MAC = 'engine.name = "mlx"'
HINT = "one dtype for all prefill and decode hosts of qwen:30b"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {SPARK: SPARK + '\ndtype = "bfloat16"', MAC: MAC + '\nengine.dtype = «"float32"»'},
            "KV in float32 does not fit [hosts.spark], which has bfloat16",
        ),
        ({MAC: MAC + '\nengine.dtype = «"float16"»'}, "KV in float16 does not fit [hosts.spark], which has bfloat16"),
        ({SPARK: SPARK + '\ndtype = «"float32"»'}, "KV in float32 does not fit [hosts.mac], which has bfloat16"),
    ],
)
def test_hosts_whose_kv_differs_in_dtype_are_refused_at_the_one_that_states_it(
    expect_fault: Expect, changes: dict[str, str], message: str
) -> None:
    expect_fault(changes, message, HINT)


@pytest.mark.parametrize(("split", "stated"), [("30", "split = 30"), ("0", "split = 0"), ('"off"', 'split is "off"')])
def test_a_split_that_a_prefill_host_with_the_first_layers_has_no_part_in_is_refused(
    expect_fault: Expect, split: str, stated: str
) -> None:
    changes = {SPARK: SPARK + '\nlayers = "0:24"', MAC: MAC + f"\nengine.split = «{split}»"}
    expect_fault(changes, f"{stated}, and [hosts.spark] has the first 24 layers alone", '"auto", or from 1 to 24')


@pytest.mark.parametrize("split", ["24", "1", '"auto"'])
def test_a_split_of_the_layers_that_there_are_is_taken(fleet_text: str, tmp_path: Path, split: str) -> None:
    path = tmp_path / "hosts.toml"
    part = fleet_text.replace(SPARK, SPARK + '\nlayers = "0:24"')
    path.write_text(part.replace(MAC, MAC + f"\nengine.split = {split}"))
    assert load(path).hosts["mac"].engine.split == (24 if split == "24" else 1 if split == "1" else "auto")


PREFILL = """
[hosts.{name}]
address = "10.0.1.1"
roles = ["prefill"]
model = "{model}"
port = {port}
engine = {{name = "transformers", dtype = "{dtype}"}}
"""
DECODE = """
[hosts.{name}]
address = "10.0.1.2"
roles = ["decode"]
model = "{model}"
port = {port}
kv_port = 1{port}
engine = {{name = "mlx", dtype = "{dtype}"}}
"""


def test_a_second_pair_of_a_model_has_the_dtype_of_the_first(fleet_text: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    second = (PREFILL.format(name="p2", model="qwen:30b", port=8100, dtype="float32")) + (
        DECODE.format(name="d2", model="qwen:30b", port=8101, dtype="float32")
    )
    path.write_text(fleet_text + second)
    with pytest.raises(ConfigError, match=r"KV in float32 does not fit \[hosts\.mac\]"):
        load(path)
    path.write_text(fleet_text + second.replace("float32", "bfloat16"))
    assert len(load(path).hosts) == 4


def test_models_differ_in_dtype_and_so_may_hosts_that_hand_nothing_to_each_other(
    fleet_text: str, tmp_path: Path
) -> None:
    path = tmp_path / "hosts.toml"
    whole = """
[hosts.ollama]
roles = ["whole"]
model = "qwen:30b"
engine = {name = "openai", url = "http://10.0.0.9:11434/v1"}
"""
    alone = DECODE.format(name="d2", model="plain", port=8101, dtype="float32")
    other = DECODE.format(name="d3", model="plain", port=8102, dtype="float16")
    path.write_text(fleet_text + whole + alone + other)
    assert len(load(path).hosts) == 5
    one = fleet_text.replace('engine.name = "mlx"', 'engine = {name = "mlx", dtype = "float32"}')
    path.write_text(one.replace(SPARK, SPARK + '\ndtype = "float32"') + whole)
    assert {host.engine.dtype for host in load(path).hosts.values() if not host.whole} == {"float32"}
