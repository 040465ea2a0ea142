"""The language of a text as the primary subtag of BCP 47, such as "en": declared by its author or detected.

Detection is deliberately simple. A text is in a language if it contains two different function words of it, and more
than of any other language. If another language is declared, two of them must not also be words of that one: "as", "do"
and "no" are English and Portuguese, and one German word among them proves nothing. A text in a non-Latin script gets
the language that is most often written in that script. Anything else (a name, a number, code, an invented language) has
no detected language.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

ENGLISH = "en"  # the default without declaration and detection
NAMES = {"de": "German", "en": "English", "es": "Spanish", "fr": "French", "it": "Italian", "nl": "Dutch"}
NAMES |= {"pt": "Portuguese", "ar": "Arabic", "el": "Greek", "he": "Hebrew", "hi": "Hindi", "ja": "Japanese"}
NAMES |= {"ko": "Korean", "ru": "Russian", "th": "Thai", "zh": "Chinese"}

_LEAST = 2  # minimum number of different function words
_TAG = re.compile(r"([a-z]{2,3})(-[a-z0-9]{1,8})*", re.IGNORECASE)
_WORD = re.compile(r"[^\W\d_]+")
_LATIN = 0x250  # code points below are Latin
_FUNCTION_WORDS = {
    "de": "der die das den dem des ein eine einen einem einer ist sind war wird werden wie was wo wer und oder aber "
    "nicht kein keine ich du er sie es wir ihr mich mir dich dir uns man zu zum zur mit von vom auf für im an am bei "
    "nach aus über als auch noch nur so wenn dass weil kann kannst muss soll sollen will möchte bitte hier dann mein "
    "meine dein sein haben habe hat",
    "en": "the a an is are was were be been and or but not no i you he she it we they me him her us them my your his "
    "our their to of in on at by for with from as if that this these those there here how what when where who why do "
    "does did can could will would should must have has had am so then",
    "es": "el la los las un una unos es son está y o pero no yo tú él ella nosotros me te se lo le mi tu su de del a "
    "al en con por para como cómo qué que cuando donde quién si más muy puedo puede quiero hay ser ha he este esta",
    "fr": "le la les un une des est sont et ou mais ne pas non je tu il elle nous vous ils on me te se mon ma mes ton "
    "votre de du au aux à en dans avec pour par sur comme comment que qui quoi quand où si plus très peux peut veux "
    "ce cette ces être avoir ai",
    "it": "il lo la gli le un uno una è sono e o ma non io tu lui lei noi mi ti si mio mia di del della dei al alla "
    "in con per da su come che chi quando dove se più molto posso può voglio questo questa ho ha",
    "nl": "de het een is zijn en of maar niet geen ik jij je hij zij wij we mij van voor met op aan bij naar uit te "
    "als hoe wat wie waar wanneer dat dit deze die kan kun moet wil ook nog heb heeft",
    "pt": "o a os as um uma é são e ou mas não eu tu ele ela nós me te se meu minha de do da dos das no na em com por "
    "para como que quem quando onde mais muito posso pode quero este esta isso tem",
}
_KNOWN = {language: frozenset(words.split()) for language, words in _FUNCTION_WORDS.items()}
_SCRIPTS: dict[str, tuple[str, ...]] = {  # the first is the detected one; the others may be declared
    "ARABIC": ("ar", "fa", "ur", "ps"),
    "CJK": ("zh", "ja", "yue"),
    "CYRILLIC": ("ru", "uk", "bg", "sr", "be", "mk", "kk"),
    "DEVANAGARI": ("hi", "mr", "ne"),
    "GREEK": ("el",),
    "HANGUL": ("ko",),
    "HEBREW": ("he", "yi"),
    "HIRAGANA": ("ja",),
    "KATAKANA": ("ja",),
    "THAI": ("th",),
}


def primary(tag: object) -> str | None:
    """Return the primary subtag of a BCP 47 tag in lower case ("de" for "de-AT"); None for an invalid tag."""
    found = _TAG.fullmatch(tag) if isinstance(tag, str) else None
    return found[1].lower() if found else None


def language_name(language: str) -> str:
    """Return a language's English name with its tag; the tag alone if the name is not known here."""
    return f"{NAMES[language]} ({language})" if language in NAMES else language


def detect_language(text: str, declared: str | None = None) -> str | None:
    """Return the detected language of a text, or `declared` if no other language is detected."""
    words = _WORD.findall(text.lower())
    if found := _by_script(words, declared):
        return found
    distinct = set(words)
    counts = {language: len(distinct & known) for language, known in _KNOWN.items()}
    most = max(counts.values())
    best = [language for language, count in counts.items() if count == most]
    if most < _LEAST or len(best) > 1:
        return declared
    shared = _KNOWN.get(declared or "", frozenset()) if best[0] != declared else frozenset[str]()
    return best[0] if len(distinct & (_KNOWN[best[0]] - shared)) >= _LEAST else declared


def _by_script(words: list[str], declared: str | None) -> str | None:
    """Return the language whose script has most of the letters; None for the Latin or an unknown script."""
    letters = "".join(words)
    others = [letter for letter in letters if ord(letter) >= _LATIN]
    if 2 * len(others) <= len(letters):
        return None
    counts = Counter(unicodedata.name(letter, "").partition(" ")[0] for letter in others)
    kana = counts["HIRAGANA"] + counts["KATAKANA"]
    # Japanese text is mostly Chinese characters, but any kana proves that it is Japanese.
    script = "HIRAGANA" if kana else counts.most_common(1)[0][0]
    languages = _SCRIPTS.get(script, ())
    return declared if declared in languages else (languages or (None,))[0]
