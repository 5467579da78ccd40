"""One process of a run: its place among the others, and arrays of all of them.

instance.py     runs the script inside an instance; itself runs as a script, with the standard library alone, so that an
                instance imports nothing before the user's own first line
membership.py   an instance's view: who am I, how many are we, may we act together
mesh.py         instances as devices of JAX
spread.py       a function of several replicas among instances
"""
