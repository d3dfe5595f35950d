"""Make tests/data/manifests.json.gz: the keys, shapes and parameter counts of the original networks.

    python tests/goldens/make_manifests.py DIR

DIR holds one JSON file per network, {name, params, n_keys, shapes: {key: [dims]}}, read off the original classes on the
meta device; keys are without the prefix of the whole file.  Those of the networks that ldm_lite has are kept.
"""

import gzip
import json
import sys
from pathlib import Path

TARGET = Path(__file__).resolve().parents[1] / "data" / "manifests.json.gz"
KEPT = ("unet_", "control_", "t2i_adapter_", "vae_", "taesd_", "text_", "t5_", "vision_")
RENAMED = {  # the file's name -> ours
    "flux-dev": "transformer_flux_dev",
    "flux-schnell": "transformer_flux_schnell",
    "flux-depth": "transformer_flux_control",
    "flux-fill": "transformer_flux_fill",
    "flux-vae": "vae_kl_f8_flux",
    "sd3-medium": "transformer_sd3_medium",
    "sd35-medium": "transformer_sd35_medium",
    "sd35-large": "transformer_sd35_large",
    "zimage": "transformer_z_image",
    "chroma": "transformer_chroma",
    "flux2-klein": "transformer_flux2_klein",
    "flux2-vae": "vae_flux2",
    "qwen-image": "transformer_qwen_image",
    "qwen-image-vae": "vae_qwen_image",
}


def main() -> None:
    """Write the manifests and say how many."""
    manifests = {}
    for path in sorted(Path(sys.argv[1]).glob("*.json")):
        name = RENAMED.get(path.stem, path.stem)
        if path.stem.startswith(KEPT) or path.stem in RENAMED:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            assert manifest["n_keys"] == len(manifest["shapes"]), path
            manifests[name] = {key: manifest[key] for key in ("name", "params", "shapes")}
    content = json.dumps(manifests, separators=(",", ":")).encode("utf-8")
    with open(TARGET, "wb") as file, gzip.GzipFile("", "wb", compresslevel=9, fileobj=file, mtime=0) as zipped:
        zipped.write(content)
    print(f"{TARGET}: {len(manifests)} networks, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
