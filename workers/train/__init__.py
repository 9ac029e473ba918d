"""Training of a policy by reinforcement learning: what every backend shares, and the group that drives the ranks."""
