"""What is wrong in a small TOML file, for whoever wrote it: line, key, what may stand there.

Decides the words. Refuses to know what a file is for.
"""

from __future__ import annotations

import difflib
import re

import msgspec


def what_is_wrong(text: str, error: Exception, struct: type[msgspec.Struct]) -> str:
    """In words, for a file of these contents that was to become a `struct`. `error` is msgspec's;
    what a struct's own check says is expected to begin with the key."""
    said = str(error).split(" - at ")[0]
    known = struct.__struct_fields__
    if found := re.search(r"unknown field `(.*)`", said):
        key = found[1]
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        meant = f" Did you mean {close[0]}?" if close else " Remove it."
        return f"{_line(text, key)}there is no key {key}.{meant} There are: {', '.join(known)}"
    if found := re.search(r"missing required field `(.*)`", said):
        return f"missing required field {found[1]}; add a line `{found[1]} = ...`"
    if found := re.search(r"at `\$\.(\w+)", str(error)):
        wanted = re.sub(r"[Ee]xpected `(\w+)`", lambda one: f"expected {_word(one[1])}", said)
        got = re.sub(r"got `(\w+)`", lambda one: f"got {_word(one[1])}", wanted)
        return f"{_line(text, found[1])}{found[1]}: {got}"
    key = said.split(" ")[0]
    return f"{_line(text, key) if key in known else ''}{said}"


def _word(kind: str) -> str:
    words = {"float": "a number", "int": "a whole number", "str": 'a text in "quotes"'}
    words |= {"bool": "true or false", "array": "a list in [brackets]", "object": "a table"}
    return words.get(kind, kind)


def _line(text: str, key: str) -> str:
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(rf"\s*\[*[\"']?{re.escape(key)}[\"']?\s*[=.\]]", line):
            return f"line {number}: "
    return ""
