"""Time whole runs of programs in turn on a CPU: from the start of a process to the PNG.

    python scripts/whole_runs.py prepare FOLDER     # random weights of Stable Diffusion 1's size, once
    python scripts/whole_runs.py run FOLDER --sd-cli PATH --rounds 3

Needs `pip install diffusers transformers openvino`; stable-diffusion.cpp runs only with --sd-cli, the path of its
binary.  All run the same weights in float32: DPM++ 2M, guidance 7.5, one image, on --threads threads.  diffusers
reads its own folder by StableDiffusionPipeline; OpenVINO reads converted networks of fixed sizes, and diffusers'
scheduler runs the loop.  Every process writes an image; noise differs between the programs.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROMPT, SEED, SCALE = "a photo of an astronaut riding a horse", 1, 7.5
PROGRAMS = ("ours", "diffusers", "openvino", "sd.cpp")
CKPT, FOLDER, PNG = "sd1.safetensors", "diffusers", "image.png"
NETWORKS = ("text_encoder", "unet", "vae_decoder")  # OpenVINO's files


def prepare(folder: Path, pixels: int) -> None:
    """Write the checkpoint, diffusers' folder and OpenVINO's networks, all with the same random weights."""
    import openvino
    import torch
    import transformers
    from diffusers import DPMSolverMultistepScheduler, StableDiffusionPipeline
    from safetensors.torch import save_file

    import ldm_lite
    from ldm_lite.bench import peers
    from ldm_lite.bench.checkpoints import open_model
    from ldm_lite.families.sd1 import SD1

    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = open_model("sd1", None)
    weights = {key: checkpoint.read(key) for key in checkpoint.shapes}
    save_file(weights, folder / CKPT, metadata=dict(checkpoint.metadata))

    with gzip.open(Path(ldm_lite.__file__).parent / "core" / "clip_merges.txt.gz", "rt", encoding="utf-8") as file:
        merges = [line for line in file.read().split("\n") if line and not line.startswith("#")]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [*map(chr, printable), *(chr(256 + number) for number in range(256 - len(printable)))]
    words = [*letters, *(letter + "</w>" for letter in letters), *("".join(merge.split()) for merge in merges)]
    words += ["<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges))
    networks: dict[str, Any] = {role: peers.NETWORKS[role](SD1, weights) for role in ("unet", "vae", "text_encoder")}
    for network in networks.values():
        for parameter in network.parameters():
            parameter.data = parameter.data.contiguous()
    StableDiffusionPipeline(
        **networks,
        tokenizer=transformers.CLIPTokenizer(
            str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=77
        ),
        scheduler=DPMSolverMultistepScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder / FOLDER)

    class Unet(torch.nn.Module):
        def forward(self, x: torch.Tensor, t: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
            return networks["unet"](x, t, encoder_hidden_states=context, return_dict=False)[0]

    class Decoder(torch.nn.Module):
        def forward(self, z: torch.Tensor) -> torch.Tensor:
            return networks["vae"].decode(z, return_dict=False)[0]

    class Text(torch.nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return networks["text_encoder"](ids).last_hidden_state

    side = pixels // 8
    inputs = {
        "text_encoder": (Text(), (torch.zeros(2, 77, dtype=torch.int64),)),
        "unet": (Unet(), (torch.zeros(2, 4, side, side), torch.tensor(999), torch.zeros(2, 77, 768))),
        "vae_decoder": (Decoder(), (torch.zeros(1, 4, side, side),)),
    }
    for name, (network, example) in inputs.items():
        with torch.no_grad():
            converted = openvino.convert_model(network, example_input=example, input=[list(x.shape) for x in example])
        openvino.save_model(converted, folder / f"{name}.xml", compress_to_fp16=False)


def run_diffusers(folder: Path, pixels: int, steps: int, threads: int) -> None:
    """Run the pipeline as its documentation says, on a CPU."""
    import torch
    from diffusers import StableDiffusionPipeline

    torch.set_num_threads(threads)
    pipe = StableDiffusionPipeline.from_pretrained(folder / FOLDER, safety_checker=None)
    image = pipe(
        PROMPT, height=pixels, width=pixels, num_inference_steps=steps, guidance_scale=SCALE,
        generator=torch.Generator().manual_seed(SEED),
    ).images[0]  # fmt: skip
    image.save(folder / PNG)


def run_openvino(folder: Path, pixels: int, steps: int, threads: int) -> None:
    """Run OpenVINO's networks in a bare loop, with diffusers' scheduler."""
    import openvino
    import torch
    import transformers
    from diffusers import DPMSolverMultistepScheduler
    from PIL import Image

    core = openvino.Core()
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
    encode, unet, decode = (core.compile_model(folder / f"{name}.xml", "CPU", settings) for name in NETWORKS)
    tokenizer = transformers.CLIPTokenizer.from_pretrained(folder / FOLDER / "tokenizer")
    scheduler: Any = DPMSolverMultistepScheduler.from_pretrained(folder / FOLDER / "scheduler")
    ids = tokenizer(["", PROMPT], padding="max_length", max_length=77, return_tensors="pt").input_ids
    context = encode([ids])[0]
    scheduler.set_timesteps(steps)
    x = torch.randn(1, 4, pixels // 8, pixels // 8, generator=torch.Generator().manual_seed(SEED))
    for t in scheduler.timesteps:
        without, with_text = torch.from_numpy(unet([torch.cat([x, x]), t, context])[0]).chunk(2)
        x = scheduler.step(without + SCALE * (with_text - without), t, x).prev_sample
    rgb = torch.from_numpy(decode([x / 0.18215])[0])[0].clamp(-1, 1).add(1).mul(127.5).round().byte()
    Image.fromarray(rgb.permute(1, 2, 0).numpy()).save(folder / PNG)


def command(program: str, folder: Path, options: argparse.Namespace) -> list[str]:
    """Return the command line of a program's run."""
    pixels, steps = str(options.pixels), str(options.steps)
    if program == "ours":
        return [
            sys.executable, "-m", "ldm_lite.txt2img", PROMPT, "--ckpt", str(folder / CKPT), "--H", pixels,
            "--W", pixels, "--sampler", "dpmpp_2m", "--steps", steps, "--scale", str(SCALE), "--seed", str(SEED),
            "--device", "cpu", "--dtype", "fp32", "--outdir", str(folder / "ours"),
        ]  # fmt: skip
    if program == "sd.cpp":
        return [
            options.sd_cli, "-m", str(folder / CKPT), "-p", PROMPT, "-H", pixels, "-W", pixels, "--sampling-method",
            "dpm++2m", "--steps", steps, "--cfg-scale", str(SCALE), "-s", str(SEED), "--threads", str(options.threads),
            "--type", "f32", "-o", str(folder / PNG), *options.sd_options.split(),
        ]  # fmt: skip
    return [sys.executable, __file__, program, str(folder), "--pixels", pixels, "--steps", steps,
            "--threads", str(options.threads)]  # fmt: skip


