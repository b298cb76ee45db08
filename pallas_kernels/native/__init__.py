"""CPU kernels in C++, called from compiled steps through XLA's foreign function interface.

They are compiled on this machine, for this machine, when they are first asked for. Where that does
not work the plain jnp versions serve, which are also their specification.
"""
