"""Make tests/data/variants.json: all prompts that the package dynamicprompts makes of some templates.

pip install dynamicprompts
python tests/goldens/make_variants_goldens.py
"""

import json
import tempfile
from pathlib import Path

from dynamicprompts.generators import CombinatorialPromptGenerator
from dynamicprompts.wildcards import WildcardManager

TEMPLATES = """a {red|blue} car
{a|b|c}{x|}
{2$$a|b|c}
{1-2$$ and $$a|b|c}
{3::a|b}
{0.5::a|2::b} (c:1.2)
__colour__ car
__sub/animal__
__colour__ __colour__
{a|{b|c} d}
{0-1$$a|b}
{2$$__colour__}
{2$$ and $$__sub/animal__|q}
{-2$$a|b|c}
{1-$$a|b|c}
{}
{a}
{2$$a|b|c|d}
a {b|__sub/animal__} c, {2$$ or $${x|y}|z}"""


def main() -> None:
    """Write the file."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sub").mkdir()
        (folder / "colour.txt").write_text("red\nblue\n")
        (folder / "sub" / "animal.txt").write_text("cat\ndog __colour__\n")
        generator = CombinatorialPromptGenerator(WildcardManager(folder))
        variants = {text: sorted(set(map(str, generator.generate(text, 1000)))) for text in TEMPLATES.split("\n")}
    path = Path(__file__).resolve().parents[1] / "data" / "variants.json"
    path.write_text(json.dumps(variants, indent=0) + "\n")


if __name__ == "__main__":
    main()
