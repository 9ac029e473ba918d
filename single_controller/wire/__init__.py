"""Numbered frames over TCP: the only path of calls between a driver and its ranks. See docs/internals/wire.md.

`connection` has the frames and the thread that reads them, `listener` the rank's side, and `link` the driver's side.
"""
