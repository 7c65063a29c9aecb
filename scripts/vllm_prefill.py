"""Prefill a tiny random model of every known architecture with vLLM, and write what became of it.

    python -m scripts.vllm_prefill docs/architectures.md

Names after the page: only these rows. Needs .venv-vllm (`make .venv-vllm/.ready`). Each model is compared by
`disagg verify` in float32, half a minute of CPU time; of layers that are never read from vLLM's pages no model is made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from disagg.engines.model import checkpoint
from disagg.engines.vllm.rows import Sharding
from disagg.errors import ModelError
from scripts.architectures import layers_of
from scripts.tables import known, short, write_rows
from tests.engines.architectures.configs.rewrite import PREFIXES
from tests.engines.architectures.pairs import make
from tests.fleets import VLLM_PYTHON, VLLM_VARIABLES

LIMIT_S = 600.0
FIRST, LAST = "<!-- vllm -->\n", "<!-- end of vllm -->\n"
HEAD = """\
| model type | prefill with vLLM | largest difference |
| --- | --- | --- |
"""


def row(name: str, entry: Mapping[str, Any]) -> str:
    """The cells of a row after the name."""
    layout = checkpoint.layout_of(layers_of(entry["model_type"], entry), "float32")
    try:
        Sharding.of(layout, ranks=1)
    except ModelError as error:
        return f"refused: {error.message} | "
    with tempfile.TemporaryDirectory(prefix="disagg-vllm-") as folder:
        model = Path(folder) / "model"
        make(with_wide_heads(entry), model)
        return verdict(verified(model), model)


def with_wide_heads(entry: Mapping[str, Any]) -> dict[str, Any]:
    """With heads of 32, which vLLM's attention on CPUs needs."""
    if entry["model_type"] in PREFIXES:
        return {**entry, "text_config": with_wide_heads(entry["text_config"])}
    heads = {"num_attention_heads": 2, "num_key_value_heads": min(2, entry["num_key_value_heads"])}
    return {**entry, **heads, **({"head_dim": 32} if "head_dim" in entry else {})}


def verified(model: Path) -> Mapping[str, Any]:
    """What `disagg verify` prints."""
    options = ["--prefill-engine", "vllm", "--prefill-python", str(VLLM_PYTHON), "--context", "2048"]
    process = subprocess.run(
        [sys.executable, "-m", "disagg.verify", str(model), str(model), *options],
        env={**os.environ, **VLLM_VARIABLES},
        stdout=subprocess.PIPE,
        timeout=LIMIT_S,
        check=False,
        text=True,
    )
    found: Mapping[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return found


def verdict(found: Mapping[str, Any], model: Path) -> str:
    """A report of `disagg verify`, or its error, as cells."""
    if "error" in found:
        return f"refused: {short(found['error']['message'], model)} | "
    pair = found["handoff_vs_decode"]
    same = pair["first_divergence"] is None and found["handoff_vs_prefill"]["first_divergence"] is None
    return f"{'exact' if same else '**differs**'} | {pair['max_logit_diff']:.0e}"


def main(page: Path, names: Sequence[str]) -> None:
    entries = known()
    for name in names or entries:
        made = f"| {name} | {row(name, entries[name])} |\n"
        print(made, end="", file=sys.stderr)
        write_rows(page, FIRST, LAST, HEAD, {name: made})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
