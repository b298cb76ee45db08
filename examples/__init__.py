"""Step functions to copy. Run from the root of a clone: README.md says how."""
