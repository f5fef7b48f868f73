"""Bringing rollout workers to the trainer's weights by the sketches that moved the trainer."""
