"""A calculator of memory for notebooks: choose, and see at once what a rank would hold; with a twin that stands still.

Both views are made by the same function from the same fields; what cannot be combined is one sentence in place of the
picture, never a traceback, and every text is escaped.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from dlojz import models
from dlojz.base.errors import LabError
from dlojz.base.language import say
from dlojz.base.table import safe
from dlojz.config import engines
from dlojz.config.run_config import RunConfig
from dlojz.display.canvas import LabFigure
from dlojz.display.figures.run_figures import footprint_figure
from dlojz.display.memory_tables import FootprintTable, forecast_parts, peak_sentence
from dlojz.display.style import CATEGORY_STYLES, GREY
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
    """What a choice leads to: a forecast, or the sentence that refuses it; shows itself in a notebook."""

    forecast: Forecast | None
    refusal: str = ""

    @property
    def figure(self) -> LabFigure | None:
        """The picture, where there is a forecast."""
        return footprint_figure(self.forecast) if self.forecast else None

    @property
    def parts(self) -> tuple[FootprintTable, ...]:
        """The tables, where there is a forecast."""
        return forecast_parts(self.forecast) if self.forecast else ()

    def _repr_html_(self) -> str:
        if self.forecast is None:
            return f'<p role="status" aria-live="polite"><b>{safe(self.refusal)}</b></p>'
        figure = footprint_figure(self.forecast)
        picture = base64.b64encode(figure._repr_mimebundle_()["image/png"]).decode()
        return (
            f'<p role="status" aria-live="polite"><b>{safe(peak_sentence(self.forecast))}</b></p>'
            f'<img alt="{safe(figure.alt)}" style="max-width:100%" src="data:image/png;base64,{picture}">'
            f"{html_parts(self.parts)}"
        )

    def __repr__(self) -> str:
        return self.refusal if self.forecast is None else peak_sentence(self.forecast)


def still_calculator(**fields: Any) -> CalculatorAnswer:
    """The calculator's answer to one choice, as a figure and tables that stand still.

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


def html_parts(parts: Iterable[FootprintTable]) -> str:
    """The small tables of a sheet as HTML, every cell escaped; shares as bars beside their figures."""
    return "".join(_html_part(part) for part in parts)


def _html_part(part: FootprintTable) -> str:
    head = "".join(f'<th scope="col">{safe(title)}</th>' for title in part.columns)
    rows = []
    for number, (label, *cells) in enumerate(part.rows):
        bar = ""
        if part.shares:
            style = CATEGORY_STYLES.get(part.styles[number]) if part.styles else None  # type: ignore[call-overload]
            bar = (
                f'<td aria-hidden="true" style="width:8em"><div style="background:{style.color if style else GREY};'
                f'height:.7em;width:{100 * part.shares[number]:.1f}%"></div></td>'
            )
        rows.append(
            f'<tr><th scope="row" style="text-align:left;font-weight:normal">{safe(label)}</th>{bar}'
            + "".join(f"<td>{safe(cell)}</td>" for cell in cells)
            + "</tr>"
        )
    if head and part.shares:  # the column of bars has no title
        head = head.replace("</th>", "</th><td></td>", 1)
    caption = f'<caption style="text-align:left;font-weight:bold">{safe(part.heading)}</caption>'
    return (
        f'<table style="margin-top:1em">{caption}'
        + (f"<thead><tr>{head}</tr></thead>" if head else "")
        + f"<tbody>{''.join(rows)}</tbody></table>"
        + "".join(f"<p>{safe(note)}</p>" for note in part.notes)
    )


def calculator(**fields: Any) -> Any:
    """A widget: choose model, batch, precision, optimizer, layout and GPU, and see what the fullest rank would hold.

    Args:
        fields: what is chosen first, as `still_calculator` takes them; what has no control stays as given.

    Returns:
        An ipywidgets box.

    Raises:
        LabError: if the fields are not legal, or ipywidgets is not installed; `still_calculator` needs none.
    """
    return Calculator(**fields).box


