"""Megatron-core backends: workers that report megatron's layout, tensor-parallel layers, and whole language models."""
