"""Workers that people use as they are, or subclass: Megatron, FSDP, training and rollout.

The top floor of the house: it may import ``single_controller`` and ``dispatch``, and neither of them
may import it. Heavy libraries (megatron, transformers) are imported only inside the modules that need
them, and only when they are used.
"""
