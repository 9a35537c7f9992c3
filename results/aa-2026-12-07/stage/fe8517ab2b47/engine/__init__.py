"""The in-repo engine: greedy serving of dense Llama and Qwen3 checkpoints.  `engine.api` is its front door."""

__version__ = "0.1.0"
