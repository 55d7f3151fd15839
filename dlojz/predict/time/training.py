"""What a whole training takes: days, GPU-hours, energy, carbon.

Layer 3. Invariant: plain arithmetic on the time of a step; what is counted on top of the GPUs (idle power, the site) is
said, and the published account of BLOOM is reproduced by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dlojz.hardware import Cluster
from dlojz.predict.time.layouts import Layouts, Reals
from dlojz.predict.time.workload import Workload
from dlojz.schema import LabError
from dlojz.text import say

SECONDS_PER_DAY: Final = 86_400
IDLE_OVER_DYNAMIC: Final = 256_646 / 433_196
"""Energy of idle nodes and network over that of the busy GPUs: 0.59.

Source: Luccioni, Viguier and Ligozat 2023 (JMLR 24), table 3: 256,646 kWh beside 433,196 kWh.
"""


@dataclass(frozen=True)
class Bill:
    """What a training takes.

    Attributes:
        seconds: from the first to the last step, without failures and restarts.
        gpu_hours: GPUs times hours.
        energy_kwh: of the GPUs at their power.
        idle_kwh: of what stands idle beside them, by BLOOM's account.
        carbon_kg: of the GPUs' energy, as CO₂ equivalent.
        total_carbon_kg: with what stands idle, and the site's cooling (PUE).
    """

    seconds: float
    gpu_hours: float
    energy_kwh: float
    idle_kwh: float
    carbon_kg: float
    total_carbon_kg: float

    @property
    def days(self) -> float:
        """Days of 24 hours."""
        return self.seconds / SECONDS_PER_DAY


def training_s(flops_per_token: float, tokens: float, gpus: int, flops_per_s: float) -> float:
    """Seconds to train on so many tokens at a rate per GPU: T·F/(n·X), 8TP/(nX) with F = 8P.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), §5.1, equation 4, and its footnote for recomputation.

    Raises:
        LabError: if a number is not above 0.
    """
    for name, value in (("tokens", tokens), ("gpus", gpus), ("flops_per_s", flops_per_s)):
        if not value > 0:
            raise LabError(
                say(
                    en=f"{name} must be above 0, but {value!r} was received.",
                    fr=f"{name} doit être plus grand que 0, mais {value!r} a été reçu.",
                )
            )
    return flops_per_token * tokens / (gpus * flops_per_s)


def bill(cluster: Cluster, gpus: int, seconds: float, *, load: float = 1.0) -> Bill:
    """Energy and carbon of so many GPUs for so long.

    The GPUs draw idle power and `load` of the rest: E = n·t·(idle + load·(TDP − idle)). With load 1 it is the account
    of BLOOM, which takes the thermal design power: 1,082,990 GPU-hours of 400 W, 433,196 kWh, 24.7 t.

    Source: Luccioni, Viguier and Ligozat 2023 (JMLR 24), §4.2.

    Args:
        cluster: where; its GPU's power, its PUE and its electricity's carbon.
        gpus: how many.
        seconds: for how long.
        load: of the GPUs, 0 to 1.

    Raises:
        LabError: if the load is not a share.
    """
    if not 0 <= load <= 1:
        raise LabError(
            say(
                en=f"load is a share from 0 to 1, but {load!r} was received.",
                fr=f"load est une part entre 0 et 1, mais {load!r} a été reçu.",
            )
        )
    hours = gpus * seconds / 3600
    power_w = cluster.gpu.idle_w + load * (cluster.gpu.tdp_w - cluster.gpu.idle_w)
    energy = hours * power_w / 1000
    idle = energy * IDLE_OVER_DYNAMIC
    grams = cluster.carbon_g_per_kwh / 1000
    return Bill(seconds, hours, energy, idle, energy * grams, (energy + idle) * cluster.pue * grams)


def train(workload: Workload, cluster: Cluster, layouts: Layouts, step_s: Reals, tokens: float) -> list[Bill]:
    """The bill of a whole training for every layout.

    Args:
        tokens: to train on; samples, of an image model.
        step_s: seconds of a step of every layout.
    """
    per_sample = workload.size.sequence_length if workload.size is not None else 1
    steps = tokens / (layouts.global_batch * per_sample)
    return [
        bill(cluster, gpus, seconds)
        for gpus, seconds in zip(layouts.gpus.tolist(), (steps * step_s).tolist(), strict=True)
    ]
