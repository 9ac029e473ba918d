"""Clients of environments that run elsewhere."""
