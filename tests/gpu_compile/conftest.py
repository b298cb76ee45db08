"""Where the `test` extra brings no compiler for GPUs, only what needs none can be tested."""

import platform

if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
    collect_ignore = ["test_command.py", "test_mosaic_kernels.py", "test_steps.py"]
