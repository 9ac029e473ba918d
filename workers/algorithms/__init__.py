"""Formulas of reinforcement learning on tensors: advantages, losses, corrections. They communicate with nobody."""
