"""Documents in chunks: what a tokenizer encodes at once, small enough for memory and its caches.

A chunk ends where encoding starts afresh, so the ids of a document's chunks, end to end, are the ids of the document.
"""

import re
from collections.abc import Iterable, Iterator

# Chunks of 32k characters are encoded about twice as fast as chunks of 1M: the tokenizer's queue stays in the L2 cache.
CHUNK = 1 << 15
# A longer line is cut inside: its text is still exact, only the ids next to the cut may differ.
MAX_LINE = 1 << 20

_LINE_START = re.compile(r"(?<=\n)(?=\S)")


def chunks(blocks: Iterable[str]) -> Iterator[str]:
    """The same text in chunks of at most `MAX_LINE` characters, none empty. Holds one block and a line at most.

    Where the chunks end depends on the text alone, not on its blocks.
    """
    text = ""
    for block in blocks:
        text, start = text + block, 0
        while len(text) - start > MAX_LINE:  # so that `_chunk_end` sees all the text it may need
            end = _chunk_end(text, start)
            yield text[start:end]
            start = end
        text = text[start:]
    while text:
        end = _chunk_end(text, 0)
        yield text[:end]
        text = text[end:]


def _chunk_end(text: str, start: int) -> int:
    """Where the chunk that begins at `start` ends: after a newline that a visible character follows.

    After a newline our tokenizer starts afresh, since none of its pieces holds one. Tokenizers that split text by a
    pattern first (GPT, Qwen) may join a newline to the white space after it, hence the visible character.
    """
    if len(text) - start <= CHUNK:
        return len(text)
    end = start + CHUNK
    while (end := text.rfind("\n", start, end)) > start:
        if not text[end + 1].isspace():
            return end + 1
    later = _LINE_START.search(text, start + CHUNK, start + MAX_LINE)
    return later.start() if later else min(start + MAX_LINE, len(text))
