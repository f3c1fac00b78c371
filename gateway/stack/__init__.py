"""The embedded stack: how each real part is found, started, watched and stopped.

`parts` finds (pure answers: a `Part` or a `Missing` with its reason), `process` runs one part, `supervisor`
runs all of them, `state` is what other commands and a later run can read of it.
"""
