"""Batches of rollouts: their schema, collation, order and micro-batches."""
