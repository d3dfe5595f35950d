"""Write tests/data/prompts.json: how AUTOMATIC1111's web UI reads prompts, also malformed ones.

Needs `modules/prompt_parser.py` of stable-diffusion-webui 1.10, torch and lark 1.1.2, the version that it pins:

    python tests/goldens/make_prompt_goldens.py path/to/stable-diffusion-webui

That lark reads some malformed prompts in one way or another by the hashes of a run.  This script therefore starts
itself with RUNS hash seeds and keeps the prompts that all of them read alike.
"""

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

RUNS = 24
OUT = Path(__file__).parent.parent / "data" / "prompts.json"
GIVEN = """\
a [b:3]|a [b: 3]|a [[[b]]:2]|[(a:2):3]|a [b : c : 1] d|a[b:[c:d:2]:1]e|a [unbalanced|a [b:.5] c|a [{b~d{:.5] c
((a][:b:c [d:3]|[a~(b:1.1)]|[fe~]male|[fe~~~]male|a ~ b|[a~b|[]|()|[a:b:c]|[[a:b:1]|[a:1]:2]|(a~b)|[(a~b):c:3]
[a:b~c:3]|[a~b:2]|a\\|\\[a:b:1]|[a\\:b:1]|[a:b:-1]|[a:b:1e0]|[a:b:+2]|[:b:2]|[a::2]|[::2]|[ : : 2 ]|[a:b:1.]
([a:b:1]|([a:b:1]:1.2)|([a~b]:1.2)|[([a~b]:1.2):x:4]|[a:b:[c:3]]|[~a]|[~]|[[a~b]~c]|[a:b:11]|[a:b:0]|[a:b:0.05]
[[a:5]:7]|][|[a:b:1]]|((a:b:1))|[a (b:c) d:e:3]|[a [b] c::3]|[:3]|[1:2:3]|a : b [c:1]|([a:3]:b:c)|a cat AND a dog
a cat :1.2 AND a dog:0.5 AND  bird : -1|ratio 16:9|AND|a AND|AND a|BRANDY and sAND|a  AND\tb :.5|a :1. AND b :+2
a [x AND y:z:0.5]|[a:b:1.5] c|[a:b:12]|(a) :2|a (((house:1.3)) [on] a (hill:0.5), sun, (((sky))).|one BREAK two
\\(literal\\]|(never closed|time: 12:30|(a [b) c]"""
ATOMS = ["[", "]", "(", ")", ":", "|", "a", "b", " ", "0.5", "3", ".25", "12", "-1", "\\", "\n", " AND ", "1e1", "c, d"]
ATOMS += [":0.5]", "[x:", "[y|z]", ":4]", "(w:1.2)", "[q::3]", "[e:f:.6]"]
WEIGHTS = [6, 6, 3, 3, 5, 2, 5, 5, 4, 3, 3, 2, 1, 1, 0.5, 0.3, 1, 0.3, 1, 3, 3, 2, 3, 1, 2, 2]
RUNS_OF_STEPS = [(1, None), (5, None), (10, None), (20, None), (10, 7), (20, 10)]  # steps, those of hires fix


def parser(folder: str) -> Any:
    path = Path(folder) / "modules" / "prompt_parser.py"
    spec = importlib.util.spec_from_file_location("prompt_parser", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prompts() -> list[str]:
    texts = [name.replace("~", "|") for line in GIVEN.split("\n") for name in line.split("|")]
    source = random.Random(24)
    return texts + ["".join(source.choices(ATOMS, WEIGHTS, k=source.randint(2, 11))) for _ in range(600)]


def read(theirs: Any) -> list[Any]:
    rows = []
    for i, prompt in enumerate(prompts()):
        steps, hires = RUNS_OF_STEPS[i % len(RUNS_OF_STEPS)]
        indices, texts, _ = theirs.get_multicond_prompt_list([prompt])
        parts = [(texts[index], weight) for index, weight in indices[0]]
        schedules = theirs.get_learned_conditioning_prompt_schedules([text for text, _ in parts], steps, hires)
        rows.append([prompt, steps, hires, parts, schedules, theirs.parse_prompt_attention(prompt)])
    return rows


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(json.dumps(read(parser(sys.argv[1]))))
    else:
        results = []
        for seed in range(RUNS):
            environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
            command = [sys.executable, __file__, sys.argv[1], "run"]
            results.append(json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout))
        kept = [row for row, *others in zip(*results, strict=True) if all(reading == row for reading in others)]
        print(f"{len(kept)} of {len(results[0])} prompts are read alike in {RUNS} runs")
        OUT.write_text("[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in kept) + "\n]\n")
