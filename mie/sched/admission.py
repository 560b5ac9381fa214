"""What is refused at the door: a request that could never run."""

from mie.config import EngineConfig
from mie.errors import RequestError
from mie.memory.manager import KVCacheManager
from mie.sched.sequence import Request


def check_fits(
    request: Request, config: EngineConfig, manager: KVCacheManager, max_model_len: int
) -> None:
    """Raise `RequestError` if even an idle engine could not serve the request."""
    num_prompt = request.num_prompt
    if num_prompt >= max_model_len:
        raise RequestError(
            f"prompt has {num_prompt} tokens; the context holds {max_model_len}, the answer "
            "included (shorten the prompt, or raise max_model_len to at least "
            f"{num_prompt + 1} if the model allows it)"
        )
    if manager.blocks_for(num_prompt) > manager.num_blocks:
        raise RequestError(
            f"prompt has {num_prompt} tokens; the KV cache holds "
            f"{manager.num_blocks * manager.block_size} "
            f"(raise num_blocks to at least {manager.blocks_for(num_prompt + 1)})"
        )
    if request.params.n > config.max_num_seqs:
        raise RequestError(
            f"n is {request.params.n}; at most {config.max_num_seqs} sequences run at once (raise "
            f"max_num_seqs to at least {request.params.n})"
        )
    if request.priority and config.scheduling_policy != "priority":
        raise RequestError(
            f"priority is {request.priority}; the engine schedules by {config.scheduling_policy} "
            "(set scheduling_policy='priority')"
        )
