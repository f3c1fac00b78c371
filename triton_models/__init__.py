"""The Triton model repository: one folder per model, plus the build step that fills them with weights."""
