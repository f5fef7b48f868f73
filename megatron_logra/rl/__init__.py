"""The reinforcement-learning loop: problems, rewards, advantages, losses, training."""
