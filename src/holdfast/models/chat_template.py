"""Chat templates are programs that came with a model: each is tried under limits before it is first used.

A template that is plainly linear (one loop over the messages, no arithmetic, no calls but those on a short list) needs
no trial. Any other is rendered once in a process with limits of processor time and memory, on neutral conversations;
that it ended is remembered in holdfast's cache. What remains: a template that is slow on a certain text alone.
"""

import logging
from importlib.metadata import version

from holdfast.core.errors import ConfigError
from holdfast.core.files import write_json
from holdfast.core.hashing import sha256_json
from holdfast.models import template_trial
from holdfast.models.embedded import cache_root
from holdfast.models.limits import limited_run

logger = logging.getLogger(__name__)

MAX_CHARACTERS = 2**20
WALL_S = 120.0  # for the whole process on a busy machine; its own limit is one of processor time
_TRIAL = 1  # raise it when the trial changes
_CALLS = {"raise_exception", "strip", "lstrip", "rstrip", "startswith", "endswith", "get", "upper", "lower", "title"}
_FILTERS = {"trim", "upper", "lower", "length", "tojson", "first", "last", "default", "string"}
_PROBLEMS = {
    template_trial.SYNTAX: "is not valid Jinja",
    template_trial.LARGE: "renders a short conversation into more than memory holds",
}


def require_bounded(template: object, name: str) -> None:
    """Refuse a tokenizer's chat template (or one of several, by name) that does not end, or is no template."""
    named = template.values() if isinstance(template, dict) else [template]
    for one in (one for one in named if one is not None):
        if (problem := _problem(one) if isinstance(one, str) else "is no text") is not None:
            remedy = "repair the template in the tokenizer's files, or remove it and use template: alpaca or none"
            raise ConfigError(f"the chat template of {name!r} {problem}", remedy=remedy)


def _problem(template: str) -> str | None:
    if len(template) > MAX_CHARACTERS:
        return f"has {len(template)} characters, at most {MAX_CHARACTERS} are read"
    if plainly_linear(template):
        return None
    libraries = [version("jinja2"), version("transformers")]
    known = cache_root() / "templates" / f"{sha256_json([_TRIAL, libraries, template])}.json"
    if known.is_file():
        return None
    if (problem := _tried(template)) is None:
        try:
            write_json(known, {"ended": True})
        except OSError as error:
            logger.info("the trial of a chat template is not remembered: %s", error.strerror)
    return problem


def _tried(template: str) -> str | None:
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    given = template.encode("utf-8", "surrogatepass")
    code = limited_run(["-P", template_trial.__file__], given, WALL_S, **quiet)
    if code < 0:
        return f"does not end: a short conversation takes more than {template_trial.CPU_S} s"
    return None if code == template_trial.OK else _PROBLEMS.get(code, "cannot be tried: its process failed")


def plainly_linear(template: str) -> bool:
    """Whether the time to render is proportional to the length of the conversation, as can be seen from the syntax."""
    from jinja2 import Environment, TemplateError, nodes

    simple = (
        nodes.Output, nodes.TemplateData, nodes.If, nodes.Name, nodes.Const, nodes.Getattr, nodes.Getitem, nodes.Slice,
        nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Concat, nodes.Add, nodes.Test,
        nodes.CondExpr, nodes.Keyword, nodes.Template,
    )  # fmt: skip

    def linear(node: nodes.Node, looping: bool) -> bool:
        if isinstance(node, nodes.For):
            looped = isinstance(node.iter, nodes.Name) and node.iter.name == "messages" and not node.recursive
            return not looping and looped and all(linear(child, True) for child in node.iter_child_nodes())
        if isinstance(node, nodes.Call):
            named = node.node.attr if isinstance(node.node, nodes.Getattr) else getattr(node.node, "name", None)
            known = named in _CALLS
        elif isinstance(node, nodes.Filter):
            known = node.name in _FILTERS and not (node.kwargs or (node.args and node.name != "default"))
        else:
            known = isinstance(node, simple)
        return known and all(linear(child, looping) for child in node.iter_child_nodes())

    try:  # not rendered and not compiled: nothing in a template runs when it is parsed
        return linear(Environment(autoescape=True).parse(template), looping=False)
    except (TemplateError, RecursionError):
        return False
