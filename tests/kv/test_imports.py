import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["api.layout", "kv.fingerprint", "kv.blocks", "kv.received"])
def test_describing_kv_needs_neither_numpy_nor_xxhash(module: str) -> None:
    program = f"import disagg.{module}, sys; print([m for m in ('numpy', 'xxhash') if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == "[]"
