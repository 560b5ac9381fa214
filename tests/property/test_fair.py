"""Check the law of the fair policy: no client waits because another sends more.

W(t1, t2) is a client's service between two steps: its prompts' tokens, and twice the tokens of
its answers. U bounds a client's service before the next client is admitted: one prompt,
and the answers of all seats. Sheng et al., "Fairness in Serving Large Language Models", prove for
clients that have requests waiting all the time from t1 to t2:

    |W_f(t1, t2) - W_g(t1, t2)| <= 2 U        (their theorem 4.4)
"""

from collections import Counter, deque
from itertools import combinations

import pytest
from audit import queue_of
from hypothesis import given
from hypothesis import strategies as st
from scripted_runner import answer_to

from mie.config.engine import EngineConfig
from mie.config.params.sampling import SamplingParams
from mie.memory.layers.window import Window
from mie.memory.layers.windows import Windows
from mie.memory.manager import KVCacheManager
from mie.sched.orders.fair import cost
from mie.sched.orders.parts import split
from mie.sched.scheduler import Scheduler
from mie.sched.sequence import Request

MOST_PROMPT, MOST_ANSWER = 12, 12
CLIENTS = "abcd"


def was_admitted(request):
    return any(seq.was_admitted for seq in request.sequences)


def new_manager(num_blocks, window):
    if window is None:
        return KVCacheManager(num_blocks, 2, enable_prefix_caching=False)
    return KVCacheManager(num_blocks, 2, [Windows(window)], enable_prefix_caching=False)


def has_work(scheduler):
    return bool(scheduler.running or scheduler.waiting)


class Server:
    """A scheduler whose steps are answered at once, and an account of each client's service."""

    def __init__(self, policy="fair", *, num_seqs=2, num_blocks=40, budget=16, longest=24, **more):
        window = more.pop("window", None)
        config = EngineConfig(
            block_size=2,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=budget,
            enable_prefix_caching=False,
            scheduling_policy=policy,
            watermark=0.0,
            **more,
        )
        manager = new_manager(num_blocks, window)
        self.records = []
        self.scheduler = Scheduler(config, manager, longest, self.records.append)
        self.bound = 2 * (MOST_PROMPT + 2 * num_seqs * MOST_ANSWER)
        self.is_fair = policy == "fair"
        self.clients = []  # each request's, by number
        self.requests = []
        self.waiting = []  # Those that were never admitted.
        self.served = Counter()
        self.history = []  # For each step: (clients that wait, served so far).

    def add(self, client, num_prompt=1, max_tokens=1, **more):
        number = len(self.requests)
        params = SamplingParams(max_tokens=max_tokens, **more)
        labels = {"client": client} if self.is_fair else {}
        request = Request(
            str(number), [5] * num_prompt, params, **labels, number=number, eos_token_ids=[3]
        )
        self.scheduler.add(request)
        self.clients.append(client)
        self.requests.append(request)
        self.waiting.append(request)
        return request

    def step(self):
        plan = self.scheduler.schedule()
        sampled = self.scheduler.update(plan, answer_to(plan, lambda: 7))
        for request in [each for each in self.waiting if was_admitted(each)]:
            self.waiting.remove(request)
            self.served[self.clients[request.number]] += request.num_prompt
        for seq in sampled:
            self.served[self.clients[seq.request.number]] += 2
        self.history.append((self.backlogged, Counter(self.served)))

    @property
    def backlogged(self):
        """The clients with a request that was never admitted."""
        return {self.clients[request.number] for request in self.waiting}

    def finish(self):
        while has_work(self.scheduler):
            self.step()
            assert len(self.history) < 20_000, "it never ends"

    def widest_gap(self):
        """Return the largest |W_f - W_g| of any two clients that wait throughout."""
        widest = 0
        for f, g in combinations(CLIENTS, 2):
            gaps = []  # W_f - W_g since both began to wait
            for waiting, served in self.history:
                if not {f, g} <= waiting:
                    gaps = []
                    continue
                gaps.append(served[f] - served[g])
                widest = max(widest, gaps[-1] - min(gaps), max(gaps) - gaps[-1])
        return widest


arrivals = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 0, 0, 1, 3, 9]),  # steps before it
        st.sampled_from([*CLIENTS, *"aaaa"]),
        st.integers(1, MOST_PROMPT),
        st.integers(1, MOST_ANSWER),
    ),
    min_size=1,
    max_size=60,
)


