"""The chat template of a model file, rendered as Hugging Face Transformers does: sandboxed Jinja with its helpers."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton_core.errors import ClientError, EngineError


class _GenerationTag(Extension):
    """`{% generation %}` marks for training what the assistant says; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """What is between the tags, as if they were not there."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_EXTENSIONS = (loopcontrols, _GenerationTag)


class ChatTemplate:
    """Turns messages into the prompt text that the model was trained on."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are the names a template may use (`bos_token`, …). Raises EngineError for a bad template."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=_EXTENSIONS)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise EngineError(f"the model's chat template is not valid: {error}") from error

    def render(self, messages: Sequence[Mapping[str, object]]) -> str:
        """The prompt, ready for the assistant's turn. Raises ClientError when the template refuses the messages."""
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        # A template is a program of the model's author: it may trip over shapes of messages it does not expect.
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise ClientError(f"messages do not fit the model's chat template: {error}") from error


def _raise(text: str) -> NoReturn:
    raise jinja2.TemplateError(text)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which would change the prompt. Templates may pass what Transformers lets them.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
