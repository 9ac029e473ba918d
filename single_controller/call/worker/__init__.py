"""The side of a worker: its base class, the classes as a group takes them, and how its rank runs a call."""
