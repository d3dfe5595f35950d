"""docs/coming-from.md: its code runs on the bundled model, and its tables are those of the package."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import page_files
import pytest
from PIL import Image

import ldm_lite
from ldm_lite import txt2img
from ldm_lite.diffusion.names import resolve
from ldm_lite.diffusion.schedule import SPACINGS
from scripts.make_coming_from import PATH, TABLE, page

TEXT = PATH.read_text(encoding="utf-8")
ROWS = [line for line in TABLE.sub("", TEXT).splitlines() if re.match(r"\|.*\|.*[(\[].*\|$", line)]


def test_the_tables_are_current() -> None:
    assert page(TEXT) == TEXT, "run scripts/make_coming_from.py"
    assert len(TABLE.findall(TEXT)) == 7


def test_it_has_the_usual_calls() -> None:
    assert sum("ldm_lite.load(" in row or "pipe." in row for row in ROWS) >= 50


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the code of the page finds: files, an image, a mask, and what earlier rows left behind."""
    folder = tmp_path_factory.mktemp("coming")
    page_files.write(folder)
    mask = Image.new("L", (128, 128))
    mask.paste(255, (64, 0, 128, 128))
    pipe = ldm_lite.load(device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield {"ldm_lite": ldm_lite, "image": pipe.txt2img("a cat", steps=2)[0], "mask": mask, "pipe": pipe}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.thin(4)
def test_our_side_runs(row: str, space: dict[str, Any]) -> None:
    """Those that later rows need too, since each names what it takes."""
    ours = row.rstrip("|").rpartition(" | ")[2]
    snippets = [code for code in re.findall(r"`([^`]+)`", ours) if "(" in code]
    assert snippets
    for code in snippets:
        code = code.replace('"cuda"', '"cpu"').replace("steps=20", "steps=2").replace('("euler", 20)', '("euler", 2)')
        code = re.sub(r"pipe\.(txt2img|img2img|inpaint|stream)\((?!.*steps=\d)(.*)\)", r"pipe.\1(\2, steps=4)", code)
        exec(f"from ldm_lite import Control\n{code}", _with_parts(space))


def _with_parts(space: dict[str, Any]) -> dict[str, Any]:
    pipe = space["pipe"]
    if "cond" not in space:
        space |= {"cond": pipe.encode_prompt("a cat"), "uncond": pipe.encode_prompt(""), "latents": pipe.noise(7)}
        space |= {"edges": ldm_lite.Control("control_canny.safetensors", space["image"], preprocess="canny")}
        space |= {"images": [space["image"]]}
    return space


def test_names_of_samplers_and_spacings_are_taken() -> None:
    """ComfyUI's and diffusers', as far as there is the sampler."""
    comfy = (
        "euler euler_ancestral heun dpm_2 dpm_2_ancestral lms dpm_fast dpm_adaptive dpmpp_2s_ancestral dpmpp_sde "
        "dpmpp_sde_gpu dpmpp_2m dpmpp_2m_sde dpmpp_2m_sde_gpu dpmpp_3m_sde dpmpp_3m_sde_gpu ddpm lcm deis ddim uni_pc"
    )
    classes = (
        "EulerDiscrete EulerAncestralDiscrete DPMSolverMultistep DDIM DDPM PNDM LMSDiscrete HeunDiscrete "
        "UniPCMultistep KDPM2Discrete KDPM2AncestralDiscrete DEISMultistep DPMSolverSDE LCM TCD FlowMatchEulerDiscrete"
    )
    for name in [*comfy.split(), *(f"{name}Scheduler" for name in classes.split())]:
        resolve(name)
    assert {"normal", "karras", "exponential", "sgm_uniform", "simple", "ddim_uniform", "beta"} <= SPACINGS.keys()
    assert resolve("dpmpp_2m_sde_gpu") == resolve("dpmpp_2m_sde")


def test_what_a_sentence_shows_is_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    command, shown = re.search(r"`ldm-lite txt2img (.*?)` says\n\n```\n(.*?)```", TEXT, re.DOTALL).groups()  # type: ignore[union-attr]
    with pytest.raises(SystemExit):
        txt2img.main(command.replace('"a cat"', "cat").split())
    assert capsys.readouterr().err == shown


def test_links() -> None:
    for name in re.findall(r"\]\(([\w.-]+\.md)", TEXT):
        assert (Path(PATH).parent / name).exists()
