"""The embedded stack: how each real part is found, started, watched and stopped.

- `launch` is `gateway up` and `gateway down`; `environments` is `make setup` (standard library only, it runs first).
- `parts` finds what to start (pure answers: a `Part`, or a `Missing` with its reason), with `triton`, `llm_server`,
  `packages` and `ports` for what is special to each; `probes` asks whether a part is ready, `healthy` is the same as
  a container's health check.
- `supervisor` runs all of them, `process` runs one; `display` and `welcome` tell a person about it.
- `state` is what other commands and a later run can read of it; `leftovers` ends what a killed run left.
"""
