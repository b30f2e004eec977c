"""Benchmark of context parallelism: one layer over several GPUs of this machine.

run          the order of the cells, the same on every rank
workers      a worker process per rank, which is replaced after a failure
worker       the tasks of a worker
call         one timed call, forward and backward
traffic      the collectives of a call: traced, repeated alone, and replaced
equality     judges the layer on several ranks against one process
projection   the time on more GPUs than the machine has
result       the result file
"""
