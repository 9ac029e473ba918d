"""One call, from the method that a driver calls to its result; the folder `worker` is the side of the rank."""
