"""Keeping a latency promise. `promised` is the policy that the scheduler asks; read it first.

`step_time` predicts steps, `pace` turns a TPOT into limits, `outlook` is one moment, `turns` says
whose prompt goes first, `ladder` how much of the allowance is spent, `retry` when to come again.
"""
