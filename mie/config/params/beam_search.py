"""Define the parameters of beam search, with vLLM's names."""

from dataclasses import dataclass

from mie.base.refusals import refuses_names
from mie.config.engine import check_switch, keyword_checked
from mie.config.params import values
from mie.config.params.unsupported import neutral_accepted
from mie.config.request_limits import DEFAULT_LIMITS


@refuses_names
@neutral_accepted
@keyword_checked
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Configures a search for the most likely continuations of a prompt.

    The names and their meaning are vLLM's. A bad value or an unknown name raises `ConfigError`.

    beam_width: Number of beams that are kept after every token and returned; 1 to 1024.
    max_tokens: Maximum number of new tokens of a beam; at least 1.
    ignore_eos: Continue after the model's end-of-text token. Default: False.
    temperature: Divide the logits by this before computing log-probabilities; 0 to 1000. 0
        leaves the logits as they are. Default: 0.0.
    length_penalty: Divide a beam's log-probability by its length to this power; -10 to 10.
        Values above 1 favour long beams (Wu et al., 2016, arXiv:1609.08144). Default: 1.0.
    include_stop_str_in_output: Keep the end-of-text token in the text. Default: False.
    skip_special_tokens: Leave special tokens out of the text. Default: True.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, number in (
            ("beam_width", values.integer("beam_width", self.beam_width, 1, DEFAULT_LIMITS.max_n)),
            ("max_tokens", values.integer("max_tokens", self.max_tokens, 1)),
            ("temperature", values.real("temperature", self.temperature, 0.0, 1000.0)),
            ("length_penalty", values.real("length_penalty", self.length_penalty, -10.0, 10.0)),
        ):
            object.__setattr__(self, name, number)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            check_switch(name, getattr(self, name))
