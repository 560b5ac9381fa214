"""Compute the steps of one engine in several processes, the ranks, each with a part of the model.

A rank has some heads, some columns and some rows of the vocabulary. This room divides a model
(`share`), moves results between ranks through shared memory (`exchange`), and puts both around a
backend (`backend`). It starts no process and plans no step: `mie.load.ranks` starts the processes,
and the scheduler, the memory and the event log are in rank 0 alone.
"""
