"""The ways in which weights travel."""
