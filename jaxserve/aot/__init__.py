"""Compiling the whole step for an NVIDIA card ahead of time, with no card present.

`target` describes the cards, `lower` traces a step without allocating anything, `compiling` runs
XLA's GPU compiler on it, `kernels`, `hlo`, `schedule` and `traffic` read the result, `survey` does
so for all shapes a server needs, `report` prints it, and `saved` keeps executables for a machine
that has the card.

Everything here is a fact of compilation, or arithmetic on published rates. No time is measured.
"""
