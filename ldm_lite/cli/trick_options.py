"""The options that make a picture with less work, or a better one with the same: all off unless given."""

from dataclasses import dataclass

from ldm_lite.cli.options import CheckedOptions, option


@dataclass(frozen=True, kw_only=True)  # the prompt comes first
class TrickOptions(CheckedOptions):
    """Fewer evaluations of the network for the same picture."""

    guidance_interval: str | None = option(
        None,
        "guidance only in these shares of the steps, START-END: half the work in the others (0.1-0.7, -0.6); or at "
        "these noise levels (sigma=0.3-5)",
        metavar="START-END",
        png="Guidance interval",
    )
    guidance_schedule: str | None = option(
        None,
        "how the guidance scale changes: linear, falling, cosine, falling_cosine, sine, power_cosine[:power=4], each "
        "with [:least=WEIGHT]",
        metavar="NAME",
        png="Guidance schedule",
    )
    apg: str | None = option(
        None,
        "adaptive projected guidance, against saturation at high scales: parallel=0[:threshold=15][:momentum=-0.5]",
        metavar="SETTINGS",
        png="APG",
    )
    deep_cache: str | None = option(
        None,
        "DeepCache: run the UNet's deep blocks only in every N-th call; of the others, BRANCH tells how many more "
        "blocks run",
        metavar="N[:BRANCH]",
        png="DeepCache",
    )
    gate_step: int | None = option(
        None,
        "T-GATE: after so many steps, keep the results of cross-attention, without guidance",
        within=(1, 999),
        png="Gate step",
    )
    freeu: str | None = option(
        None, "FreeU's factors, for instance 1.5,1.6,0.9,0.2 for SD 1", metavar="B1,B2,S1,S2", png="FreeU"
    )
    brownian: bool = option(
        False,
        "draw the noise of dpmpp_sde, dpmpp_2m_sde and dpmpp_3m_sde from a Brownian tree, so that more steps come "
        "nearer to the same image; --noise a1111 and comfy do so anyway",
        png="Brownian tree",
    )
