"""What runs in the process of a rank, and how it starts."""
