"""Calculator of memory for notebooks: choose, and see at once what a rank would hold; `still_calculator` answers once.

What cannot be combined is one sentence in place of the picture, never a traceback.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dlojz import models
from dlojz.base.errors import LabError
from dlojz.base.language import say
from dlojz.base.table import Table, tables_html
from dlojz.config import engines
from dlojz.config.run_config import RunConfig
from dlojz.display.canvas import LabFigure
from dlojz.display.figures.run_figures import footprint_figure
from dlojz.display.memory_tables import forecast_parts, peak_sentence
from dlojz.display.widgets.panel import Panel, import_widgets, status_html
from dlojz.hardware import DEVICES, device
from dlojz.prediction.forecast import Forecast, heaviest

CPU = "cpu"
AT_ONCE = ("_tiny", "_ti_16", "_s_16", "alexnet")
"""Endings of models that are traced well within two seconds; the others wait for the button."""
OFFERED = ("ddp", "fsdp2", "zero-1", "zero-2", "zero-3")


def _offered() -> Iterator[tuple[str, dict[str, Any]]]:
    for name in OFFERED:
        spec = engines.ENGINES[name]
        for zero in spec.zero:
            title = f"{spec.en} (ZeRO-{zero})" if len(spec.zero) > 1 else spec.en
            yield title, {"engine": spec.provider, "zero": zero}


ENGINES = dict(_offered())
"""The engines to choose from: the title of each, and the fields of its layouts."""


@dataclass(frozen=True)
class CalculatorAnswer:
    """Forecast of a choice, or the sentence that refuses it; shows itself in a notebook."""

    forecast: Forecast | None
    refusal: str = ""

    @property
    def figure(self) -> LabFigure | None:
        """The picture, where there is a forecast."""
        return footprint_figure(self.forecast) if self.forecast else None

    @property
    def parts(self) -> tuple[Table, ...]:
        """The tables, where there is a forecast."""
        return forecast_parts(self.forecast) if self.forecast else ()

    def html(self) -> str:
        """Write the sentence, the picture and the tables."""
        figure = self.figure
        return status_html(repr(self)) + (figure.html() if figure else "") + tables_html(self.parts)

    def _repr_html_(self) -> str:
        return self.html()

    def __repr__(self) -> str:
        return self.refusal if self.forecast is None else peak_sentence(self.forecast)


def still_calculator(**fields: Any) -> CalculatorAnswer:
    """Answer one choice of the calculator.

    Args:
        fields: those of a configuration, flat, as `dlojz.run` takes them; `device` may be the name of a GPU.

    Example:
        `still_calculator(model="coatnet_0", dp=4, micro_batch=32, device="v100-32")`
    """
    try:
        name = fields.pop("device", CPU)
        target = None if name in (CPU, "auto") else device(name)
        return CalculatorAnswer(heaviest(RunConfig.of(**fields), target))
    except LabError as error:
        return CalculatorAnswer(None, str(error))


def calculator(**fields: Any) -> Any:
    """Show a widget: choose model, batch, precision, optimizer, layout and GPU, and see what the fullest rank holds.

    Args:
        fields: what is chosen first, as `still_calculator` takes them; what has no control stays as given.

    Returns:
        An ipywidgets box.

    Raises:
        LabError: if the fields are not legal, or ipywidgets is not installed; `still_calculator` needs none.
    """
    return Calculator(**fields).box


class Calculator(Panel):
    """Panel of the calculator; `fields` are what is chosen first."""

    def __init__(self, **fields: Any) -> None:
        widgets = import_widgets(en="the calculator", fr="la calculatrice", instead="still_calculator")
        initial = still_calculator(**fields)
        if initial.forecast is None:
            raise LabError(initial.refusal)
        config, layout = initial.forecast.config, initial.forecast.config.layout
        self._others = {key: value for key, value in fields.items() if key not in _CONTROLLED}

        def choice(label: str, options: Any, value: Any) -> Any:
            return widgets.Dropdown(options=options, value=value, description=label)

        def whole(label: str, value: int, maximum: int) -> Any:
            return widgets.BoundedIntText(value=value, min=1, max=maximum, description=label, continuous_update=False)

        def power(label: str, value: int, max_exponent: int, *extra_values: int) -> Any:
            # Powers of two up to 2^max_exponent, and what is set now, legal or not.
            options = sorted({*(2**n for n in range(max_exponent + 1)), *extra_values, value})
            return widgets.SelectionSlider(options=options, value=value, description=label, continuous_update=False)

        model_names = dict.fromkeys((*models.names(), config.model))  # one from elsewhere, if it was given
        gpus = [("CPU", CPU), *((gpu.title, name) for name, gpu in DEVICES.items())]
        recomputed = ["none", "selective", "every_second", "full"]
        controls = {
            "model": choice(
                say(en="model", fr="modèle"), [(name.rpartition("/")[2], name) for name in model_names], config.model
            ),
            "size": whole("", config.image_size or config.sequence_length or 1, 2**20),
            "micro_batch": whole("micro-batch", layout.micro_batch, 2**20),
            "micro_batches": whole("micro-batches", layout.micro_batches, 2**10),
            "precision": choice(say(en="precision", fr="précision"), ["fp32", "bf16", "fp16"], config.precision),
            "optimizer": choice(say(en="optimizer", fr="optimiseur"), _legal(RunConfig, "optimizer"), config.optimizer),
            "engine": choice(say(en="engine", fr="moteur"), *_engine(layout.engine, layout.zero)),
            "dp": power("dp", layout.dp, 10),
            "tp": power("tp", layout.tp, 4, 3, 6, 12),  # heads come in multiples of 3 too
            "pp": power("pp", layout.pp, 4),
            "checkpointing": choice(say(en="checkpointing", fr="pts de contrôle"), recomputed, layout.checkpointing),
            "offload": choice(say(en="offload", fr="déchargement"), _legal(type(layout), "offload"), layout.offload),
            "device": choice("GPU", gpus, initial.forecast.device.name if initial.forecast.device else CPU),
        }
        super().__init__(widgets, controls, in_column=5, label_width="9em")
        self.button = widgets.Button(description=say(en="compute", fr="calculer"))
        self.button.on_click(lambda _: self.compute())
        self.choices.children[-1].children += (self.button,)
        self._name_size()
        controls["model"].observe(self._model_changed, names="value")
        self.follow(control for name, control in controls.items() if name != "model")
        self.answer = initial
        self.shown.value = initial.html()

    @property
    def fields(self) -> dict[str, Any]:
        """What is chosen, as `still_calculator` takes it."""
        chosen = super().fields
        size, engine = chosen.pop("size"), chosen.pop("engine")
        key = "image_size" if models.spec(chosen["model"]).family == "image" else "sequence_length"
        return {**self._others, **chosen, key: size, **_engines()[engine]}

    def answered(self) -> CalculatorAnswer:
        """Answer what is chosen."""
        return still_calculator(**self.fields)

    def _changed(self, change: Any = None) -> None:
        if self.controls["model"].value.endswith(AT_ONCE):
            self.compute()
            return
        waiting = say(
            en="This model takes some seconds to trace: press “compute”.",
            fr="Ce modèle prend quelques secondes à tracer : cliquez sur « calculer ».",
        )
        self.shown.value = status_html(waiting)

    def _model_changed(self, change: Any = None) -> None:
        """Put the new model's own input size in."""
        self._name_size()
        spec = models.spec(self.controls["model"].value)
        before = self.controls["size"].value
        self.controls["size"].value = spec.image_size or spec.sequence_length or 1
        if self.controls["size"].value == before:  # otherwise the size has answered already
            self._changed()

    def _name_size(self) -> None:
        image = models.spec(self.controls["model"].value).family == "image"
        self.controls["size"].description = (
            say(en="image size", fr="côté de l’image") if image else say(en="sequence length", fr="long. de séquence")
        )


_CONTROLLED = frozenset(
    {"model", "image_size", "sequence_length", "micro_batch", "micro_batches", "precision", "optimizer", "engine"}
    | {"zero", "dp", "tp", "pp", "checkpointing", "offload", "device"}
)


def _engines() -> dict[str, dict[str, Any]]:
    by_hand = {
        say(en=f"ZeRO-{stage} by hand", fr=f"ZeRO-{stage} à la main"): {"engine": "by_hand", "zero": stage}
        for stage in (1, 2, 3)
    }
    return {**ENGINES, **by_hand}


def _engine(engine: str, zero: int) -> tuple[list[str], str]:
    """The names to choose from, and the one of an engine; what has no name here is shown as DDP."""
    names = _engines()
    target_fields = {"engine": "torch" if engine == "single" else engine, "zero": zero}
    return list(names), next((name for name, fields in names.items() if fields == target_fields), "DDP")


def _legal(contract: Any, field: str) -> list[str]:
    return list(contract.model_fields[field].annotation.__args__)
