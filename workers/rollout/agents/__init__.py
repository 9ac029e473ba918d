"""Agents: rollouts of several turns, with environments and tools. A session is a tree of tokens."""
