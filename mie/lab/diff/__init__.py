"""Compare one workload on two backends, operator by operator.

This room knows the Backend contract and loads engines. It must not know how any backend computes.
"""
