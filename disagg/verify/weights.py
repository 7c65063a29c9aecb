"""The form in which a checkpoint has its weights, in words. Pure but for reading config.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def weights_form(path: Path, dtype: str, quantization: str | None = None) -> str:
    """`bfloat16`, `fp8`, `mxfp4` or `8-bit, groups of 64`: of the checkpoint in folder `path`. dtype: of weights that
    are not packed. quantization: the option of hosts.toml, which converts those."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return form(config, dtype, quantization)


def form(config: Mapping[str, Any], dtype: str, quantization: str | None = None) -> str:
    """See `weights_form`."""
    if mlx := config.get("quantization"):
        return " and ".join(_distinct([_group(mlx), *(_group(one) for one in mlx.values() if isinstance(one, dict))]))
    packed = config.get("quantization_config") or {}
    if method := packed.get("quant_method"):
        bits = packed.get("bits")
        return f"{bits}-bit {method}" if bits else str(method)
    return quantization or dtype


def _group(one: Mapping[str, Any]) -> str:
    if one.get("mode", "affine") != "affine":
        return str(one["mode"])
    return f"{one['bits']}-bit, groups of {one['group_size']}"


def _distinct(forms: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(forms))
