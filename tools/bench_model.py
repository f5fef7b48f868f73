"""The model that the benchmarks run: a GPT with SwiGLU and heads of 64 channels."""

from __future__ import annotations

from typing import Any


def model_section(layers: int, hidden: int, vocabulary: int) -> dict[str, Any]:
    """The configuration's `model` for a width of `hidden`, a multiple of 64."""
    return {
        "spec": {
            "num_layers": layers,
            "hidden_size": hidden,
            "ffn_hidden_size": hidden * 8 // 3 // 64 * 64,
            "num_attention_heads": hidden // 64,
            "num_query_groups": hidden // 64,
            "vocab_size": vocabulary,
            "share_embeddings_and_output_weights": True,
        },
        "tokenizer": "bytes",
    }
