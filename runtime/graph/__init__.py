"""What is compiled: codelets, vertex groups, compute sets, the control program, and their text."""
