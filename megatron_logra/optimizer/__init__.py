"""From sketches to weights: direction, step control, masters, and Megatron's interface."""
