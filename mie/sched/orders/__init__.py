"""Choose an order of the waiting queue by the name of a scheduling policy.

To add a policy, write a subclass of `WaitingQueue` here with a rank and a victim, add it to
`ORDERS`, and add its name to ``scheduling_policy`` in mie/config/settings.json.
docs/howto/policy.md lists the tests and the pages too.
"""

from collections.abc import Mapping

from mie.sched.orders.fair import FairQueue
from mie.sched.queue import WaitingQueue
from mie.sched.sequence import Request


class PriorityQueue(WaitingQueue):
    """The lowest priority number first, and equal priorities in the order of arrival."""

    victim = "lowest priority, then last arrived"

    def rank(self, request: Request, step: int) -> int:
        return request.priority


class ShortestJobQueue(WaitingQueue):
    """The shortest job first, aged by ``sjf_ageing`` tokens a step so that none starves.

    A request that arrives later starts that far behind. This gives the same differences as ageing
    every request at every step, so a rank never changes.
    """

    victim = "longest job"

    def rank(self, request: Request, step: int) -> int:
        return request.sequences[0].max_tokens + (self._config.sjf_ageing or 1) * step


ORDERS: Mapping[str, type[WaitingQueue]] = {
    "fcfs": WaitingQueue,
    "priority": PriorityQueue,
    "sjf": ShortestJobQueue,
    "fair": FairQueue,
}
"""The order of each scheduling policy."""
