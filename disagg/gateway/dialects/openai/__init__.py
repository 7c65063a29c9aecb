"""The OpenAI API: POST /v1/chat/completions and /v1/completions."""
