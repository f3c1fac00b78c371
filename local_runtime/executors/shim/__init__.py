"""The classes behind `triton_python_backend_utils`, by theme."""
