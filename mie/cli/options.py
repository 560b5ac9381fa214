"""Define options that commands share: of the engine and of sampling, spelled as in vLLM."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from mie.base.files import LateFile, is_unwritable, read_utf8
from mie.cli.parser import KINDS, add_argument, arguments_of, did_you_mean
from mie.config.adapters import LoRARequest, lora_modules_of
from mie.config.arguments import given
from mie.config.engine_args import EngineArgs
from mie.errors import ConfigError, shown, shown_text

if TYPE_CHECKING:
    from mie.config.params.sampling import SamplingParams
    from mie.frontend.llm import LLM

DEFAULT_MODEL = "bundled"
DEFAULT_MAX_TOKENS = 256

_NOT_OPTIONS = ("seed", "device")
"""Settings that have no option: ``--seed`` belongs to a request, ``--device`` to the simulator."""

_OF_DRAWS = ("top_k", "top_p", "min_p")
"""Parameters without an effect at temperature 0. Requests of a file have own temperatures."""

_SAMPLING = arguments_of("sampling")
"""The options of `SamplingParams` by its fields, as keywords of argparse with their names."""
_STRUCTURES = arguments_of("structures")
"""The options of `StructuredOutputsParams`, named structured_ and its field."""
_CHOICES = ("n", "logprobs")
"""Parameters that have no meaning in a conversation."""


def add_engine_options(parser: argparse.ArgumentParser, *, names_model: bool = True) -> None:
    """Add options for every setting of the engine, and ``--model`` if it ``names_model``."""
    omit = [*_NOT_OPTIONS] if names_model else [*_NOT_OPTIONS, "model"]
    if "--chat-template" in parser._option_string_actions:  # the command has an effect for it
        omit.append("chat_template")
    EngineArgs.add_cli_args(parser, omit=omit)


def add_sampling_options(
    parser: argparse.ArgumentParser, *, max_tokens: int | None, choices: bool = True
) -> None:
    """Add options for sampling and stopping, and with ``choices`` also ``--n`` and the like."""
    parser.set_defaults(default_max_tokens=max_tokens)
    group = parser.add_argument_group(
        "sampling", "A model's generation_config.json may recommend other defaults."
    )
    limit = "no limit but the context" if max_tokens is None else max_tokens
    for name, argument in {**_SAMPLING, **_STRUCTURES}.items():
        if choices or name not in _CHOICES:
            note = f" (default: {limit})" if name == "max_tokens" else ""
            add_argument(group, {**argument, "default": None, "help": argument["help"] + note})


def parse_sampling(name: str, text: str) -> Any:
    """Return the value of a sampling parameter from its text.

    Raises:
        ConfigError: there is no such parameter in a conversation, or the text is no value for it.
    """
    known = [each for each in _SAMPLING if each not in _CHOICES]
    if name not in known:
        near = did_you_mean(name, known) or f"; choose from {', '.join(known)}"
        raise ConfigError(f"unknown setting {name!r}{near}")
    argument = _SAMPLING[name]
    kind: Any = KINDS.get(argument.get("type", ""))
    try:
        if argument.get("action") == "append":
            return [(kind or str)(text)]
        return {"on": True, "off": False}[text] if kind is None else kind(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{name}: {error}") from error
    except (KeyError, ValueError) as error:
        kind = getattr(kind, "__name__", "on or off")
        raise ConfigError(f"{name} is {kind}; got {text!r}") from error


def load_llm(args: argparse.Namespace, trace: TextIO | None = None, **more: Any) -> LLM:
    """Load the model that ``args`` names, with its engine options and ``more`` settings."""
    from mie.frontend.llm import LLM

    refuse_unused_adapters(args)
    return LLM(args.model, trace=trace, **{**engine_options(args), **more})


def refuse_unused_adapters(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for slots of adapters, if the command has no ``--lora``."""
    if "lora" not in args and (args.enable_lora or args.lora_modules):
        raise ConfigError(
            "--enable-lora has no effect here, because prompts of this command name no adapter "
            "(use mie generate, mie chat or mie serve)"
        )


def lora_of(args: argparse.Namespace) -> LoRARequest | None:
    """Return the adapter that ``--lora`` names, or the first of ``--lora-modules``, if any.

    Raises:
        ConfigError: ``--lora-modules`` has no adapter of the name, or slots have no adapter.
    """
    adapters = lora_modules_of(args.lora_modules)
    if not adapters:
        if args.enable_lora or args.lora is not None:
            raise ConfigError(
                "--enable-lora and --lora need an adapter here (give --lora-modules NAME=PATH)"
            )
        return None
    name = next(iter(adapters)) if args.lora is None else args.lora
    return chosen_lora("--lora", name, adapters)


