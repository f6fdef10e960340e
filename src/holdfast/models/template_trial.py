"""A script: render a chat template, read from the standard input, on neutral conversations, under limits.

`chat_template.py` starts it in a process of its own, which imports what `apply_chat_template` renders with, but no
torch. It ends with one of the codes below, or is killed by the system at its limit of processor time.
"""

import sys
from typing import Any

OK, SYNTAX, LARGE = 0, 3, 4
CPU_S = 3  # processor time, so that a busy machine refuses nothing
MEMORY = 2**32
LONGEST = 2**24  # characters of a rendered conversation that has 100,000
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def conversations() -> list[list[dict[str, str]]]:
    """One turn, a reply, a system turn, and thirty long turns."""
    asked, reply = {"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello to you."}
    system = {"role": "system", "content": "Be brief."}
    long = [{"role": turn["role"], "content": "a word " * 500} for turn in [asked, reply] * 15]
    return [[asked], [asked, reply], [system, asked], long]


def limit() -> None:
    """Limit what this process may use from here on, where the system can."""
    try:
        import resource
    except ImportError:  # the parent's clock remains
        return
    used = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (used + CPU_S, used + CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def trial(template: str, render: Any) -> int:
    """Render every conversation; what a template says about a conversation it does not take is no fault of its."""
    from jinja2 import TemplateSyntaxError

    for turns in conversations():
        for opened in (False, True):
            try:
                text, _ = render([turns], chat_template=template, add_generation_prompt=opened, **TOKENS)
            except TemplateSyntaxError:
                return SYNTAX
            except (MemoryError, RecursionError, OverflowError):
                return LARGE
            except Exception:  # noqa: BLE001, S112  (a template may refuse roles, or want tools)
                continue
            if len(text[0]) > LONGEST:
                return LARGE
    return OK


def main() -> int:
    sys.modules["torch"] = None  # type: ignore[assignment]  # rendering needs none, and importing it takes seconds
    from transformers.utils.chat_template_utils import render_jinja_template

    template = sys.stdin.buffer.read().decode("utf-8", "surrogatepass")
    limit()
    return trial(template, render_jinja_template)


if __name__ == "__main__":
    sys.exit(main())
