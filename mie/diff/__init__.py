"""One workload on two backends, compared operator by operator. It knows the Backend contract and
loads engines; it must not know how any backend computes."""
