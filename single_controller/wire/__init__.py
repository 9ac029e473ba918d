"""Every connection of the library. See docs/internals.md.

Calls and commands travel in numbered frames: `connection` has the frames and the thread that reads them, `listener` the
rank's side, and `link` the driver's side. `stream` has connections for bytes in bulk. All begin with the same
`handshake`.
"""
