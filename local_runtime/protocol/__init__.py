"""The Open Inference Protocol over HTTP and gRPC, in front of the runtime."""
