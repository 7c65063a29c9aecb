"""disagg: prefill on NVIDIA, decode on Apple, one LLM server."""

__version__ = "0.1.0"
