"""The coordinator (control plane) and the aggregator (data plane) of a run."""
