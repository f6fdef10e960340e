"""Whether a text is in another language than English, by script and by its function words."""

import re
import unicodedata
from typing import Final

WORDS: Final = 60  # of the text's beginning that are looked at
_WORD: Final = re.compile(r"[a-z]+(?:'[a-z]+)?")
# No accents: the text comes without them. No word that is also an English one.
_ENGLISH_WORDS: Final = """
the and you that it for not with are this have your can if from but they be or as by to is of i my will would should
which what when there their we he she it's don't can't i'm you're here how use using into about some these those more
also than then first step make take yes sure sorry no an do does
"""
_OTHER_WORDS: Final = """
der das und nicht ich ist sie es ein eine einen mit auf fur von dem den zu kann leider aber nein ja bitte mir leid
konnen dir dabei helfen diese dieser uber sich wie auch nur wir
het een niet ik van voor kan geen maar dat helaas je nee jag inte och att det som jeg ikke og til en er tyvarr
le la les des du un une et est que qui ne pas je vous dans sur avec ce cette mais desole oui puis peux
el los las de en por para con una eso puedo ayudar lo siento pero es se su al del como
os um uma nao eu posso desculpe mas
il di che non sono mi dispiace ma della nel gli si imi rau puc sento
nie moge przepraszam ale sie jest na nemohu omlouvam je bir ve bu icin uzgunum ancak
maaf saya tidak bisa yang untuk toi khong xin loi voi pahoillani mutta nem tudok sajnalom
"""
_ENGLISH: Final = frozenset(_ENGLISH_WORDS.split())
_OTHER: Final = frozenset(_OTHER_WORDS.split()) - _ENGLISH


def is_other_language(plain: str, *, code: bool = False) -> bool:
    """Whether most letters are not Latin, or other languages' function words outnumber English ones.

    Twelve words or more without a single function word of English count as another language, unless they are code or
    a list. `plain` is lower-case text without accents; `code` says that a block of code is in it.
    """
    letters = [c for c in plain if c.isalpha()]
    foreign = sum(not c.isascii() and not unicodedata.name(c, "").startswith("LATIN") for c in letters)
    if letters and foreign > 0.3 * len(letters):
        return True
    words = _WORD.findall(plain)[:WORDS]
    english, other = sum(w in _ENGLISH for w in words), sum(w in _OTHER for w in words)
    if other > english and other >= min(2, len(words)) and other >= 0.1 * len(words):
        return True
    return english == 0 and len(words) >= 12 and not code and not _is_code_or_list(plain)


def _is_code_or_list(plain: str) -> bool:
    """Brackets and operators on one character in thirty, or a number, comma or line end after every third word."""
    if 30 * sum(plain.count(c) for c in "(){}[]=;<>") >= len(plain):
        return True
    return 3 * sum(plain.count(c) for c in ",;\n0123456789") >= len(plain.split())
