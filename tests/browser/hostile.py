"""Every producer of HTML in the package, given texts that would run in a browser if one of them were not escaped.

`pieces()` gives each producer's HTML by name; the tests put them on a page, and into JupyterLab.
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

from dlojz.base.table import Table, markdown_safe, safe
from dlojz.campaign.campaign import Campaign, CampaignPlan, CampaignPoint
from dlojz.campaign.report import html
from dlojz.campaign.results import Outlook, Result
from dlojz.cli.teach import board_html
from dlojz.compare import compare
from dlojz.config.run_config import RunConfig
from dlojz.display.widgets.calculator import still_calculator
from dlojz.display.widgets.grid_panel import still_grid
from dlojz.display.widgets.pipeline_panel import still_panel
from dlojz.labs.kit.exercise import Verdict
from dlojz.prediction import predict
from dlojz.ranks.show import CellAnswer, CellOutput, RankStatus
from dlojz.results.record import RunRecord, write_record
from dlojz.running.ending import FirstError
from dlojz.running.failures.diagnosis import Diagnosis, Finding
from dlojz.running.limits import preview
from dlojz.running.run import Run
from dlojz.running.run_view import RunView, run_html

ATTACKS = (
    "<img src=x onerror=window.__x=1>",
    '"><script>window.__x=1</script>',
    "'><svg onload=window.__x=1>",
    "</pre></table></svg></title><iframe srcdoc='<script>parent.__x=1</script>'>",
    "[press](javascript:window.__x=1) <a href='javascript:window.__x=1' id=pressed>press</a>",
    "${window.__x=1} {{constructor.constructor('window.__x=1')()}} `$\\foo$`",
    "\u202egnp.exe \x1b[31m \x00 \u2066hidden\u2069 \x08",
)
HIDDEN = "\u202e\u2066\u2069\x1b\x00\x08"
"""Signs that no page may hold: they change what stands around them."""


def hostile_run(folder: Path, attack: str) -> Run:
    """A finished run whose record says something hostile, as a shared folder could hold it."""
    config = RunConfig.of(model="gpt_tiny", steps=1)
    home = folder / "20250101-120000-000000000000-00ff"
    home.mkdir()
    (home / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
    write_record(home / "record.json", RunRecord(run_id=home.name, config=config, status="failed", reason=attack))
    return Run(home)


def pieces(attack: str) -> dict[str, str]:
    """The HTML of each producer, by name; each was given the attack where it takes a text."""
    record = RunRecord(
        run_id=attack,
        config=RunConfig.of(model="gpt_tiny", steps=1),
        status="failed",
        reason=attack,
        footprints=(predict(RunConfig.of(model="gpt_tiny", steps=1)).model_copy(update={"origin": "measured"}),),
    )
    image = {"kind": "image", "png": 'x" onerror="window.__x=1', "text": attack}
    said = CellAnswer(rank=0, parts=({"kind": "text", "text": attack}, image))
    status = RankStatus([{"pid": attack, "device": attack, "memory_bytes": 1, "variables": attack}])
    with tempfile.TemporaryDirectory() as folder:
        run = hostile_run(Path(folder), attack)._repr_html_()
    what = Finding("failed", attack, attack)
    diagnosis = Diagnosis(attack, attack, "failed", attack, (what,), (FirstError(0, attack, 1),))
    told = dict.fromkeys(("waiting", "job", "last_known", "limit_of", "starts", "job_left"), attack)
    followed = RunView(attack, attack, "failed", 1, attack, limit_bytes=1, peaks_bytes=((0, 1),), **told)
    cost = replace(preview(RunConfig.of(model="gpt_tiny", steps=1, device="cpu"), "local"), refusals=(attack,))
    point = CampaignPoint(1, {attack: attack}, "", RunConfig.of(model="gpt_tiny", steps=1))
    result = Result(point, Outlook(), "failed", attack)
    campaign = Campaign(title=attack, description=attack)
    return {
        "run that is followed": run_html(followed),
        "diagnosis": diagnosis._repr_html_(),
        "cost": cost._repr_html_(),
        "board": board_html(Table((attack,), ((attack,),))).partition("<body>")[2],
        "campaign": html(campaign, CampaignPlan((point,), ((attack, attack),)), [result], Path(), {}).partition(
            "<body>"
        )[2],
        "run": run,
        "comparison": compare([record])._repr_html_(),
        "verdict": Verdict("wrong", attack, attack)._repr_html_(),
        "ranks": CellOutput([said])._repr_html_(),
        "status of ranks": status._repr_html_(),
        "lab table": Table((attack,), ((attack, attack),))._repr_html_(),
        "table with bars": Table(
            ("", attack), ((attack, attack),), attack, shares=(0.5,), colors=(attack,), notes=(attack,)
        )._repr_html_(),
        "grid refused": still_grid(axis=attack)._repr_html_() + still_grid(model=attack).html(),
        "pipeline refused": still_panel(csv=attack).html() + still_panel(stage_times=attack)._repr_html_(),
        "calculator refused": still_calculator(model=attack)._repr_html_(),
        "text": f"<p>{safe(attack)}</p>",
    }


def markdown(attack: str) -> str:
    """What Markdown of the package is made of."""
    return f"| {markdown_safe(attack)} |\n|---|\n| {markdown_safe(attack)} |\n\n{markdown_safe(attack)}\n"
