"""The 3 × 3 blur on several Mk1, cycles of a whole step, 48 times.

Strong scaling: three pictures on 2, 4, 8 and 16 IPUs. Weak scaling: 500 columns of 1,000 rows on each IPU. A published
time is that of 100 iterations of two steps, counted by tile 0 of IPU 0 and divided by the clock of 1.6 GHz.
Source: lbm-graphcore, `experiments/gaussian-blur-scaling/results.csv` and `weak-scaling-results.csv` (reference B5).
"""

from __future__ import annotations

import numpy as np

from fidelity_cases.blur import FEWEST_PIXELS, blur, strips_of, target_of
from fidelity_cases.case import Bar, Ends, Family, Row, errors, interval_of, profile_of

_STEPS = 200
_CLOCK_HZ = 1.6e9
_IPUS = (2, 4, 8, 16)
_WEAK = "500 × 1,000 an IPU"
_SIZES = {"499 × 302": (302, 499), "768 × 1,024": (1024, 768), "2,200 × 1,122": (1122, 2200)}  # rows, columns
# Milliseconds by picture and type, on 2, 4, 8 and 16 IPUs.
_PUBLISHED = {
    ("499 × 302", "half4"): (0.80469, 0.86488, 0.75796, 0.7492),
    ("499 × 302", "float2"): (1.1953, 0.96287, 0.83011, 0.80146),
    ("499 × 302", "float"): (1.6564, 1.0732, 0.93358, 0.87356),
    ("768 × 1,024", "half4"): (2.6452, 2.0885, 1.7758, 1.3682),
    ("768 × 1,024", "float2"): (3.72, 2.7157, 2.2284, 1.5007),
    ("768 × 1,024", "float"): (6.1957, 3.4671, 2.7863, 1.6476),
    ("2,200 × 1,122", "half4"): (6.0623, 3.7477, 2.7422, 1.384),
    ("2,200 × 1,122", "float2"): (9.032, 5.3058, 3.704, 2.0047),
    ("2,200 × 1,122", "float"): (16.164, 8.5488, 5.9301, 2.6595),
    (_WEAK, "half4"): (3.2757, 3.553, 3.5564, 3.5709),
    (_WEAK, "float2"): (4.6935, 4.9619, 4.9704, 4.9852),
    (_WEAK, "float"): (7.6643, 7.9326, 7.9412, 7.956),
}


def step_cycles(picture: str, ipus: int, name: str) -> tuple[int, Ends]:
    """Cycles of one step on the simulated machine, and their interval."""
    height, width = (1000, 500 * ipus) if picture == _WEAK else _SIZES[picture]
    fewest_pixels = FEWEST_PIXELS if picture == _WEAK else 1  # as `run.sh` and `weak-scaling.sh` say
    graph, _, _, program = blur(target_of(ipus), height, width, name, fewest_pixels)
    profile = profile_of(graph, program)
    return sum(profile.phase_cycles.values()), interval_of(profile)


def family() -> Family:
    """Every published step of several IPUs."""
    rows = []
    cut_by_rows = []
    for (picture, name), times in _PUBLISHED.items():
        for ipus, milliseconds in zip(_IPUS, times, strict=True):
            measured = milliseconds * 1e-3 / _STEPS * _CLOCK_HZ
            simulated, interval = step_cycles(picture, ipus, name)
            row = Row(f"{picture}, {name}, {ipus} IPUs", round(measured), simulated, interval=interval)
            rows.append(row)
            if picture != _WEAK and len({strip.left for strip in strips_of(*_SIZES[picture], ipus)}) == 1:
                cut_by_rows.append(row)
    source = "lbm-graphcore, Mk1 hardware, time of a step by number of IPUs (reference B5)."
    how = (
        "The program of the section before; copies between IPUs are implicit, as the source has them. A step has one "
        "exchange between IPUs. Strips cut by columns exchange single pixels, a piece of 8 or 16 bytes for each row of "
        "the picture. Their steps take 1,300 to 11,100 cycles more on hardware than here, 2 to 10 for each piece that "
        "an IPU sends, and as many for either size; those cut by rows 600 less to 2,400 more. No source gives the cost "
        "of a piece between IPUs, and none is fitted to these rows."
    )
    bars = [
        Bar("mean error", float(np.mean(errors(rows))), 0.20),
        Bar("mean error of strips cut by rows", float(np.mean(errors(cut_by_rows))), 0.20),
    ]
    return Family("Blur 3 × 3 on several Mk1", source, how, rows, bars)
