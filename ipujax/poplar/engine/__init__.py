"""Engines: load and run programs, host streams and channels, options, profiles as Poplar prints them."""