class Calculator:
    """The parts of the widget, and what each change does.

    Args:
        fields: what is chosen first.
    """

    def __init__(self, **fields: Any) -> None:
        widgets = _widgets()
        shown_first = still_calculator(**fields)
        if shown_first.forecast is None:
            raise LabError(shown_first.refusal)
        config, layout = shown_first.forecast.config, shown_first.forecast.config.layout
        self._others = {key: value for key, value in fields.items() if key not in _CONTROLLED}
        wide = {"description_width": "9em"}

        def choice(label: str, options: Any, value: Any) -> Any:
            return widgets.Dropdown(options=options, value=value, description=label, style=wide)

        def whole(label: str, value: int, most: int) -> Any:
            return widgets.BoundedIntText(
                value=value, min=1, max=most, description=label, style=wide, continuous_update=False
            )

        def power(label: str, value: int, most: int, *others: int) -> Any:
            options = sorted({*(2**n for n in range(most + 1)), *others, value})
            return widgets.SelectionSlider(
                options=options, value=value, description=label, style=wide, continuous_update=False
            )

        self.controls = {
            "model": choice(say(en="model", fr="modèle"), models.names(), config.model),
            "size": whole("", config.image_size or config.sequence_length or 1, 2**20),
            "micro_batch": whole(say(en="micro-batch", fr="micro-batch"), layout.micro_batch, 2**20),
            "micro_batches": whole(say(en="micro-batches", fr="micro-batches"), layout.micro_batches, 2**10),
            "precision": choice(say(en="precision", fr="précision"), ["fp32", "bf16", "fp16"], config.precision),
            "optimizer": choice(say(en="optimizer", fr="optimiseur"), _legal(RunConfig, "optimizer"), config.optimizer),
            "engine": choice(say(en="engine", fr="moteur"), *_engine(layout.engine, layout.zero)),
            "dp": power("dp", layout.dp, 10),
            "tp": power("tp", layout.tp, 4, 3, 6, 12),  # heads come in multiples of 3 too
            "pp": power("pp", layout.pp, 4),
            "checkpointing": choice(
                say(en="checkpointing", fr="pts de contrôle"),
                ["none", "selective", "full"],
                layout.checkpointing,
            ),
            "offload": choice(say(en="offload", fr="déchargement"), _legal(type(layout), "offload"), layout.offload),
            "device": choice(
                "GPU",
                [("CPU", CPU), *((known.title, name) for name, known in DEVICES.items())],
                shown_first.forecast.device.name if shown_first.forecast.device else CPU,
            ),
        }
        self.button = widgets.Button(description=say(en="compute", fr="calculer"))
        self.shown = widgets.HTML()
        self._name_size()
        for name, control in self.controls.items():
            control.observe(self._model_changed if name == "model" else self._changed, names="value")
        self.button.on_click(lambda _: self.compute())
        columns = [list(self.controls.values())[start : start + 5] for start in range(0, len(self.controls), 5)]
        columns[-1].append(self.button)
        self.box = widgets.VBox([widgets.HBox([widgets.VBox(column) for column in columns]), self.shown])
        self.answer = shown_first
        self.shown.value = shown_first._repr_html_()

    @property
    def fields(self) -> dict[str, Any]:
        """What is chosen, as `still_calculator` takes it."""
        chosen = {name: control.value for name, control in self.controls.items()}
        size, engine = chosen.pop("size"), chosen.pop("engine")
        key = "image_size" if models.spec(chosen["model"]).family == "image" else "sequence_length"
        return {**self._others, **chosen, key: size, **_engines()[engine]}

    def compute(self) -> None:
        """Answer what is chosen."""
        self.answer = still_calculator(**self.fields)
        self.shown.value = self.answer._repr_html_()

    def _changed(self, change: Any = None) -> None:
        if self.controls["model"].value.endswith(AT_ONCE):
            self.compute()
        else:
            waiting = say(
                en="This model takes some seconds to trace: press “compute”.",
                fr="Ce modèle prend quelques secondes à tracer : cliquez sur « calculer ».",
            )
            self.shown.value = f'<p role="status" aria-live="polite">{safe(waiting)}</p>'

    def _model_changed(self, change: Any = None) -> None:
        """Another model reads another input: its own size is put in."""
        self._name_size()
        spec = models.spec(self.controls["model"].value)
        before = self.controls["size"].value
        self.controls["size"].value = spec.image_size or spec.sequence_length or 1
        if self.controls["size"].value == before:  # otherwise the size has told it already
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
    asked = {"engine": "torch" if engine == "single" else engine, "zero": zero}
    return list(names), next((name for name, fields in names.items() if fields == asked), "DDP")


def _legal(contract: Any, field: str) -> list[str]:
    return list(contract.model_fields[field].annotation.__args__)


def _widgets() -> Any:
    try:
        import ipywidgets
    except ImportError:
        raise LabError(
            say(
                en="the calculator needs ipywidgets: install it (`pip install ipywidgets`), or use still_calculator, "
                "which answers one choice.",
                fr="la calculatrice demande ipywidgets : installez-le (`pip install ipywidgets`), ou utilisez "
                "still_calculator, qui répond à un choix.",
            )
        ) from None
    return ipywidgets
