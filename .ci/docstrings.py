"""For the site: names that a docstring explains in aligned columns become a list."""

import re

import griffe

ROW = re.compile(r"^([\w`./*,-]+(?: [\w`./*,-]+)*) {2,}(\S.*)$")


def listed(text: str) -> str:
    paragraphs = text.split("\n\n")
    for i, paragraph in enumerate(paragraphs):
        lines = paragraph.split("\n")
        if ROW.match(lines[0]):
            paragraphs[i] = "\n".join(ROW.sub(r"- `\1`: \2", line) for line in lines)
    return "\n\n".join(paragraphs)


class Lists(griffe.Extension):
    def on_object(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = listed(obj.docstring.value)
