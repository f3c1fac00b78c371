"""What to change of a model's setting: what was seen -> neighbours of the setting, simulated -> one change, or none.

`situation` is what was seen, `reading` makes it of two looks at a stack, `sweeps` of the folder of a sweep, `search`
decides, `writing` makes the diff.
"""
