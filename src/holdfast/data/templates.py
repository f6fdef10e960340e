"""The prompt templates of the protocol, put into the tokenizer, so that one place renders every prompt.

Training, generation, scoring and the saved adapter all go through `apply_chat_template` of one tokenizer, and
`use_template` decides what that renders; `none` renders nothing: prompts and replies are strings, joined as they are.
The alpaca format, as text:

    <preamble>

    ### Instruction:
    <prompt>

    ### Response:
    <reply><EOS>

where a task's prompt (`tasks.user_text`) with an input has `### Input:` before that, and its own preamble.
"""

import logging
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, cast, get_args

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.library_types import Tokenizer
from holdfast.core.registry import nearest
from holdfast.data.examples import CALLS, TOOLS, has_tools, spelled_out, tools_of
from holdfast.data.rows import ROLES

logger = logging.getLogger(__name__)

Template: TypeAlias = Literal["chat", "alpaca", "none"]

MAX_SAID = 200

INPUT_MARK = "\n\n### Input:\n"
NO_THINKING = "{%- set enable_thinking = false %}"
# Some templates write today's date: a model would be trained, resumed and evaluated on other prompts each day. The day
# is the one that Llama 3's template falls back to.
ONE_DAY = (
    "{%- macro strftime_now(form) -%}"
    "{{- {'%Y-%m-%d': '2024-07-26', '%d %B %Y': '26 July 2024'}.get(form, '26 Jul 2024') -}}"
    "{%- endmacro -%}"
)
_ALONE = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
_WITH_INPUT = _ALONE.replace(" task.", " task, paired with an input that provides further context.")
_REFUSAL = (
    "the alpaca template takes one user message and at most one assistant reply: no system message, no more turns"
)
# A reply loses its leading blanks: a tokenizer would merge them with the line break before the reply, and the prompt
# of a training example would then differ from the prompt given to generation.
_ALPACA = (
    "{%- set roles = messages | map(attribute='role') | list -%}"
    "{%- if roles != ['user'] and roles != ['user', 'assistant'] -%}"
    f"{{{{- raise_exception('{_REFUSAL}') -}}}}"
    "{%- endif -%}"
    "{%- set asked = messages[0]['content'] -%}"
    f"{{{{- '{_WITH_INPUT}' if {INPUT_MARK!r} in asked else '{_ALONE}' -}}}}"
    "{{- '\\n\\n### Instruction:\\n' + asked -}}"
    "{%- if add_generation_prompt or roles | length == 2 -%}{{- '\\n\\n### Response:\\n' -}}{%- endif -%}"
    "{%- if roles | length == 2 -%}"
    "{%- set reply = messages[1]['content'].lstrip() -%}"
    "{{- reply if reply.endswith(eos_token) else reply + eos_token -}}"
    "{%- endif -%}"
)
_BOS = "{{- bos_token -}}"


def use_template(tokenizer: Tokenizer, template: Template) -> None:
    """Set `tokenizer.chat_template`.

    - chat: the tokenizer's own, with thinking switched off where it has a switch named `enable_thinking`, and one
      fixed day where it asks for today's date (`strftime_now`).
    - alpaca: the format above; it begins with BOS where the tokenizer begins plain text with it.
    - none: left as it is.
    """
    if known_template(template) == "alpaca":
        if tokenizer.eos_token is None:
            what = f"the tokenizer {_name(tokenizer)} has no EOS token, which ends every reply of the alpaca template"
            raise ConfigError(what, remedy="set an EOS token of its vocabulary, or use template: chat")
        bos = tokenizer.bos_token_id
        adds_bos = bos is not None and tokenizer(text="a")["input_ids"][:1] == [bos]
        tokenizer.chat_template = (_BOS if adds_bos else "") + _ALPACA
    elif template == "chat":
        if not tokenizer.chat_template:
            what = f"the tokenizer {_name(tokenizer)} has no chat template"
            raise ConfigError(what, remedy="use a chat model, or template: alpaca")
        tokenizer.chat_template = _settled(tokenizer.chat_template)
        _warn_if_replies_begin_elsewhere(tokenizer)


def rendered(tokenizer: Tokenizer, conversations: Sequence[Any], **options: object) -> Any:
    """`tokenizer.apply_chat_template` of one conversation or several, with their tools (`tool_calls`).

    Of several with tools the ids, or the texts, are all that is returned.
    """
    several = bool(conversations) and not isinstance(conversations[0], dict)
    if not several or not any(has_tools(turns) for turns in conversations):
        return _rendered(tokenizer, conversations, **options)
    each = [_rendered(tokenizer, turns, **options) for turns in conversations]
    return {"input_ids": [one["input_ids"] for one in each]} if options.get("return_dict") else each


def _rendered(tokenizer: Tokenizer, conversations: Sequence[Any], **options: object) -> Any:
    """With whatever a template raises told in one line.

    A template is foreign, and what it raises may hold the conversation or control characters: only a text that stands
    in the template itself is repeated.
    """
    turns = conversations[0] if conversations and not isinstance(conversations[0], dict) else conversations
    for key in (TOOLS, CALLS):
        if any(key in turn for turn in turns) and key not in str(tokenizer.chat_template):
            what = f"a conversation has {key}, and the chat template of {_name(tokenizer)} does not render them"
            raise DataError(what, remedy="use a model whose template knows tools, or leave these rows out")
    if has_tools(turns):
        conversations, tools = spelled_out(turns), tools_of(turns)
        options |= {} if tools is None else {"tools": tools}
    try:
        return tokenizer.apply_chat_template(conversations, **options)
    except Exception as error:  # noqa: BLE001  (a template can raise anything)
        said = str(getattr(error, "message", None) or error).strip()
        own = 0 < len(said) <= MAX_SAID and said.isprintable() and said in str(tokenizer.chat_template)
        roles = sorted({str(turn.get("role")) for turn in turns if isinstance(turn, dict)} & set(ROLES))
        raise DataError(
            f"the chat template of {_name(tokenizer)} cannot render a conversation "
            f"(roles: {', '.join(roles) or 'none known'}): {said if own else type(error).__name__}",
            remedy="give the roles that this model's template takes, or use template: alpaca or none",
        ) from None


def known_template(template: str) -> Template:
    """The template of this name; another is a `ConfigError`."""
    names = get_args(Template)
    if template not in names:
        raise ConfigError(f"template {template!r} is unknown", remedy=nearest(str(template), list(names)))
    return cast(Template, template)


def _name(tokenizer: Tokenizer) -> str:
    return repr(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)


def _settled(template: Any) -> Any:
    """The template with thinking off and a fixed day; a tokenizer may have several templates by name."""
    if isinstance(template, dict):
        return {name: _settled(text) for name, text in template.items()}
    for word, settled in (("strftime_now", ONE_DAY), ("enable_thinking", NO_THINKING)):
        if word in template and settled not in template:
            template = settled + template
    return template


def _warn_if_replies_begin_elsewhere(tokenizer: Tokenizer) -> None:
    """A template may open a reply in generation (with a thought, say) otherwise than it renders a finished one."""
    asked, reply = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    opened = rendered(tokenizer, [asked], tokenize=False, add_generation_prompt=True)
    finished = rendered(tokenizer, [asked, reply], tokenize=False)
    if not finished.startswith(opened):
        said = "opens a reply in generation otherwise than in training: part of the opening will be trained on as reply"
        logger.warning("the chat template of %s %s", _name(tokenizer), said)
