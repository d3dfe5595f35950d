"""Make tests/data/clean.json: texts, ftfy's repair of each with and without its repair of encodings, and CLIP's ids.

The ids are those of open_clip's SimpleTokenizer, without start, end and padding, for texts without mojibake.

    pip install ftfy regex && pip install --no-deps open_clip_torch
    python tests/goldens/make_clean_goldens.py
"""

import importlib.metadata
import importlib.util
import json
import random
from pathlib import Path

import ftfy

TARGET = Path(__file__).resolve().parents[1] / "data" / "clean.json"

TEXTS = [
    "a photo of a cat", "don\u2019t \u201cstop\u201d \u201again\u2018 \u201eja\u201f \u02bcs", "a &amp; b &lt;b&gt;",
    "caf&eacute; CAF&EACUTE; &#39;x&#39; &#x1F34E; &#128; &#xZZ; &hellip;", "<b>bold &amp; thin</b>", "&amp b &copy c",
    "&amp;amp;lt;", "x&y this&not that &notanentity;", "a < b\n&gt; c", "&gt; a\nb < c\n&gt; d",
    "\ufb01sh \ufb00 \ufb03 \ufb05 \ufb06 \u0132\u0133 \u0149 \u01c4 \u01c8",
    "\uff2c\uff2f\uff35\uff24\u3000\uff4e\uff4f\uff49\uff53\uff45\uff53", "\uff76\uff9e \uff8a\uff9f \uffe0\uffe6",
    "a\r\nb\rc\u2028d\u2029e\x85f", "\x92 \x80\x99 \x81 \x9d", "\x1b[31mred\x1b[0m \x1b \x1b[1;2m", "\x1b\uff3b31mred",
    "a\x00b\x07c\x7fd\u206ae\ufefff\ufffcg", "cafe\u0301 \u1100\u1161", "\u039f\u0394\u039f\u03a3 \u03a3\u03c3\u03c2",
    "\u0130stanbul \u0131\u015f\u0131k", "\u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4 \U0001f34e", "a\u00a0b\u200bc",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u041c\u0418\u0420", "na\u00efve fa\u00e7ade \u2013 \u00bd \u20ac5",
    "sch\u00c3\u00b6n", "don\u00e2\u20ac\u2122t", "\u00c3 la mode", "\u00e4\u00b8\u00ad\u00e6\u2013\u2021",
    "\u00d0\u0178\u00d1\u20ac\u00d0\u00b8\u00d0\u00b2\u00d0\u00b5\u00d1\u201a", "voil\u221a\u2020",
]  # fmt: skip


def random_texts(num: int) -> list[str]:
    """Texts of parts of TEXTS, and of characters of all kinds."""
    state = random.Random(0)
    parts = [part for text in TEXTS[:-6] for part in text.split(" ")]
    return [
        "".join(state.choice([*parts, " ", chr(state.randrange(0x20, 0x250))]) for _ in range(8)) for _ in range(num)
    ]


def main() -> None:
    """The command line."""
    spec = importlib.util.find_spec("open_clip")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    path = Path(spec.submodule_search_locations[0]) / "tokenizer.py"
    alone = importlib.util.spec_from_file_location("open_clip_tokenizer", path)  # the package needs torchvision
    assert alone is not None
    assert alone.loader is not None
    module = importlib.util.module_from_spec(alone)
    alone.loader.exec_module(module)
    tokenizer = module.SimpleTokenizer()
    cases = []
    for text in [*TEXTS, *random_texts(100)]:
        fixed, plain = ftfy.fix_text(text), ftfy.fix_text(text, fix_encoding=False)
        cases.append(
            {"text": text, "plain": plain} | ({"ids": tokenizer.encode(text)} if fixed == plain else {"fixed": fixed})
        )
    about = {name: importlib.metadata.version(name) for name in ("ftfy", "open_clip_torch")}
    TARGET.write_text(json.dumps({"made_with": about, "cases": cases}, indent=0) + "\n", encoding="utf-8")
    print(f"{TARGET}: {len(cases)} cases, {sum('ids' not in case for case in cases)} of mojibake")


if __name__ == "__main__":
    main()
