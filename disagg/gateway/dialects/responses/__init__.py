"""The OpenAI API: POST /v1/responses."""
