"""`gateway sweep`: which batching of a model serves a load best, found by measuring it.

`settings` (what can be swept) and `search` (what to measure next, and what is best) are pure. `callers` is the load;
`servers` what is asked of a server, `local` and `triton` the two kinds, `memory` what they take; `curve` measures how
long batches take; `record` keeps the runs so that a sweep can go on later; `outcome` and `pictures` tell what was
found; `sweep` is the walk.
"""
