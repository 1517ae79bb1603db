"""Measurements that are no tests: each is a command, its last result lies in results/."""
