"""The demo's model, changed so that every server answers alike.

In float32, since mlx's CPU backend multiplies experts in no other dtype and mlx_lm.server uses the checkpoint's; and
with an end-of-sequence token that is never generated, since mlx_lm.server has no option to ignore it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import disagg

DEMO_MODEL = Path(disagg.__file__).parent / "demo" / "models" / "qwen3-moe-tiny"


def write(source: Path, folder: Path) -> None:
    """Copy the model into `folder`, with these changes."""
    import mlx.core as mx

    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for weights in source.glob("*.safetensors"):
        loaded: Any = mx.load(str(weights))
        arrays = {name: array.astype(mx.float32) for name, array in loaded.items()}
        mx.save_safetensors(str(folder / weights.name), arrays, metadata={"format": "pt"})
    end = json.loads((source / "config.json").read_text())["vocab_size"]
    _change(folder / "config.json", {"dtype": "float32", "eos_token_id": end})
    _change(folder / "generation_config.json", {"eos_token_id": end})
    _change(folder / "tokenizer_config.json", {"eos_token": None})


def _change(path: Path, changes: dict[str, Any]) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}, indent=2))
