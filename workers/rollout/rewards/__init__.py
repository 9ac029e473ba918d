"""Compute rewards with the user's function."""
