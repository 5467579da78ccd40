"""Rules of loops, branches and calls, of effects, streams and collectives, and of codelets of users."""
