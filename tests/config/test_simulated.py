"""hosts.toml for simulated hosts: a machine to play and a model's size, each fault pointed at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from disagg.config import Model, load
from disagg.errors import ConfigError, UsageError
from disagg.planning.sizing import hardware_of, read_size, size_source

Expect = Callable[[dict[str, str], str, str], ConfigError]

SOURCES = 'sources = {transformers = "Qwen/Qwen", mlx = "mlx/Qwen"}'
SIMULATED_SOURCE = {SOURCES: 'sources = {simulated = "shape:qwen3-coder-30b", mlx = "mlx/Qwen"}'}
SPARK_ENGINE = 'name = "transformers"'
SPARK = '[hosts.spark]\naddress = "10.0.0.1"'


def simulated(fleet_text: str, path: Path) -> Path:
    text = fleet_text.replace(*next(iter(SIMULATED_SOURCE.items())))
    text = text.replace(SPARK, SPARK + '\nhardware = "dgx-spark"')
    text = text.replace(SPARK_ENGINE, 'name = "simulated"\ndtype = "float16"\nchunk_tokens = 64')
    path.write_text(text.replace('engine.name = "mlx"', 'engine = {name = "mlx", dtype = "float16"}'))
    return path


def test_a_simulated_host_says_what_it_plays(fleet_text: str, tmp_path: Path) -> None:
    fleet = load(simulated(fleet_text, tmp_path / "hosts.toml"))
    spark, mac = fleet.hosts["spark"], fleet.hosts["mac"]
    assert (spark.hardware, spark.simulated, spark.engine.dtype, spark.engine.chunk_tokens) == (
        "dgx-spark",
        True,
        "float16",
        64,
    )
    assert (mac.hardware, mac.simulated) == (None, False)
    assert fleet.models["qwen:30b"].sources["simulated"] == "shape:qwen3-coder-30b"


def test_a_path_as_size_is_made_absolute(fleet_text: str, tmp_path: Path) -> None:
    path = simulated(fleet_text, tmp_path / "hosts.toml")
    path.write_text(path.read_text().replace("shape:qwen3-coder-30b", "./sizes/config.json"))
    assert load(path).models["qwen:30b"].sources["simulated"] == str(tmp_path / "sizes" / "config.json")


def test_a_simulated_host_needs_hardware(expect_fault: Expect) -> None:
    expect_fault(
        {
            **SIMULATED_SOURCE,
            SPARK_ENGINE: 'name = "simulated"',
            "[hosts.spark]": "«[hosts.spark]»",
        },
        'missing key "hardware" in [hosts.spark]',
        'the engine "simulated" predicts the times of a machine: add hardware = "dgx-spark"',
    )


def test_unknown_hardware_is_pointed_at_on_any_host(expect_fault: Expect) -> None:
    expect_fault(
        {SPARK: SPARK + '\nhardware = «"dgx-sparc"»'},
        '"dgx-sparc" is not a value for hardware',
        'one of "dgx-spark", "m3-ultra", "m4-max", "m5-max", "m2-ultra", "rtx-4090", "rtx-5090", "a100-80gb", '
        '"h100-sxm", "h200-sxm"; did you mean "dgx-spark"?',
    )


@pytest.mark.parametrize(
    ("source", "message", "hint"),
    [
        (
            '«"shape:qwen3-coder-31b"»',
            'no model shape "qwen3-coder-31b" is known',
            'did you mean "qwen3-coder-30b"?',
        ),
        (
            '«"Qwen/Qwen3"»',
            "this is neither a shape nor a path",
            'as in "shape:llama-3.1-8b" or "./config.json"',
        ),
    ],
)
def test_a_size_that_cannot_be_known_is_pointed_at(expect_fault: Expect, source: str, message: str, hint: str) -> None:
    expect_fault({SOURCES: f'sources = {{transformers = "a/b", mlx = "c/d", simulated = {source}}}'}, message, hint)


def test_options_of_real_engines_are_refused(expect_fault: Expect) -> None:
    expect_fault(
        {
            **SIMULATED_SOURCE,
            SPARK: SPARK + '\nhardware = "dgx-spark"',
            SPARK_ENGINE: 'name = "simulated"\n«device» = "cuda"',
        },
        'unknown key "device" in [hosts.spark.engine]',
        'this is an option of the engine "transformers"',
    )


def test_a_size_is_found_by_name_or_hub_id() -> None:
    model = Model("qwen3-coder:30b", {"transformers": "somebody/else"}, 1024)
    assert size_source(model.name, model.sources.values()) == "shape:qwen3-coder-30b"
    assert size_source("mine", ["openai/gpt-oss-120b-MXFP4"]) == "shape:gpt-oss-120b"
    assert read_size("shape:gpt-oss-20b").layers == 24
    with pytest.raises(UsageError, match="~nobody-here/x: this user has no home folder"):
        read_size("~nobody-here/x")


def test_the_models_own_files_come_before_its_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert size_source("gpt-oss-20b", [str(tmp_path)]) == str(tmp_path)


def test_what_is_not_known_is_asked_for(fleet_text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the size of mystery is unknown"):
        size_source("mystery", ["some/thing"])
    mac = load(simulated(fleet_text, tmp_path / "hosts.toml")).hosts["mac"]
    assert hardware_of(mac.name, mac.hardware, "m4-max") == "m4-max"
    with pytest.raises(UsageError, match="the hardware of mac"):
        hardware_of(mac.name, mac.hardware)
