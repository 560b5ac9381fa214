"""Drive a scheduler with a model that always answers the same token."""

from audit import check_scheduler
from scripted_runner import answer_to

from mie.config.engine import EngineConfig
from mie.config.params.sampling import SamplingParams
from mie.memory.manager import KVCacheManager
from mie.sched.scheduler import Scheduler
from mie.sched.sequence import Request

EOS = 3


class Driver:
    """A scheduler with a model that answers at once."""

    def __init__(self, num_blocks=16, max_model_len=64, num_host_blocks=0, drafter=None, **config):
        settings = {
            "block_size": 4,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "enable_prefix_caching": False,
            "watermark": 0.0,
            **config,
        }
        config = EngineConfig(**settings)
        self.records = []
        self.manager = KVCacheManager(
            num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            num_host_blocks=num_host_blocks,
            emit=self.records.append,
        )
        self.scheduler = Scheduler(
            config, self.manager, max_model_len, self.records.append, drafter
        )
        self.requests = []
        self.work = {}  # {request number: tokens computed in the last step}

    def add(self, num_prompt, max_tokens=4, first_id=10, **params):
        prompt = range(first_id, first_id + num_prompt)
        names = ("priority", "cache_salt", "client")
        labels = {name: params.pop(name) for name in names if name in params}
        return self.add_ids(prompt, max_tokens=max_tokens, labels=labels, **params)

    def add_ids(self, prompt, labels=None, **params):
        params = SamplingParams(**params)
        number = len(self.requests)
        request = Request(
            str(number), list(prompt), params, number=number, eos_token_ids=[EOS], **(labels or {})
        )
        self.scheduler.check(request)
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def step(self, answer=7):
        plan = self.scheduler.schedule()
        decoding = [self.scheduler.by_row[row].request.number for row in plan.decodes]
        self.work = {number: decoding.count(number) for number in sorted(decoding)}
        self.work |= {chunk.seq_id[0]: len(chunk.token_ids) for chunk in plan.chunks}
        self.answer(plan, answer)
        return plan

    def answer(self, plan, answer=7):
        got = self.scheduler.update(plan, answer_to(plan, lambda: answer))
        check_scheduler(self.scheduler)
        return got

    @property
    def has_work(self):
        return bool(self.scheduler.running or self.scheduler.waiting)

    def run(self, max_steps=1000):
        """Run until everything is done, and return the work of every step."""
        works = []
        while self.has_work:
            self.step()
            works.append(self.work)
            assert len(works) < max_steps, "the scheduler has work and does nothing"
        return works

    def events(self, kind):
        return [record for record in self.records if record[0] == kind]
