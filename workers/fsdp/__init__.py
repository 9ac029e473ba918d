"""FSDP2 training of Hugging Face models."""
