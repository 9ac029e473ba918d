"""Megatron: workers that stand where Megatron put them, layers cut over tensor-parallel ranks, whole decoders."""
