"""Chat templates: messages into the one text that a model was trained on, for engines that take a plain prompt.

Three forms are built in; publishers ship others with their models as Jinja. A template is the operator's, messages are
the caller's: what a template does with them runs in Jinja's sandbox. The texts of messages are not escaped, as in every
engine's own chat endpoint: who writes a model's control words into a message has them read as such.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

_CHATML: Final = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "<|im_start|>assistant{{ '\n' }}"  # a template's last line break is dropped
)
_LLAMA3: Final = (
    "{% for message in messages %}"
    "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>"
    "{% endfor %}"
    "<|start_header_id|>assistant<|end_header_id|>{{ '\n\n' }}"
)
# No role for system prompts: they stand before the words of the next user. Each is looked for where it stands: a text
# that grew with every one would be copied as often.
_MISTRAL: Final = (
    "{% set ns = namespace(seen=0) %}"
    "{% macro system_until(end) %}"
    "{% for message in messages[ns.seen:end] if message.role == 'system' %}{{ message.content }}\n\n{% endfor %}"
    "{% set ns.seen = end %}"
    "{% endmacro %}"
    "{% for message in messages %}"
    "{% if message.role == 'user' %}[INST] {{ system_until(loop.index) }}{{ message.content }} [/INST]"
    "{% elif message.role == 'assistant' %} {{ message.content }}</s>{% endif %}"
    "{% endfor %}"
    "{% set left = system_until(messages | length) %}"
    "{% if left %}[INST] {{ left | trim }} [/INST]{% endif %}"
)
BUILT_IN: Final[Mapping[str, str]] = MappingProxyType({"chatml": _CHATML, "llama3": _LLAMA3, "mistral": _MISTRAL})
_EOS: Final[Mapping[str, str]] = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "mistral": "</s>"}


class PromptError(Exception):
    """The template refuses these messages; the text is its author's own sentence, or none."""


class ChatTemplate:
    """One form of prompts.

    Args:
        source: Jinja, with what publishers' templates expect: `messages`, `add_generation_prompt`, `eos_token`,
            `raise_exception`, loop controls, no `strftime_now` (pure code has no clock; templates do without it).
            `bos_token` is empty, as engines put that before a prompt themselves.

    Raises ValueError for a template that is none.
    """

    def __init__(self, source: str, *, eos_token: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(  # set up as publishers' own tools do
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        try:
            self._template: Template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"the chat template is not valid: {error}") from error
        self._eos_token = eos_token

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a conversation, up to where the assistant's answer begins.

        Each message has `role` (system, user, assistant) and `content`. Raises `PromptError`.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                bos_token="",
                eos_token=self._eos_token,
            )
        except _Refused as error:
            raise PromptError(str(error)) from error
        # The sandbox's own and Python's, for messages that the template's author did not think of.
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise PromptError from error


class _Refused(TemplateError):
    """What a template says by `raise_exception`."""


def load(name: str) -> ChatTemplate:
    """A built-in template by its name; else a file: Jinja, or the `tokenizer_config.json` that holds one.

    Raises ValueError where there is none.
    """
    if name in BUILT_IN:
        return ChatTemplate(BUILT_IN[name], eos_token=_EOS[name])
    path = Path(name)
    try:
        text = path.read_text(encoding="utf-8")
        config = _config(path, text)
    except OSError as error:
        raise ValueError(f"chat_template {name}: {error.strerror}; built in are {', '.join(BUILT_IN)}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"chat_template {name}: {error}") from error
    source = text if path.suffix != ".json" else _default(config.get("chat_template"))
    if not isinstance(source, str):
        raise ValueError(f"chat_template {name}: holds no chat_template")  # noqa: TRY004 - a fault of the file's content
    return ChatTemplate(source, eos_token=_token(config.get("eos_token")))


def _config(path: Path, text: str) -> Mapping[str, Any]:
    """The tokenizer's configuration: the file itself, or the one beside a bare template."""
    beside = path.with_name("tokenizer_config.json")
    if path.suffix != ".json":
        text = beside.read_text(encoding="utf-8") if beside.is_file() else "{}"
    config = json.loads(text)
    return config if isinstance(config, dict) else {}


def _default(found: object) -> object:
    """The template, or the one called `default` where there are several."""
    if not isinstance(found, list):
        return found
    named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
    return named.get("default")


def _token(found: object) -> str:
    text = found.get("content") if isinstance(found, dict) else found
    return text if isinstance(text, str) else ""


def _raise(text: object) -> NoReturn:
    raise _Refused(str(text))


def _to_json(value: object, indent: int | None = None) -> str:
    # Jinja's own escapes what is special in HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)
