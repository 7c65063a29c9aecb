"""The Ollama API: POST /api/chat and /api/generate."""
