"""What lies in a Triton model repository: `config.pbtxt` as a checked value, and the folders around it."""
