"""The options of the server.  Nothing here imports torch."""

from dataclasses import dataclass

from ldm_lite.cli.options import MOST, CheckedOptions
from ldm_lite.core.declare import option

DAY = 24 * 3600
LARGEST = 2**20 + 2**16  # pixels of an image, by default


@dataclass(frozen=True)
class LimitOptions(CheckedOptions):
    """What a request may ask for."""

    batch_size: int = option(8, "maximum images denoised together", within=(1, 256), common=True)
    batching: str = option(
        "exact",
        "exact: the same bits as alone; fast: always one run of the network, which may differ by 1 of 255",
        choices=("exact", "fast"),
    )
    batch_wait: float = option(
        0.0, "seconds that an idle server waits for more requests before it begins with the first", within=(0, 60)
    )
    max_pixels: int = option(
        0,
        f"maximum pixels of an image; 0: {LARGEST:,}, or less: without --models at most 17 times those that "
        "images have that the model was trained on",
        within=(0, 2**28),
    )
    max_steps: int = option(150, "maximum steps of an image", within=(1, 1000))
    max_images: int = option(16, "maximum images of a request", within=(1, 1000))
    max_branches: int = option(
        10,
        "maximum branches of a step: parts of a prompt that AND joins, the negative prompt, ControlNets",
        within=(2, 1000),
    )
    max_work: int = option(
        2000, "maximum work of a request: megapixels x steps x images x branches, of both passes", within=(1, MOST)
    )
    max_queue: int = option(256, "images that may wait; further requests get status 429", within=(1, MOST))
    max_memory: int = option(
        128,
        "MiB that requests may hold: bodies, pictures, their decoding, results, unsent answers; a client has three "
        "quarters, further requests get 429, and larger ones 413",
        within=(1, MOST),
    )
    max_body: int = option(32, "largest request, in MiB", within=(1, 1024))
    timeout: float = option(600.0, "seconds after which an unfinished request is cancelled", within=(0.1, DAY))
    grace: float = option(
        30.0,
        "seconds that running images have when the server is stopped; then it returns what is there",
        within=(0, DAY),
    )


@dataclass(frozen=True)
class ServeOptions(LimitOptions):
    """Where the server listens, and what it offers."""

    host: str = option("127.0.0.1", "address to listen on", common=True)
    port: int = option(7860, "port to listen on; 0 takes a free one", within=(0, 65535), common=True)
    models: str | None = option(None, "folder of checkpoints that requests may name", metavar="DIR", common=True)
    loras: str | None = option(None, "folder of LoRAs that requests may name", metavar="DIR", common=True)
    controlnets: str | None = option(
        None, "folder of ControlNets and T2I-Adapters that requests may name", metavar="DIR", common=True
    )
    upscalers: str | None = option(None, "folder of ESRGAN networks that requests may name", metavar="DIR", common=True)
    embeddings: str | None = option(
        None, "folder of textual inversions, which prompts use by name", metavar="DIR", common=True
    )
    feature: tuple[str, ...] = option(
        (), "a Python file of features of your own, whose options the page shows; repeatable", metavar="FILE"
    )
    api_key: str | None = option(None, "key that requests need, or @FILE that holds it", metavar="KEY", common=True)
    allow_host: tuple[str, ...] = option(
        (), "name under which the server is reached, besides localhost and addresses; repeatable", metavar="NAME"
    )
    proxy: str | None = option(
        None, "address of a reverse proxy, whose X-Forwarded-For tells clients apart", metavar="ADDRESS"
    )
    max_connections: int = option(1024, "connections open at a time; a client may have half of them", within=(8, MOST))
    preview: str | None = option(
        None, "small autoencoder for previews: taesd, taesdxl, ... (default: the model's own)", metavar="FILE"
    )
    replicas: int = option(0, "number of copies of the model on Ray Serve; 0: without Ray", within=(0, 10_000))
    gpus_per_replica: float = option(0.0, "on Ray: GPUs of each copy; a fraction shares one", within=(0, 64))
    address: str | None = option(None, "on Ray: address of a cluster (default: a new one on this machine)")
    debug: bool = option(False, "show the traceback of an error")