def chosen_lora(option: str, name: str, adapters: Mapping[str, LoRARequest]) -> LoRARequest:
    """Return the adapter of a name, or raise the `ConfigError` of an option with another name."""
    if name not in adapters:
        names = ", ".join(map(shown_text, adapters)) or "no adapter"
        raise ConfigError(
            f"{option} is {shown(name)}; --lora-modules has {names} (name an adapter of "
            "--lora-modules NAME=PATH)"
        )
    return adapters[name]


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given options by their names in `EngineArgs`, without the model."""
    return given(args, EngineArgs, omit=("model", "chat_template", *_NOT_OPTIONS))


@contextmanager
def trace_file(path: str | None) -> Iterator[TextIO | None]:
    """Open the file of ``--trace``, if it is given. Failed writes were reported when it closes.

    A recording that the file already has is kept until the engine begins to write.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is None:
        yield None
        return
    try:
        file = LateFile(path)
    except OSError as error:
        raise ConfigError(f"cannot write --trace {path}: {error.strerror}") from error
    try:
        yield file
    finally:
        with suppress(OSError):
            file.close()


@contextmanager
def llm_with_trace(args: argparse.Namespace, **more: Any) -> Iterator[LLM]:
    """Load the model, with the file of ``--trace`` open as long as it is needed.

    Raises:
        ConfigError: the file cannot be written.
    """
    with trace_file(args.trace) as file, warnings.catch_warnings():
        if file is not None:
            warnings.simplefilter("ignore", UserWarning)  # `trace_failed` reports it
        try:
            llm = load_llm(args, file, **more)
        except OSError as error:
            if file is None or not is_unwritable(file):
                raise
            raise ConfigError(f"cannot write --trace {args.trace}: {error.strerror}") from error
        try:
            yield llm
        finally:
            if file is not None:
                with suppress(OSError):  # losing the rest only cuts the last line
                    llm.engine.log.close()


def trace_failed(args: argparse.Namespace, llm: LLM) -> bool:
    """Return whether the trace ended early, and print it on standard error."""
    error = llm.engine.log_error
    if error is not None:
        reason = getattr(error, "strerror", None) or error
        print_error(f"--trace {args.trace} is incomplete: {reason}")
    return error is not None


def print_error(message: str) -> None:
    """Print an error in one line on standard error."""
    print(f"mie: error: {' '.join(message.split())}", file=sys.stderr)


def sampling_params(
    args: argparse.Namespace,
    overrides: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> SamplingParams:
    """Return the sampling options in ``args``, completed by ``defaults``.

    ``overrides`` take precedence over both.

    Raises:
        ConfigError: a value is out of range, or an override is not a parameter.
    """
    from mie.config.params.sampling import SamplingParams

    limit = {"max_tokens": args.default_max_tokens}
    return SamplingParams(
        **{**limit, **(defaults or {}), **_given_sampling(args), **(overrides or {})}
    )


def report_sampling_defaults(
    args: argparse.Namespace, llm: LLM, *, is_conversation: bool = False
) -> None:
    """Print on standard error which default parameters are used and have an effect."""
    from mie.config.params.sampling import SamplingParams

    neutral, generation = SamplingParams(), llm.generation_config
    is_own = not is_conversation or generation.recommends
    defaults = generation.conversation if is_conversation else generation.sampling
    given = _given_sampling(args)
    is_greedy = {**defaults, **given}.get("temperature") == 0 and not getattr(args, "input", None)
    in_force = [
        f"{name}={value}"
        for name, value in defaults.items()
        if name not in given and value != getattr(neutral, name)
        if not (is_greedy and name in _OF_DRAWS)
    ]
    if in_force:
        whose = "of the model" if is_own else "of conversations, as the model recommends none"
        note = "--generation-config vllm ignores them"
        print(f"[sampling defaults {whose}: {', '.join(in_force)} · {note}]", file=sys.stderr)


def _given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    values = {name: getattr(args, name, None) for name in _SAMPLING}
    given = {name: value for name, value in values.items() if value is not None}
    structure = {
        name.removeprefix("structured_"): _text_or_file(argument["names"], value)
        for name, argument in _STRUCTURES.items()
        if (value := getattr(args, name, None)) is not None
    }
    return {**given, "structured_outputs": structure} if structure else given


def _text_or_file(name: str, value: Any) -> Any:
    """Return the value of an option, or the text of the file that it names after an @."""
    if not isinstance(value, str) or not value.startswith("@"):
        return value
    try:
        return read_utf8(value[1:])
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {name} {value}: {error}") from error
