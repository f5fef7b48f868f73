"""Models: building them, their layers, their weights and their tokenizers."""
