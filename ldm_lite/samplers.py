"""Compare samplers: `python -m ldm_lite.samplers` prints a table and draws a chart.

The error is that of the final latents, relative to a long run of Heun's method from the same noise.  The chart needs
matplotlib (extra "plot").
"""

from ldm_lite.commands import main_of

main = main_of("samplers", __doc__, __name__)