@given(arrivals, st.integers(1, 4), st.sampled_from([12, 16, 40]), st.sampled_from([3, 16]))
def test_clients_that_wait_get_equal_shares(arrivals, num_seqs, num_blocks, budget):
    """Small pools preempt all the time, which must not break the law."""
    server = Server(num_seqs=num_seqs, num_blocks=num_blocks, budget=budget)
    for delay, client, num_prompt, max_tokens in arrivals:
        for _ in range(delay):
            if has_work(server.scheduler):
                server.step()
        server.add(client, num_prompt, max_tokens)
    server.finish()
    assert server.widest_gap() <= server.bound
    charged = Counter()
    for request in server.requests:
        charged[request.client] += cost(request)
    assert charged == server.served


def test_first_come_first_served_breaks_the_law():
    """The bound means something: the other policy exceeds it."""
    gaps = {}
    for policy in ("fcfs", "fair"):
        server = Server(policy)
        for client, count in (("a", 60), ("b", 60)):
            for _ in range(count):
                server.add(client, MOST_PROMPT, MOST_ANSWER)
        server.finish()
        gaps[policy] = server.widest_gap() / server.bound
    assert gaps["fair"] <= 0.5
    assert gaps["fcfs"] > 5


@given(st.integers(1, MOST_PROMPT), st.integers(1, MOST_ANSWER), st.integers(1, 4))
def test_a_flood_delays_a_new_client_by_what_is_running_only(num_prompt, max_tokens, num_seqs):
    server = Server(num_seqs=num_seqs)
    for _ in range(80):
        server.add("a", MOST_PROMPT, MOST_ANSWER)
    for _ in range(5):
        server.step()
    num_before = sum(map(was_admitted, server.requests))
    late = server.add("b", num_prompt, max_tokens)
    while not was_admitted(late):
        server.step()
    num_overtook = sum(map(was_admitted, server.requests)) - num_before - 1
    assert num_overtook <= num_seqs, "at a tie one, and those admitted in the same step"


def test_a_client_cannot_save_up_service_while_it_is_idle():
    server = Server(num_seqs=1)
    for _ in range(20):
        server.add("a", 1, MOST_ANSWER)
        server.step()
    while len(server.backlogged) and server.served["a"] < 200:
        server.step()
    for client in "ba" * 20:
        server.add(client, 1, MOST_ANSWER)
    before = Counter(server.served)
    while len(server.backlogged) == 2:
        server.step()
    got = {client: server.served[client] - before[client] for client in "ab"}
    assert abs(got["a"] - got["b"]) <= server.bound
    assert before["a"] - before["b"] >= 200, "it was idle long enough to tell"


@given(arrivals)
def test_one_client_alone_is_served_first_come_first_served(arrivals):
    orders = []
    for policy in ("fcfs", "fair"):
        server, order = Server(policy), deque()
        for _, _, num_prompt, max_tokens in arrivals:
            server.add("a", num_prompt, max_tokens)
        while has_work(server.scheduler):
            server.step()
            order.append([r.request_id for r in server.requests if r.is_finished])
        orders.append(order)
    assert orders[0] == orders[1]


def test_prefix_hits_and_recomputed_tokens_are_not_charged():
    config = EngineConfig(block_size=2, scheduling_policy="fair", max_num_batched_tokens=64)
    scheduler, charged = Scheduler(config, KVCacheManager(40, 2), 40), []
    for number, client in enumerate("ab"):
        params = SamplingParams(max_tokens=3)
        request = Request(client, list(range(10, 19)), params, client=client, number=number)
        scheduler.add(request)
        for step in range(3):
            plan = scheduler.schedule()
            scheduler.update(plan, answer_to(plan, lambda: 7))
            if step == 0:
                scheduler.preempt_all()
        while has_work(scheduler):
            plan = scheduler.schedule()
            scheduler.update(plan, answer_to(plan, lambda: 7))
        charged.append(cost(request))
    assert charged == [9 + 2 * 3, 1 + 2 * 3], "the second computes one token beside the hit"


def test_counters_of_clients_that_are_gone_are_not_kept():
    """Client a always waits, and is served as much as all the others together."""
    server, most = Server(num_seqs=1), 0
    for number in range(300):
        server.add("a")
        server.add("a")
        server.add(f"client {number}")
        server.step()
        server.step()
        most = max(most, len(queue_of(server.scheduler).served))
    assert "a" in server.backlogged
    assert 1 <= most <= 10


# Making way.


def seats(server):
    return Counter(seq.request.client for seq in server.scheduler.running)


def preempted(server):
    """Return (sequence, in favour of which) for each preemption."""
    return [record[1:3] for record in server.records if record[0] == "preempt"]


