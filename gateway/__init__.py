"""The hybrid inference gateway: one REST API in front of Triton, a local PyTorch runtime and LLM endpoints."""

__version__ = "0.1.0"
