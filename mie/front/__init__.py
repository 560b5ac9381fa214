"""One address for several servers of a model: requests go to one of them, and some to all.

This room knows HTTP and what the servers say. It does not know where they run, or what carries the
messages: `Replicas` is all that it needs of that.
"""