def measure(folder: Path, options: argparse.Namespace) -> None:
    """Run the programs in turn and print a table of seconds."""
    from statistics import median

    from ldm_lite.bench.measure import alternating, spread

    programs = [name for name in options.programs.split(",") if name != "sd.cpp" or options.sd_cli]
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    threads = {name: str(options.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    for number in range(options.rounds):
        for name in alternating(programs, number):
            start = time.perf_counter()
            done = subprocess.run(
                command(name, folder, options), env={**os.environ, **threads}, capture_output=True, text=True
            )
            if done.returncode:
                sys.exit(f"{name} failed: {(done.stderr or done.stdout).strip()[-500:]}")
            seconds[name].append(time.perf_counter() - start)
            print(f"{name}: {seconds[name][-1]:.1f} s", flush=True)
    peer = median(seconds["diffusers"]) if "diffusers" in seconds else None
    print("\n| program | seconds | spread | of diffusers |\n|---|---:|---:|---:|")
    for name, times in seconds.items():
        ratio = f"{median(times) / peer:.2f}" if peer else ""
        print(f"| {name} | {median(times):.1f} | {spread(times):.1%} | {ratio} |")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "run", "diffusers", "openvino"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="in the order of the first round")
    parser.add_argument("--pixels", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sd-cli", default="", help="the binary of stable-diffusion.cpp")
    parser.add_argument("--sd-options", default="", help="more options for it, such as --diffusion-fa")
    options = parser.parse_args(argv)
    if options.what == "prepare":
        prepare(options.folder, options.pixels)
    elif options.what == "run":
        measure(options.folder, options)
    else:
        run = run_diffusers if options.what == "diffusers" else run_openvino
        run(options.folder, options.pixels, options.steps, options.threads)


if __name__ == "__main__":
    main()
