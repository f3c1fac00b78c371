"""A Triton model repository served inside one Python process, batched by Triton's rules."""
