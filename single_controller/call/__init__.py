"""One call, from the method that a driver calls to its result; `executor` is the side of the rank."""
