"""Every connection of the library. See docs/internals.md.

Calls and commands travel in numbered frames: `connection` has the frames and the thread that reads them, `link` the
driver's side and the session that a rank keeps for it, and `listener` the rest of the rank's side. `stream` has
connections for bytes in bulk. All begin with the same `handshake`.
"""
