"""Generation in the background: the stream, its buffer, and the router that gives groups of samples to workers."""
