"""Triton, or anything else that speaks the Open Inference Protocol over gRPC."""
