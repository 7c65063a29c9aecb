"""The Anthropic API: POST /v1/messages."""
