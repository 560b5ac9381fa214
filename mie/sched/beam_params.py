"""What a user asks of beam search, spelled as in vLLM."""

from dataclasses import dataclass

from mie.config import check_switch, keyword_checked
from mie.limits import DEFAULT_LIMITS
from mie.sched import values


@keyword_checked
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Says how the most likely continuations of a prompt are searched for.

    The names and their meaning are vLLM's. A bad value or an unknown name raises `ConfigError`.

    beam_width: Sets how many beams are kept after every token, and returned; 1 to 1024.
    max_tokens: Ends every beam after this many tokens; at least 1.
    ignore_eos: Goes on after the model's end-of-text token. Default: False.
    temperature: Divides the logits before their log-probabilities are added up, and 0 leaves them
        as they are; 0 to 1000. Default: 0.0.
    length_penalty: Is the power of a beam's length by which its log-probability is divided, so that
        values above 1 favour long beams; -10 to 10 (Wu et al., 2016, arXiv:1609.08144). Default:
        1.0.
    include_stop_str_in_output: Leaves the end-of-text token in the text. Default: False.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name, number in (
            ("beam_width", values.integer("beam_width", self.beam_width, 1, DEFAULT_LIMITS.max_n)),
            ("max_tokens", values.integer("max_tokens", self.max_tokens, 1)),
            ("temperature", values.real("temperature", self.temperature, 0.0, 1000.0)),
            ("length_penalty", values.real("length_penalty", self.length_penalty, -10.0, 10.0)),
        ):
            object.__setattr__(self, name, number)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            check_switch(name, getattr(self, name))
