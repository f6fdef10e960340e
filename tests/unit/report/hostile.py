"""Sixty strings that have broken pages, terminals, spreadsheets and parsers."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from tests.unit.report.synthetic import Words, certificate, write_run

from holdfast.data.examples import to_utf8

HOSTILE = [
    "<script>document.title='owned'</script>",
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "'><img src=x onerror=alert(1)>",
    "</pre><script>alert(1)</script>",
    "</pre></details><h1>out</h1>",
    "</summary></details><details open>",
    "</svg><script>alert(1)</script>",
    "</style><script>alert(1)</script>",
    "</title><script>alert(1)</script>",
    "</code></td></tr></table><h1>x</h1>",
    "</bdi></p></main></body></html><p>after",
    "<style>*{display:none}</style>",
    "<style>@import url(https://example.org/x.css);</style>",
    "<link rel=stylesheet href=https://example.org/x.css>",
    "<base href=https://example.org/>",
    "<meta http-equiv=refresh content=0;url=https://example.org>",
    "<iframe src=https://example.org></iframe>",
    "<iframe srcdoc='<script>alert(1)</script>'>",
    "<object data=https://example.org></object><embed src=x>",
    "<form action=https://example.org><input autofocus onfocus=alert(1)>",
    "<a href=javascript:alert(1)>click</a>",
    "javascript:alert(document.domain)",
    "data:text/html,<script>alert(1)</script>",
    "<math><mtext><table><mglyph><style><img src=x onerror=alert(1)>",
    "<svg><animate onbegin=alert(1) attributeName=x>",
    "<template><script>alert(1)</script></template>",
    "<noscript><p title='</noscript><img src=x onerror=alert(1)>'>",
    "<!-- --><script>alert(1)</script><!--",
    "<!--> <img src=x onerror=alert(1)> -->",
    "<![CDATA[<script>alert(1)</script>]]>",
    "<?xml version='1.0'?><!DOCTYPE x [<!ENTITY a SYSTEM 'file:///etc/passwd'>]>",
    '" onmouseover="alert(1)',
    "' style='position:fixed;inset:0",
    "x` onclick=`alert(1)",
    "{{7*7}}",
    "{{ self.__init__.__globals__ }}",
    "{% for x in range(9) %}<b>{% endfor %}",
    "{# comment #}{{ ''.__class__.__mro__ }}",
    "${7*7}#{7*7}<%= 7*7 %>",
    "%s%n%x {0} {0.__class__}",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "&#60;script&#62;alert(1)&#60;/script&#62;",
    "&amp;lt;b&amp;gt;",
    "NUL \x00 in the middle <b>\x00</b>",
    "\u202egnp.exe\u202c right to left \u2066isolate\u2069 \u200f\u200e",
    "zero\u200bwidth\u200d\ufeff\u00adsoft",
    "\x1b[31mred\x1b[0m \x1b]8;;https://example.org\x07link\x1b]8;;\x07",
    "\x1b]52;c;Y2FsYw==\x07 \x9b2J \x08\x7f",
    '=HYPERLINK("https://example.org","x")',
    "+cmd|' /C calc'!A0",
    "@SUM(1+1)*cmd|' /C calc'!A0",
    '{"a": "</script>", "b": [1, 2}\u2028\u2029',
    "';alert(1);//\\';alert(1);//",
    "lone \ud800 surrogate \udfff",
    "\ufffe\uffff\ufdd0 \U0001ffff \ue000",
    "[link](javascript:alert(1)) ![img](https://example.org/x.png) <https://example.org> www.example.org",
    "| a | b |\n|---|---|\n# heading\n```\nfence\n---\n* list\n> quote",
    "<b>" * 400 + "A" * 30_000,
]
assert len(HOSTILE) == 60
SIZES = {"constraint": 8, "monitor": 10, "certify": 6}
CATEGORY = {"n": 60, "regressions": 0, "p_value": 0.01, "adjusted_p": 0.02, "upper_bound": 0.05, "certified": True}
PAGES = [HOSTILE[i : i + 10] for i in range(0, len(HOSTILE), 10)]


def small_run(folder: Path, words: Words) -> Path:
    names = words.category if isinstance(words.category, tuple) else [f"{words.category} {i}" for i in range(10)]
    record = certificate(words, kind="per_category", categories=list(names))
    return write_run(folder, words, certified=record, sizes=SIZES, steps=4)


def everywhere(*texts: str) -> Words:
    """One string for each example, all of them in every other stored text; Arrow takes no lone surrogates."""
    legal = [to_utf8(text) for text in texts]
    single = {field.name: " ".join(legal) for field in fields(Words)}
    return Words(**single | {"prompt": texts, "reply": texts, "category": tuple(legal)})
