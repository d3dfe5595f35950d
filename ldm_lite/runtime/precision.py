"""Device and dtype: as requested, or defaults that suit the machine."""

import logging
from collections.abc import Collection, Iterable

import torch

log = logging.getLogger("ldm_lite")

AUTO = "auto"  # a name of pick_dtype
NAMED_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def pick_dtype(name: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """Return a dtype; None is float16 on CUDA and float32 elsewhere.  Raises ValueError for an unknown name.

    "auto" is the same, except bfloat16 on a CPU that has it in hardware, where it is faster.
    On a CPU it logs that bfloat16 would be faster, or warns that it is emulated.
    """
    if name == AUTO and device.type == "cpu" and has_fast_bf16(device):
        return torch.bfloat16
    if name is None and device.type == "cpu" and has_fast_bf16(device):
        log.info('this CPU has fast bfloat16: `dtype="auto"` uses it, faster than fp32 and slightly less exact')
    if name is None or name == AUTO:
        return torch.float16 if device.type == "cuda" else torch.float32
    if isinstance(name, str) and name not in NAMED_DTYPES:
        raise ValueError(f"unknown dtype {name!r:.60}: expected one of {', '.join((AUTO, *NAMED_DTYPES))}")
    dtype = NAMED_DTYPES[name] if isinstance(name, str) else name
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"got dtype {name!r:.60}, expected one of {', '.join(NAMED_DTYPES)}")
    if dtype == torch.bfloat16 and device.type == "cpu" and emulates_bf16():
        log.warning("bf16 is emulated on this CPU, and slower than fp32")
    return dtype


def pick_dtypes(
    text: str | torch.dtype | None, device: torch.device, roles: Iterable[str], overflows: Collection[str] = ()
) -> dict[str, torch.dtype]:
    """Return the dtype of each network by role, from one for all or "fp16,vae=fp32" with exceptions.

    Networks in `overflows` get float32 in place of float16, unless they are named.  Raises ValueError for an unknown
    dtype or role.
    """
    names = text.split(",") if isinstance(text, str) else []
    common = pick_dtype(names[0] if names else text, device)
    dtypes = {role: torch.float32 if role in overflows and common == torch.float16 else common for role in roles}
    for item in names[1:]:
        role, _, name = item.partition("=")
        if role not in dtypes:
            raise ValueError(
                f"got dtype {item!r:.60}, expected one of {', '.join(dtypes)} with a dtype, such as vae=fp32"
            )
        dtypes[role] = pick_dtype(name, device)
    return dtypes


def emulates_bf16() -> bool:
    """Whether this is an x86 CPU without bfloat16 instructions, where torch emulates them."""
    cpu = torch.cpu
    return cpu._is_avx2_supported() and not cpu._is_amx_tile_supported() and not cpu._is_avx512_bf16_supported()


def check_matmul_precision(name: str) -> None:
    """Raises ValueError for a name that is not one of set_matmul_precision's."""
    if name not in ("highest", "high", "medium"):
        raise ValueError(
            f"got matmul precision {name!r:.60}, expected highest (float32), high (TF32) or medium (bfloat16)"
        )


def set_matmul_precision(name: str) -> None:
    """Set the precision of float32 products on a GPU: "highest" (float32), "high" (TF32) or "medium" (bfloat16).

    It applies to the whole process.  Raises ValueError for another name.
    """
    check_matmul_precision(name)
    torch.set_float32_matmul_precision(name)
    torch.backends.cudnn.allow_tf32 = name != "highest"


def has_fast_bf16(device: torch.device) -> bool:
    """Whether bfloat16 products are faster than float32 ones: a GPU from Ampere on, a CPU with AMX or AVX512-BF16."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())


def short_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype: "fp16" for torch.float16."""
    return next((name for name, value in NAMED_DTYPES.items() if value == dtype), str(dtype))
