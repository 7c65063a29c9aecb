"""A stock `vllm serve` with disagg's connector, for tests: the command of docs/vllm.md, on vLLM's CPU build."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from disagg.engines.vllm.load import ENVIRONMENT
from tests.deadlines import wait_until
from tests.fleets import VLLM_START_S, vllm_process
from tests.preloaded import ForkedServer

CONNECTOR = (
    '{"kv_connector": "DisaggConnector", "kv_connector_module_path": "disagg.engines.vllm.connector", '
    '"kv_role": "kv_producer"}'
)
FLAGS = ("--dtype=float32", "--enforce-eager", "--max-model-len=8192", "--max-num-batched-tokens=96")


@dataclass(frozen=True, slots=True)
class VLLMServe:
    """A server that answers. log: of its processes."""

    url: str
    process: ForkedServer
    log: Path

    def busy(self) -> tuple[float, float]:
        """Requests that it has, and the share of its KV blocks that they hold."""
        values = dict.fromkeys(("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"), 0.0)
        for line in httpx.get(f"{self.url}/metrics", trust_env=False, timeout=30).text.splitlines():
            name = line.removeprefix("vllm:").partition("{")[0]
            if name in values and line.startswith("vllm:"):
                values[name] += float(line.rpartition(" ")[2])
        return values["num_requests_running"] + values["num_requests_waiting"], values["kv_cache_usage_perc"]


@contextmanager
def vllm_serve(
    folder: Path, model: Path, port: int, flags: Sequence[str] = (f"--kv-transfer-config={CONNECTOR}",)
) -> Iterator[VLLMServe]:
    """The server of this model, until the end of the block."""
    log = folder / "vllm-serve.log"
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(_named_vllm(folder)),
    }
    arguments = ["serve", str(model), "--host=127.0.0.1", f"--port={port}", *FLAGS, *flags]
    process = vllm_process().start(arguments, environment, log, program="vllm.entrypoints.cli.main")
    server = VLLMServe(f"http://127.0.0.1:{port}", process, log)

    def ready() -> bool:
        assert process.poll() is None, f"vllm serve ended:\n{log.read_text()[-6000:]}"
        with suppress(httpx.TransportError):
            return httpx.get(f"{server.url}/health", trust_env=False, timeout=30).is_success
        return False

    try:
        wait_until(ready, VLLM_START_S, "vllm serve to be ready")
        yield server
    finally:
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(process.pid)
            for one in (*parent.children(recursive=True), parent):
                with suppress(psutil.NoSuchProcess):
                    one.kill()


def _named_vllm(folder: Path) -> Path:
    """A folder that states the version of vLLM under its own name, which the command asks for: the CPU build is
    installed under another one."""
    metadata = folder / "metadata" / "vllm-0.32.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return metadata.parents[1]
