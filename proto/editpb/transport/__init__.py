"""gRPC as both ends use it: options of channels and servers, errors as status codes, and byte strings in chunks."""
