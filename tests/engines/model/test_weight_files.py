"""disagg/engines/model/reference.py: damaged weights are found by looking at headers and sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from disagg.engines.model.reference import INDEX, check_weights
from disagg.errors import ModelError
from disagg.planning.checkpoint import read_object


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    weight_map = {}
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        save_file({f"w{number}": torch.ones(8, 8)}, tmp_path / name, metadata={"format": "pt"})
        weight_map[f"w{number}"] = name
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def shard(folder: Path) -> Path:
    return folder / "model-00002-of-00002.safetensors"


def test_whole_shards_pass(sharded: Path) -> None:
    check_weights(sharded)


def test_a_shard_that_the_index_names_but_is_not_there_is_named(sharded: Path) -> None:
    shard(sharded).unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors: cannot be read: No such file"):
        check_weights(sharded)


def test_a_truncated_shard_is_named_with_both_sizes(sharded: Path) -> None:
    whole = shard(sharded).read_bytes()
    shard(sharded).write_bytes(whole[:-10])
    with pytest.raises(ModelError, match=f"{len(whole) - 10} bytes, but its header describes {len(whole)}"):
        check_weights(sharded)


@pytest.mark.parametrize(
    "content",
    [b"", b"version https://git-lfs.github.com/spec/v1\n", (5).to_bytes(8, "little") + b"[1,2]", b"\x02" + b"\0" * 7],
    ids=["empty", "LFS pointer", "header of another type", "header cut off"],
)
def test_a_file_that_is_no_safetensors_file_is_refused(sharded: Path, content: bytes) -> None:
    shard(sharded).write_bytes(content)
    with pytest.raises(ModelError, match=r"model-00002.*(not a safetensors file|malformed safetensors header)"):
        check_weights(sharded)


def test_a_tensor_that_the_index_places_in_a_shard_without_it_is_named(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["w3"] = shard(sharded).name
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match="w3 is missing"):
        check_weights(sharded)


def test_an_index_without_a_weight_map_is_refused(sharded: Path) -> None:
    (sharded / INDEX).write_text("{}")
    with pytest.raises(ModelError, match="no weight_map"):
        check_weights(sharded)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"no \*\.safetensors weights"):
        check_weights(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_object(tmp_path / "config.json")
