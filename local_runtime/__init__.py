"""A Triton model repository served inside one Python process, batched by Triton's rules.

From the face inwards; what is marked *pure* has no clock, no I/O and no torch:

- `runtime`: the face: open a repository, infer, close. `oip_grpc` and `__main__` offer it to other processes.
- `loader`: which model is run by what. `repository`: what lies on disk.
- `scheduler`: the clock and the futures around `batching` (*pure*: which requests make the next batch, and when).
- `executor`: one thread for each instance; `collate` (*pure*: requests to one batch and its rows back).
- `python_model` and `triton_python_backend_utils`: models written in Python. `ensemble`: models made of models.
- `model_config` and `completion` (*pure*): `config.pbtxt` as a checked value. `validation` (*pure*): requests and
  answers against it. `oip_codec` (*pure*): the protocol's tensors. `stats`, `messages`, `errors` (*pure*): values.
"""
