"""What agents send: the shapes of real requests of Codex 0.169.0 and Claude Code 2.1.197, with short texts."""

from __future__ import annotations

from typing import Any

from disagg.gateway.dialects.anthropic import Messages
from disagg.gateway.dialects.responses import Responses


def function(name: str, **fields: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"text": {"type": "string"}}, "additionalProperties": False}
    return {"type": "function", "name": name, "description": "Does it.", "strict": False, "parameters": schema} | fields


CODEX = {
    "model": "qwen",
    "stream": True,
    "input": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Be an agent."}],
        },
        {
            "type": "message",
            "id": "msg_2",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<skills/>"}],
        },
        {
            "type": "message",
            "id": "msg_3",
            "role": "user",
            "content": [{"type": "input_text", "text": "<environment/>"}],
        },
        {"type": "message", "id": "msg_4", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    ],
    "tools": [
        function("exec_command"),
        {
            "type": "namespace",
            "name": "multi_agent_v1",
            "description": "Other agents.",
            "tools": [function("spawn_agent"), function("wait_agent")],
        },
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01",
    "client_metadata": {"session_id": "01", "turn_id": "02"},
}
CLAUDE_CODE = {
    "model": "qwen",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder/>"},
                {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "system", "content": "These agents exist."},
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.0df; cc_entrypoint=sdk-cli;"},
        {"type": "text", "text": "Be an agent.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [{"name": "Bash", "description": "Runs it.", "input_schema": {"type": "object", "properties": {}}}],
    "metadata": {"user_id": '{"session_id": "01"}'},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}


def test_codex_is_answered_with_its_default_settings() -> None:
    request = Responses().read(CODEX)
    assert [tool["name"] for tool in request.options["tools"]] == [
        "exec_command",
        "multi_agent_v1__spawn_agent",
        "multi_agent_v1__wait_agent",
    ]
    assert request.left_out == ("tools[2]: the model is not told about web_search, which is no function",)
    assert [message["content"] for message in request.prompts[0]["messages"]] == [
        "Be an agent.\n\n<skills/>",
        "<environment/>",
        "hi",
    ]
    assert request.stream and request.seal_reasoning


def test_claude_code_is_answered_and_its_changing_block_is_left_out() -> None:
    request = Messages().read(CLAUDE_CODE)
    assert [tool["name"] for tool in request.options["tools"]] == ["Bash"]
    assert [(message["role"], message["content"]) for message in request.prompts[0]["messages"]] == [
        ("system", "Be an agent."),
        ("user", "<system-reminder/>\nhi"),
        ("system", "These agents exist."),
    ]
    assert request.stream and request.reasoning and request.options["fit_context"]
