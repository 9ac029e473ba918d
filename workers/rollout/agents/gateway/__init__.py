"""The gateway: an HTTP server through which a program that knows nothing of this library plays a session."""
