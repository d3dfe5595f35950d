"""A path is loaded without asking the network: no family opens a socket, as one file or as files of their own."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import toy_chroma
import toy_flow
import toy_flux2
import toy_z_image
from random_checkpoint import SMALL, small, write

import ldm_lite


def unet(name: str) -> Callable[[Path], dict[str, Any]]:
    def files(folder: Path) -> dict[str, Any]:
        write(folder / "a.safetensors", SMALL if name == "sd1" else small(name))
        return {"ckpt": folder / "a.safetensors"}

    return files


def transformer(name: str) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {"ckpt": toy_flow.write(folder, name)}


FILES: dict[str, Callable[[Path], dict[str, Any]]] = {
    **{name: unet(name) for name in ("sd1", "sd2", "sdxl_base")},
    **{name: transformer(name) for name in ("sd3_medium", "sd35_medium", "flux_dev", "flux_schnell")},
    "chroma": toy_chroma.write,
    "flux2_klein": toy_flux2.write,
    "z_image": toy_z_image.write,
}


@pytest.mark.parametrize("family", FILES)
def test_loading_a_path_opens_no_socket(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a socket is opened")

    files = FILES[family](tmp_path)
    for name in ("__init__", "connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    for name in ("getaddrinfo", "gethostbyname", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    pipe = ldm_lite.load(files.pop("ckpt"), **files | {"device": "cpu"})
    pipe.encode_prompt("an apple")
