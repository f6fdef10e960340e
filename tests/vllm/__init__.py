"""vLLM itself, where it is installed: `python -m pytest tests/vllm/replies.py`."""