def long_server(**settings):
    return Server(num_blocks=2000, longest=400, fair_turn=4, **settings)


def test_a_client_without_a_row_takes_one_and_then_the_rows_that_become_free():
    server = long_server(num_seqs=4)
    for count in range(1, 9):
        server.add("a", 2, 10 * count)
    for _ in range(6):
        server.step()
    for _ in range(4):
        server.add("b", 2, 300)
    server.step()
    assert seats(server) == {"a": 3, "b": 1}
    [rule] = {record[4] for record in server.records if record[0] == "preempt"}
    assert rule == "last of the client with the largest share"
    for _ in range(40):
        server.step()
    assert seats(server)["b"] == 3, "the rows of answers that ended"
    assert len(preempted(server)) == 1


def test_clients_with_rows_do_not_preempt_each_other():
    server = long_server(num_seqs=7)
    for client in "ab":
        for _ in range(12):
            server.add(client, 2, 300)
        server.step()
    for _ in range(250):
        server.step()
    assert len(preempted(server)) <= 1
    assert sorted(seats(server).values()) == [1, 6]


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 30))
def test_a_sequence_keeps_its_seat_for_a_turn(num_seqs, turn, pause):
    """A client that sends short requests all the time preempts no sequence more often."""
    server = Server(num_seqs=num_seqs, num_blocks=800, longest=400, fair_turn=turn)
    for _ in range(6):
        server.add("a", 2, 300)
    at, step = {}, 0
    for step in range(80):
        if step % pause == 0:
            server.add("b", 1, 1)
        server.records.clear()
        server.step()
        for kind, seq, *_ in server.records:
            if kind in ("admit", "resume"):
                at[seq] = step
            elif kind == "preempt":
                assert step - at[seq] >= turn


@given(st.integers(1, 8), st.integers(1, 60), st.integers(1, 60))
def test_clients_take_turns_on_one_seat(turn, one, other):
    """Without a cache every turn begins with a prompt, and still each makes progress."""
    server = Server(num_seqs=1, num_blocks=60, longest=100, budget=16, fair_turn=turn)
    requests = [server.add("a", one, 40), server.add("b", other, 40)]
    for _ in range(40 * 2 * (100 // 8 + turn)):
        if all(request.is_finished for request in requests):
            break
        server.step()
    assert [len(each.sequences[0].token_ids) for each in requests] == [one + 40, other + 40]
    assert len(preempted(server)) <= 2 * 40 // turn


def test_prompts_of_two_clients_share_each_steps_tokens():
    server = Server(num_seqs=2, num_blocks=80, budget=8, longest=64)
    server.add("a", 40)
    server.step()
    server.add("b", 40)
    for _ in range(4):
        plan = server.scheduler.schedule()
        assert [len(chunk.token_ids) for chunk in plan.chunks] == [4, 4]
        server.scheduler.update(plan, answer_to(plan, lambda: 7))


def test_a_weight_multiplies_what_a_client_is_served():
    server = long_server(num_seqs=6, client_quotas={"a": {"weight": 2}})
    for _ in range(30):
        server.add("a", 2, 40)
        server.add("b", 2, 40)
    for _ in range(150):
        server.step()
    assert 1.8 <= server.served["a"] / server.served["b"] <= 2.2


@given(st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 5]))
def test_a_client_runs_no_more_than_its_max_num_seqs(most, num_requests, n):
    server = long_server(num_seqs=8, client_quotas={"a": {"max_num_seqs": most}})
    for _ in range(num_requests):
        server.add("a", 2, 9, n=n)
    server.add("b", 2, 60)
    while has_work(server.scheduler):
        assert seats(server)["a"] <= most
        server.step()


def test_a_first_sequence_makes_way_after_its_turn():
    """The next client needs all blocks, but a long prompt has not had its turn."""
    server = Server(num_seqs=4, num_blocks=20, longest=40, fair_turn=8, max_prefill_chunk=2)
    long, short = server.add("a", 20, 20), server.add("a", 2, 30)
    for _ in range(12):
        server.step()
    next_one = server.add("b", 38, 1)
    while not was_admitted(next_one):
        server.step()
    victims = [short.sequences[0], long.sequences[0]]
    assert [seq for seq, _ in preempted(server)] == [seq.seq_id for seq in victims]
    assert long.sequences[0].num_generated == 8


def test_the_client_with_most_seats_makes_way():
    server = long_server(num_seqs=5)
    server.add("b", 2, 300)
    for _ in range(4):
        server.add("a", 2, 300)
    for _ in range(6):
        server.step()
    server.add("c", 2, 300)
    server.step()
    assert seats(server) == {"a": 3, "b": 1, "c": 1}


