"""How loaded networks are set up."""

import logging
from pathlib import Path

import pytest
import torch
import toy

import ldm_lite
from ldm_lite.checkpoint.loading import load_model
from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.options import LoadOptions, RuntimeOptions
from ldm_lite.core.denoise import run_row
from ldm_lite.runtime import attention, cpu, fused, joined, offload, setup
from ldm_lite.runtime.attention import layers, vanilla
from ldm_lite.runtime.patching import patch_of
from ldm_lite.runtime.precision import pick_dtype, pick_dtypes, set_matmul_precision
from ldm_lite.runtime.setup import prepare_networks


def functions(network: torch.nn.Module) -> set[object]:
    return {layer.attention for layer in layers(network).values()}


def test_the_attention_is_that_of_the_flag(small_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load_model(LoadOptions(ckpt=str(small_path), device="cpu", attention="vanilla"), CheckpointModel)
    assert functions(model.unet) == functions(model.vae) == {vanilla}
    with caplog.at_level(logging.INFO, "ldm_lite"):
        ldm_lite.load(small_path, device="cpu", attention="mha")
    assert "vae keeps attention sdpa: attention 'mha' needs" in caplog.text
    for name, message in (("cudnn", "not available on cpu in fp32"), ("fast", "unknown attention")):
        with pytest.raises(ValueError, match=message):
            ldm_lite.load(small_path, device="cpu", attention=name)


def test_offloaded_networks_are_set_up_for_where_they_compute(
    small_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their weights are on the CPU meanwhile."""
    networks, tried = ldm_lite.load(small_path, device="cpu").networks, set[str]()
    networks = {role: toy.fill(type(network)(network.spec)) for role, network in networks.items()}
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(offload, "in_pinned_memory", enumerate)
    monkeypatch.setattr(attention, "_runs", lambda function, device, *shape: tried.add(device.type) or True)
    try:
        options = RuntimeOptions(attention="cudnn", offload="model", matmul_precision="medium")
        prepare_networks(networks, options, torch.device("cuda"))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert tried == {"cuda"}
    assert functions(networks["unet"]) == {attention._FUNCTIONS["cudnn"]}
    patches = {patch_of(module) for module in networks["unet"].modules()} - {None}
    assert patches == {*fused.KERNELS.values()}, "not the CPU's kernels"


def test_without_flags_all_is_as_load_has_it(small_path: Path) -> None:
    for model in (
        load_model(LoadOptions(ckpt=small_path, device="cpu"), CheckpointModel),
        ldm_lite.load(small_path, device="cpu"),
    ):
        assert functions(model.unet) == functions(model.vae) == {cpu.attention}
        assert model.run_row is run_row
        assert model.offloader is None


def test_bfloat16_on_a_cpu_is_named_for_what_it_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    for units in (("amx_tile", "avx512_bf16"), ("avx512_bf16",), ()):
        auto, asked = ('`dtype="auto"` uses it', "") if units else ("", "bf16 is emulated")
        monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: True)
        for unit in ("amx_tile", "avx512_bf16"):
            monkeypatch.setattr(torch.cpu, f"_is_{unit}_supported", lambda has=unit in units: has)
        for name, dtype, said in (
            (None, torch.float32, auto),
            ("bf16", torch.bfloat16, asked),
            ("fp32", torch.float32, ""),
        ):
            caplog.clear()
            with caplog.at_level(logging.INFO, "ldm_lite"):
                assert pick_dtype(name, cpu) is dtype
            assert said in caplog.text
            assert bool(said) == bool(caplog.records)


def test_auto_takes_bfloat16_where_a_cpu_multiplies_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for units in (("amx_tile",), ("avx512_bf16",), ()):
        for unit in ("amx_tile", "avx512_bf16"):
            monkeypatch.setattr(torch.cpu, f"_is_{unit}_supported", lambda has=unit in units: has)
        dtype = torch.bfloat16 if units else torch.float32
        assert pick_dtypes("auto,vae=fp32", cpu, ("unet", "vae")) == {"unet": dtype, "vae": torch.float32}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_in_half_precision_weights_are_channels_last(small_path: Path, dtype: str) -> None:
    pipe = ldm_lite.load(small_path, device="cpu", dtype=dtype)
    for network in (pipe.unet, pipe.vae):
        weights = [w for w in network.parameters() if w.ndim == 4 and w.shape[1] > 1 and w.shape[2] > 1]
        assert weights
        last = [w.is_contiguous(memory_format=torch.channels_last) for w in weights]
        assert all(last) if dtype == "bf16" else not any(last)


def test_networks_may_compute_in_dtypes_of_their_own() -> None:
    cpu, roles = torch.device("cpu"), ("unet", "vae", "text_encoder")
    fp16, fp32 = torch.float16, torch.float32
    assert pick_dtypes("fp16", cpu, roles) == dict.fromkeys(roles, fp16)
    assert pick_dtypes("fp16,vae=fp32", cpu, roles) == {"unet": fp16, "vae": fp32, "text_encoder": fp16}
    assert pick_dtypes("fp16", cpu, roles, ("vae",)) == {"unet": fp16, "vae": fp32, "text_encoder": fp16}
    assert pick_dtypes("fp16,vae=fp16", cpu, roles, ("vae",)) == dict.fromkeys(roles, fp16)
    assert pick_dtypes(torch.bfloat16, cpu, roles, ("vae",)) == dict.fromkeys(roles, torch.bfloat16)
    with pytest.raises(ValueError, match="got dtype 'decoder=fp32', expected one of unet, vae, text_encoder"):
        pick_dtypes("fp16,decoder=fp32", cpu, roles)
    with pytest.raises(ValueError, match="unknown dtype 'fp8'"):
        pick_dtypes("fp32,vae=fp8", cpu, roles)


@pytest.mark.parametrize("tuning", [{}, {"storage": "int8"}, {"offload": "model"}], ids=str)
def test_a_pipeline_of_two_dtypes_makes_images(tuning: dict[str, str]) -> None:
    pipe = ldm_lite.load(device="cpu", dtype="bf16,vae=fp32,text_encoder=fp32", **tuning)
    assert pipe.dtype == torch.bfloat16
    assert next(pipe.vae.parameters()).dtype == torch.float32
    assert "bf16 (vae fp32, text_encoder fp32) on cpu" in pipe.description
    [image] = pipe.txt2img("a red apple", steps=2)
    assert image.size == (128, 128)


def test_matmul_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
    before = torch.get_float32_matmul_precision()
    try:
        set_matmul_precision("high")
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("high", True)
        set_matmul_precision("highest")
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("highest", False)
        with pytest.raises(ValueError, match="got matmul precision 'fast', expected highest"):
            set_matmul_precision("fast")
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (None, {"qkv"}),
        ("plain", set()),
        ("pdl", {"pdl"}),
        ("qkv,pdl,tma", {"qkv", "pdl", "tma"}),
    ],
)
def test_kernels_are_switched_one_by_one(
    text: str | None, wanted: set[str], small_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler_settings: dict[str, object] = {}
    monkeypatch.setattr(
        setup, "compiled_step", lambda tier, unet, settings: compiler_settings.update(settings) or run_row
    )
    networks = ldm_lite.load(small_path, device="cpu").networks
    networks = {role: toy.fill(type(network)(network.spec)) for role, network in networks.items()}
    monkeypatch.setattr(setup, "set_matmul_precision", lambda name: None)
    monkeypatch.setattr(attention, "_runs", lambda *args: True)
    with monkeypatch.context() as patched:  # weights are where they compute, as far as setup can see
        patched.setattr(setup, "_is_on", lambda weight, device: True)
        prepare_networks(networks, RuntimeOptions(kernels=text, compile="step"), torch.device("cuda"))
    unet = networks["unet"]
    assert any(map(joined.is_joined, joined.joined_layers(unet))) == ("qkv" in wanted)
    names = {"pdl": "triton.enable_pdl", "tma": "triton.enable_persistent_tma_matmul"}
    assert compiler_settings == {name: True for kernel, name in names.items() if kernel in wanted}
    control = toy.fill(type(unet)(unet.spec))
    with monkeypatch.context() as patched:
        patched.setattr(setup, "_is_on", lambda weight, device: True)
        setup.prepare_like(control, unet, torch.device("cuda"))
    assert [patch_of(module) for module in control.modules()] == [patch_of(module) for module in unet.modules()]
    attributes = {"joined", "part"}
    assert [attributes & {*vars(module)} for module in control.modules()] == [
        attributes & {*vars(module)} for module in unet.modules()
    ]


def test_weights_that_move_are_not_joined(small_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "in_pinned_memory", enumerate)
    monkeypatch.setattr(setup, "set_matmul_precision", lambda name: None)
    monkeypatch.setattr(attention, "_runs", lambda *args: True)
    unet = ldm_lite.load(small_path, device="cpu").unet
    networks = {"unet": toy.fill(type(unet)(unet.spec))}
    prepare_networks(networks, RuntimeOptions(offload="model"), torch.device("cuda"))
    assert not any(joined.joined_layers(networks["unet"]))


def test_unknown_kernels_are_named(small_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got `kernels` 'fast', expected all, plain, or some of qkv, pdl"):
        ldm_lite.load(small_path, device="cpu", kernels="qkv,fast")
    assert setup.choose_kernels("all", torch.device("cpu")) == set(setup.KERNELS)


def test_options_that_save_nothing_on_a_cpu_say_so(small_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ldm_lite.load(small_path, device="cpu", storage="int8")
    assert "does nothing" not in caplog.text
    for name, value in (("offload", "model"), ("offload", "sequential"), ("matmul_precision", "high")):
        caplog.clear()
        ldm_lite.load(small_path, device="cpu", **{name: value})
        [record] = [record for record in caplog.records if "does nothing" in record.message]
        assert record.message.startswith(f"`{name}={value}` does nothing on a CPU")
        assert record.levelno == logging.WARNING
