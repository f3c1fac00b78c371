"""A Triton model repository served inside one Python process, batched by Triton's rules.

From the outside inwards; what is marked *pure* has no clock, no I/O and no torch:

- `__main__`: the commands `serve` and `bench`. `bench`: what batching gains, measured.
- `ray_serve`: many runtimes behind one door, on a Ray cluster.
- `protocol`: the Open Inference Protocol over HTTP and gRPC; its codecs are *pure*.
- `runtime`: the face: open a repository, infer, stream, load, unload, close.
- `lifecycle`: which versions are served, and how that changes without losing a request. `decoupled`: requests with any
  number of answers. `loader`: one version from its files to instances and a scheduler.
- `executors`: one thread for each instance, and a way to run each kind of model file. `executors.shim` is what a
  `model.py` sees of Triton.
- `scheduling`: which requests run together and when. Policies (`batching` with `request_queue`, `sizing` or `adaptive`;
  `sequencing` with `sequence_batches` and `sequence_inputs`) are *pure*; `scheduler` is the clock and the futures
  around them. `ensemble`: models made of models. `validation`, `collate`, `response_cache`, `stats`: *pure*.
- `repository`: what lies on disk. `model_config` (*pure*) is a `config.pbtxt` as a checked value, `parsing` with
  `schedulers` and `config_checks` (*pure*) makes it, `completion` (*pure*) fills in defaults, `autocomplete` what a
  model's file tells, `reader` finds models and versions.
- `messages`, `errors` (*pure*): the values that cross the face.

One request: `protocol` decodes it, `runtime.infer` finds the version, `validation` checks it, `scheduler` queues it and
obeys its policy, an instance runs the batch, and the answer goes back the same way.
"""
