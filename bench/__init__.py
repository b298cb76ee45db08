"""Benchmarks. They use public names only, so they are examples too. README.md says how to run."""
