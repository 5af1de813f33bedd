"""UMBP keeps the KV cache of an LLM engine beyond the engine's own memory."""

__version__ = "0.1.0"
