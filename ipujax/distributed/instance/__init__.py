"""One process of a job: its place among the others, and arrays of all of them.

membership.py      the index of this process and the number of processes, as JAX has them; how all meet first
process_arrays.py  arrays of all processes, which are devices of JAX
meeting.py         what all agree on before they act together; processes that are lost
spread.py          a function of several replicas among processes
"""
