"""LoGRA on Megatron-Core: reinforcement learning with low-rank gradient sketches."""

__version__ = "0.1.0"
