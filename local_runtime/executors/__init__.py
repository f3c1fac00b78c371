"""What runs a batch: one thread for each instance, and a way to run each kind of model file."""
