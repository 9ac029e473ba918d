"""Generation: an engine behind a small interface, the worker around it, and the manager that drives many of them."""
