"""Plait runs large batches of LLM requests in the order the hardware wants."""

__version__ = "0.1.0"
