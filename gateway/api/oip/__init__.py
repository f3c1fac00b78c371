"""`/v2`: the Open Inference Protocol with Triton's extensions."""
