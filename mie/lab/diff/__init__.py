"""Compare one workload on two backends, operator by operator.

This room uses the Backend contract and loads engines. It must not depend on the way that any
backend computes.
"""
