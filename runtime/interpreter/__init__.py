"""The tile interpreter: runs a program tile by tile and vertex by vertex, as the machine would."""
