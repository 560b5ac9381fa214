"""One address for several servers of a model: requests go to one of them, and some to all.

This room knows HTTP and the servers' answers. It does not know where they run, or how messages
travel: `Replicas` is all that it needs of that.
"""
