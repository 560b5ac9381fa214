"""Execute the commands of ``mie chat``. They begin with a slash."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mie.base.files import read_json_object, replacing
from mie.base.reprs import count
from mie.cli.answer_writer import REASONING, Look
from mie.cli.conversation import WHEN_FULL, Conversation
from mie.cli.options import chosen_lora, parse_sampling
from mie.cli.parser import did_you_mean
from mie.cli.terminal import ReadLine, typing_hidden
from mie.errors import ConfigError, MieError, RequestError

if TYPE_CHECKING:
    from mie.config.adapters import LoRARequest
    from mie.config.params.sampling import SamplingParams
    from mie.frontend.llm import LLM

MAX_SAVED_BYTES = 64 << 20
"""The longest file that ``/load`` reads."""

EDITOR_HELP = """\
  Alt-Enter        begin a new line in the message
  a pasted block is one message; the arrow keys recall earlier messages"""


class Ended(Exception):  # the end of a conversation is no error
    """The user ends the conversation."""


@dataclass(kw_only=True)
class Chat:
    """A conversation, and everything that its commands change."""

    conversation: Conversation
    model: str
    load: Callable[[str], LLM]
    """Loads another model by its name."""
    params_of: Callable[[LLM, Mapping[str, Any]], SamplingParams]
    """Returns the sampling parameters for a model and the settings of ``/set``."""
    loras: Mapping[str, LoRARequest] = field(default_factory=dict)
    """The adapters of ``--lora-modules``."""
    fixed_model: str | None = None
    """Why the model cannot be changed, or None."""
    settings: dict[str, Any] = field(default_factory=dict)
    read_line: ReadLine | None = None
    """Reads a line that begins with a given text, on a terminal."""

    def say(self, text: str) -> bool:
        """Answer a message, and return whether that was possible. Errors are printed."""
        with typing_hidden(sys.stdin):
            return self._try(lambda: self.conversation.answer(text))

    def execute(self, command: str) -> bool:
        """Execute a command line such as "/set seed 1", and return whether that was possible.

        Raises:
            Ended: the command ends the conversation.
        """
        name, _, argument = command.partition(" ")
        name = _ALIASES.get(name, name)
        if name == "/exit":
            raise Ended
        if name not in _COMMANDS:
            near = did_you_mean(name, [*_COMMANDS, *_ALIASES])
            _note(f"unknown command {name}{near or '; /help shows the commands'}")
            return False
        act = _COMMANDS[name].act
        return self._try(lambda: act(self, argument.strip()))

    def _try(self, act: Callable[[], object]) -> bool:
        try:
            act()
        except MieError as error:
            print(f"mie: error: {error}", file=sys.stderr)
            return False
        except KeyboardInterrupt:
            if self.read_line is None:
                raise
            _note("stopped")
            return False
        return True

    def _help(self, _: str) -> None:
        print(commands_help(is_terminal=self.read_line is not None), file=sys.stderr)

    def _reset(self, _: str) -> None:
        self.conversation.reset()
        _note("a new conversation")

    def _set(self, argument: str) -> None:
        name, _, text = argument.partition(" ")
        if not name:
            look = self.conversation.look
            markdown = "on" if look.markdown else "off"
            shown = {**self.settings, "markdown": markdown, "reasoning": look.reasoning}
            shown["when_full"] = self.conversation.when_full
            _note(", ".join(f"{name}={value}" for name, value in shown.items()))
        elif not text.strip():
            raise ConfigError(f"/set {name} needs a value, as in /set temperature 0.3")
        else:
            self._set_one(name.lstrip("-").replace("-", "_"), text.strip())

    def _set_one(self, name: str, text: str) -> None:
        look = self.conversation.look
        if name == "when_full":
            if text not in WHEN_FULL:
                raise ConfigError(f"when_full is one of {', '.join(WHEN_FULL)}; got {text!r}")
            self.conversation.when_full = text
        elif name == "reasoning":
            if text not in REASONING:
                raise ConfigError(f"reasoning is one of {', '.join(REASONING)}; got {text!r}")
            look.reasoning = text
        elif name == "markdown":
            if text not in ("on", "off"):
                raise ConfigError(f"markdown is on or off; got {text!r}")
            look.markdown = Look.of(text == "on").markdown
        else:
            self._use({**self.settings, name: parse_sampling(name, text)})

    def _use(self, settings: dict[str, Any]) -> None:
        self.conversation.params = self.params_of(self.conversation.llm, settings)
        self.settings = settings

    def _system(self, argument: str) -> None:
        if argument:
            self.conversation.set_system(argument)
        _note(f"system: {self.conversation.system or 'none'}")

    def _regenerate(self, _: str) -> None:
        with typing_hidden(sys.stdin):
            self.conversation.answer_again()

    def _edit(self, argument: str) -> None:
        if not argument:
            messages = self.conversation.messages
            if len(messages) < 2:
                raise RequestError("there is no message yet")
            if self.read_line is None:
                raise RequestError("/edit needs the new message, except on a terminal")
            try:
                argument = self.read_line("> ", messages[-2]["content"]) or ""
            except KeyboardInterrupt:
                argument = ""
            if not argument.strip():
                _note("nothing was changed")
                return
        with typing_hidden(sys.stdin):
            self.conversation.answer_again(argument)

    def _drop(self, _: str) -> None:
        with typing_hidden(sys.stdin):
            self.conversation.drop()

    def _undo(self, _: str) -> None:
        text = self.conversation.undo()
        _note(f"forgot {json.dumps(text[:50], ensure_ascii=False)} and its answer")

    def _save(self, argument: str) -> None:
        if not argument:
            raise ConfigError("/save needs the name of a file")
        saved = {
            "model": self.model,
            "messages": self.conversation.messages,
            "settings": self.settings,
        }
        with replacing(str(Path(argument).expanduser()), "/save") as file:
            json.dump(saved, file, ensure_ascii=False, indent=2)
            file.write("\n")
        _note(f"saved {count(len(self.conversation.messages), 'message')} to {argument}")

    def _load_file(self, argument: str) -> None:
        if not argument:
            raise ConfigError("/load needs the name of a file")
        path = Path(argument).expanduser()
        saved = read_json_object(path, MAX_SAVED_BYTES, RequestError)
        messages, settings = saved.get("messages"), saved.get("settings", {})
        if not isinstance(messages, list) or not isinstance(settings, dict):
            raise RequestError(f"{path} is not a file of /save: it lacks messages or settings")
        params = self.params_of(self.conversation.llm, settings)
        try:
            self.conversation.replace(messages)
        except RequestError as error:
            raise RequestError(f"{path} is not a conversation for this model: {error}") from error
        self.conversation.params, self.settings = params, settings
        _note(f"loaded {count(len(messages), 'message')}")

    def _change_model(self, name: str) -> None:
        if name and self.fixed_model:
            raise ConfigError(self.fixed_model)
        if name:
            before = self.model
            try:
                self._load(name)
            except (MieError, KeyboardInterrupt):
                self._load_again(before)
                raise
        _note(f"model: {self.model}")

    def _load_again(self, name: str) -> None:
        try:
            self._load(name)
        except MieError as error:
            print(f"mie: error: {name} cannot be loaded again: {error}", file=sys.stderr)
            raise Ended from error

    def _load(self, name: str) -> None:
        vars(self.conversation).pop("llm", None)  # two models may not fit the memory
        gc.collect()
        self.conversation.llm = self.load(name)
        self.model = name
        self._use(self.settings)
        self.conversation.set_system(self.conversation.system)

    def _change_lora(self, name: str) -> None:
        if name:
            self.conversation.lora_request = chosen_lora("/lora", name, self.loras)
        own = self.conversation.lora_request
        _note(f"adapter: {own.lora_name if own else 'none'}")

    def _context(self, _: str) -> None:
        _note(self.conversation.meter())

    def _stats(self, _: str) -> None:
        stats = self.conversation.stats
        _note("no answer yet" if stats is None else str(stats))


def _note(text: str) -> None:
    print(f"[{text}]", file=sys.stderr)


@dataclass(frozen=True)
class _Command:
    usage: str
    help: str
    act: Callable[[Chat, str], None]


_COMMANDS: Mapping[str, _Command] = {
    each.usage.partition(" ")[0]: each
    for each in (
        _Command("/help", "show this", Chat._help),
        _Command("/set NAME VALUE", "set temperature, top_p, seed, max_tokens, …", Chat._set),
        _Command("/system TEXT", "replace the system message", Chat._system),
        _Command("/regenerate", "answer the last message again", Chat._regenerate),
        _Command("/edit [TEXT]", "change the last message, and answer it", Chat._edit),
        _Command("/undo", "forget the last message and its answer", Chat._undo),
        _Command("/drop", "forget the oldest turns, and send the refused message", Chat._drop),
        _Command("/reset", "forget everything but the system message", Chat._reset),
        _Command("/save FILE", "write the conversation to a file", Chat._save),
        _Command("/load FILE", "go on with the conversation of a file", Chat._load_file),
        _Command("/model [NAME]", "go on with another model", Chat._change_model),
        _Command("/lora [NAME]", "go on with another adapter", Chat._change_lora),
        _Command("/context", "show how full the context is", Chat._context),
        _Command("/stats", "show the times and tokens of the last answer", Chat._stats),
    )
}
_ALIASES = {"/bye": "/exit", "/quit": "/exit", "/exit": "/exit", "/clear": "/reset", "/?": "/help"}


def commands_help(*, is_terminal: bool) -> str:
    """Return a line for each command and key."""
    rows = [(each.usage, each.help) for each in _COMMANDS.values()]
    rows += [
        ("/exit", "end the conversation (so do /bye and Ctrl-D)"),
        ('"""', 'begin a message of several lines; another """ ends it'),
        ("Ctrl-C", "stop the answer; its text stays in the conversation"),
    ]
    lines = [f"  {usage:<16} {text}" for usage, text in rows]
    return "\n".join([*lines, EDITOR_HELP] if is_terminal else lines)
