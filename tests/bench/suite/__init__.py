"""The suite of `python -m tests.bench`: every speed goal, measured beside what it is held against.

goals      what a figure must be, and whether it is: pure
report     the document that is kept, and its tables: pure
bench      what a row is given: rounds, cores, a folder; runs in turns
machine    where and with what it was measured
servers    processes on a core of their own: the gateway, nginx, the load
peers      other products, each in an environment of its own, installed when asked for
rows/      one file for each path of the goals
"""
