"""Rules of loops, branches and calls, of callbacks, streams and collectives, and of codelets of users."""