def test_a_share_counts_the_blocks_of_layers_with_a_window():
    """Four short sequences hold fewer whole blocks than a long one, and more blocks in all."""
    window = Window(size=7, num_groups=5, block_size=2, max_chunk=8)
    server = Server(num_seqs=40, longest=64, num_blocks=158, fair_turn=1, window=window)
    for _ in range(4):
        server.add("short", 6, 40)
    server.add("long", 46, 10)
    for _ in range(6):
        server.step()
    held = Counter()
    for seq in server.scheduler.running:
        held[seq.request.client] += seq.num_blocks
    whole = Counter()
    for seq in server.scheduler.running:
        whole[seq.request.client] += len(seq.table.block_ids)
    assert held["short"] > held["long"]
    assert whole["short"] < whole["long"], "whole blocks alone give another order"
    victim = queue_of(server.scheduler).by_preemption()[-1]
    assert victim.request.client == "short"
    server.add("new", 8, 4)
    server.step()
    assert {server.clients[victim[0]] for victim, _ in preempted(server)} == {"short"}


def test_a_client_that_was_served_more_takes_no_seat():
    """While both wait, a long prompt counts as much as twenty tokens of the other's answer."""
    server = Server(num_seqs=1, longest=80, num_blocks=100, budget=64, fair_turn=1)
    long, short = server.add("a", 40, 20), server.add("b", 1, 60)
    server.add("b", 1, 60)
    server.step()
    server.step()
    assert preempted(server) == [(long.sequences[0].seq_id, short.sequences[0].seq_id)]
    while len(preempted(server)) == 1:
        server.step()
    assert short.sequences[0].num_generated >= 20


def test_choices_do_not_take_the_seat_of_the_next_client():
    server = long_server(num_seqs=3, max_prefill_chunk=4)
    server.add("a", 8, 30, n=3)
    server.step()
    server.add("b", 2, 30)
    server.step()
    assert seats(server) == {"a": 1, "b": 1}
    server.step()
    assert seats(server) == {"a": 2, "b": 1}


@given(
    st.integers(0, 300),
    st.lists(
        st.tuples(st.integers(1, 60), st.sampled_from([0.3, 1.0, 1.0, 2.5, 7.0])),
        min_size=1,
        max_size=7,
    ),
)
def test_a_division_gives_out_every_token_that_is_wanted(total, clients):
    wanted = {name: number for name, (number, _) in enumerate(clients)}
    weights = {name: weight for name, (_, weight) in enumerate(clients)}
    parts = split(total, wanted, weights)
    assert sum(parts.values()) == min(total, sum(wanted.values())), "no rest of a rounding is lost"
    level, left, poor = 0.0, float(total), dict(wanted)  # all get the same for a unit of weight
    while poor and left > 1e-9:
        step = min([left / sum(weights[n] for n in poor), *(poor[n] / weights[n] for n in poor)])
        level += step
        left -= step * sum(weights[n] for n in poor)
        poor = {n: poor[n] - step * weights[n] for n in poor}
        poor = {n: number for n, number in poor.items() if number > 1e-9}
    for name, part in parts.items():
        ideal = min(wanted[name], level * weights[name])
        assert 0 <= part <= wanted[name]
        assert abs(part - ideal) <= len(parts)


def test_of_clients_served_alike_the_one_with_fewer_seats_is_next():
    server = Server(num_seqs=4, longest=40, num_blocks=200, budget=8, max_prefill_chunk=2)
    for client, num_prompt in (("a", 4), ("a", 4), ("b", 8)):
        server.add(client, num_prompt, 8)
    earlier, later = server.add("a", 4, 8), server.add("b", 4, 8)
    server.step()
    assert server.served == {"a": 8, "b": 12}, "both had 8 before the last seat"
    assert seats(server) == {"a": 2, "b": 2}
    assert was_admitted(later)
    assert not was_admitted(earlier)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_prompt_that_was_preempted_counts_against_its_client_once_it_has_a_token(num_tokens):
    server = Server(num_seqs=1, longest=60, num_blocks=200, budget=4 + 20 * num_tokens)
    first = server.add("a", 20, 8)
    other = server.add("b", 30, 8)
    server.step()
    [seq] = first.sequences
    assert seq.num_generated == num_tokens
    server.scheduler.preempt(seq, by=None)
    server.step()
    assert [each.request for each in server.scheduler.running] == [other if num_tokens else first]
