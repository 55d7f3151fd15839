"""Commands `dlojz plan` and `dlojz validate`.

`dlojz plan` asks `dlojz.planner` and shows the answer; what a job script needs of a machine file is read here, because
the planner stands below the launcher. With `--cluster here` the layouts are timed for this machine's processes, and run
in turns with `--measure`. `dlojz validate` compares the cost model with published measurements.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dlojz.base.errors import LabError
from dlojz.base.language import one_of, refusal, spaced_percent
from dlojz.base.table import Table, facts
from dlojz.cli import main
from dlojz.cli.memory import messages_of
from dlojz.cli.options import WORDS, Answer, Given, check_needs, option_of, phrase, take_model, tell, tell_written, verb
from dlojz.hardware.decoder_size import DecoderSize

if TYPE_CHECKING:
    from dlojz.config.foreign_configs.foreign_meaning import ForeignRun
    from dlojz.results.footprint import Footprint

HERE = "here"
"""Instead of a cluster: the processes of this machine, timed by `dlojz calibrate`."""
SIZES = ("layers", "hidden", "heads", "vocabulary")
_SWITCHES = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@verb("plan")
def plan_command(args: Given, answer: Answer) -> int:
    """Plan, and show the plan; exits with 1 if the layout asked for with `--why` is refused."""
    take_model(args)
    if args["from"]:
        return plan_from_answer(args, answer)
    check_needs(args, "nodes", "from")
    if args["cluster"] == HERE:
        return plan_here_answer(args, answer)
    if args["measure"]:
        raise phrase.refused("measuring needs this machine")
    from dlojz.config.foreign_configs.foreign_meaning import ADAPTERS
    from dlojz.planner.ask import plan

    # Before the search, which takes longer: a wrong word is refused at once.
    layout_fields = _fields(args["why"]) if args["why"] else None
    hours, limit = _limit(args)
    result = plan(
        _model(args),
        _site(args),
        gpus=_numbers(args["gpus"] or "8"),
        batch=args["batch"] or 64,
        **{name: args[name] for name in ("image_size", "sequence_length", "precision", "steps")},
        engines=args["engine"],
        **{name: args[name] for name in ("overlap", "software", *ADAPTERS) if name in args},
        shards=args["shards"] or 0,
        hours=hours,
        limit=limit,
    )
    if args["figure"]:
        result.figure(args["figure"])
    if layout_fields is not None:
        verdict = result.why(**layout_fields)
        answer(verdict.as_dict() if args["json"] else str(verdict))
        return main.DONE if verdict.admitted else main.FAILED
    if args["write"]:
        _write(result.best, Path(args["write"]), args)
    if args["script"]:
        text = _script(result.best, args)
        answer({"script": text} if args["json"] else text.rstrip("\n"))
    else:
        answer(result.as_dict(args["top"]) if args["json"] else result.table(args["top"]))
    return main.DONE


def _site(args: Given) -> Any:
    """The cluster, with another GPU where one is named.

    Raises:
        LabError: if there is no such cluster or GPU.
    """
    from dlojz.hardware import cluster, gpu

    site = cluster(args["cluster"])
    return replace(site, gpu=gpu(args["device"])) if "device" in args else site


def _limit(args: Given) -> tuple[float | None, str]:
    """Find the hours within which the training must end, and which option sets them.

    Without --steps, --hours is the time limit of the job alone.

    Raises:
        LabError: for a quality of service that the cluster's machine does not have, or without --steps.
    """
    if "qos" not in args:
        return (args["hours"] if "steps" in args else None), "--hours"
    from dlojz.hardware import cluster
    from dlojz.hardware.clusters import machine_of

    if "steps" not in args:
        raise phrase.refused("hours without steps")
    site = machine_of(cluster(args["cluster"]))
    services = {service.name: service for service in site.qos} if site else {}
    if args["qos"] not in services:
        raise LabError(one_of("QoS", args["qos"], services))
    return services[args["qos"]].max_hours, args["qos"]


def _model(args: Given) -> str | DecoderSize:
    """Parse the model: a name, or sizes, not both.

    Raises:
        LabError: if neither or both are given, or a size is missing.
    """
    sizes = {name: args[name] for name in SIZES if name in args}
    if not sizes:
        return str(args["model"] or "coatnet_7")
    missing = [name for name in (*SIZES, "sequence_length") if name not in args]
    if missing or "model" in args:
        options = ", ".join(option_of(name) for name in missing) or "--model"
        raise refusal(
            en="a decoder is given by --layers, --hidden, --heads, --vocabulary and --sequence-length together, "
            f"without --model; {'missing' if missing else 'too many'}: {options}.",
            fr="un décodeur se donne par --layers, --hidden, --heads, --vocabulary et --sequence-length ensemble, sans "
            f"--model ; {'il manque' if missing else 'de trop'} : {options}.",
        )
    return DecoderSize(**sizes, sequence_length=args["sequence_length"])


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise phrase.refused("numbers of GPUs", text=text) from None


def _fields(text: str) -> dict[str, Any]:
    """Parse fields of a layout such as `tp=8 pp=12, checkpointing=none`.

    Raises:
        LabError: if a word is not NAME=VALUE, or a name no field.
    """
    from dlojz.planner.explain import FIELDS

    fields: dict[str, Any] = {}
    for part in text.replace(",", " ").split():
        name, equals, value = part.partition("=")
        if not equals:
            raise phrase.refused("fields to explain", part=part)
        if name not in FIELDS:
            raise LabError(one_of("field", name, FIELDS))
        if name == "sequence_parallel":
            fields[name] = _SWITCHES.get(value.lower(), value)
        else:
            fields[name] = int(value) if value.isdecimal() else value
    return fields


def _script(best: Any, args: Given) -> str:
    """Write the job script of a layout for the machine of its cluster.

    Raises:
        LabError: if no job is sent to the cluster, or the machine would refuse the job.
    """
    from dlojz.hardware.clusters import machine_of
    from dlojz.planner.export import batch_script

    site, hours = machine_of(best.question.cluster), args["hours"] or 1.0
    if site is None:
        raise phrase.refused("cluster without SLURM", name=best.question.cluster.name)
    if not best.is_run:
        return batch_script(best.question, best.candidate, site, hours=hours, account=args.get("account", ""))
    from dlojz.running.folder import DEFAULT_WORKER
    from dlojz.running.limits import JobRequest, allocate
    from dlojz.running.slurm.slurm_job import job_script
    from dlojz.running.store import runs_root

    account = args.get("account", "")
    # An account may be billed by kind of GPU, by a suffix of its name; one that has the suffix is left alone.
    account += "" if not account or account.endswith(site.account_suffix) else site.account_suffix
    config = best.config()
    request = JobRequest(account=account, time_limit_s=hours * 3600)
    allocation, refusals = allocate(site, config, request)
    for reason in refusals:
        tell(reason)
    folder = Path(runs_root()) / "RUN"
    return job_script(site, config, allocation, folder, worker_module=DEFAULT_WORKER, requeues=request.requeues)


def _write(best: Any, folder: Path, args: Given) -> None:
    """Write the files of a layout, each atomically."""
    from dlojz.base.files import write_atomic

    files = dict(best.documents())
    try:
        files["job.sh"] = _script(best, args)
    except LabError as error:  # the other files are useful without it
        tell(en=f"no job.sh: {error}", fr=f"pas de job.sh : {error}")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_atomic(folder / name, text)
        tell(str(folder / name))


FROM_OPTIONS: Final = (
    *("from", "cluster", "device", "gpus", "nodes"),
    *("batch", "model", "sequence_length", "vocabulary", "precision", "json"),
)


def plan_from_answer(args: Given, answer: Answer) -> int:
    """Show what another program's configuration means here, and what it comes to; exits with 1 where it does not run.

    Raises:
        LabError: for an option that does not go with `--from`, a file that is none, or a run that it leaves open.
    """
    from dlojz.config.foreign_configs.foreign_meaning import foreign_run, read_foreign
    from dlojz.display.plan_tables import foreign_keys_table, foreign_plan_tables
    from dlojz.display.tables import messages_table
    from dlojz.planner.ask import plan_foreign

    if stray := [name for name in args if name not in FROM_OPTIONS]:
        options = ", ".join(option_of(name) for name in FROM_OPTIONS)
        raise phrase.refused("option beside a foreign file", stray=option_of(stray[0]), options=options)
    config = read_foreign(args["from"])
    if not args["json"]:
        answer(foreign_keys_table(config))  # before what may be missing is asked for
    overrides = {name: args[name] for name in FROM_OPTIONS[5:-1] if name in args}
    if "gpus" in args:
        overrides["gpus"], *more_numbers = _numbers(args["gpus"])
        if more_numbers:
            raise phrase.refused("one number of GPUs", gpus=args["gpus"])
    overrides |= {"nodes": args["nodes"]} if "nodes" in args else {}
    run = foreign_run(config, **overrides)
    plan = None if run.failures or run.undescribed else plan_foreign(config, run, _site(args))
    messages = None if plan is None else _messages(run)
    if args["json"]:
        sent = {} if messages is None else {"communication": messages.to_dict()["communication"]}
        answer({**config.as_dict(), "run": run.as_dict(), "plan": None if plan is None else plan.as_dict(), **sent})
    else:
        for sentence in run.sentences():
            answer("\n" + sentence)
        for table in foreign_plan_tables(plan) if plan is not None else ():
            answer("")
            answer(table)
        if messages is not None:
            answer("")
            answer(messages_table(messages))
    return main.DONE if plan is not None and plan.choice is not None else main.FAILED


def _messages(run: ForeignRun) -> Footprint | None:
    """Predict what rank 0 sends, where the model is of the catalogue and torch or DeepSpeed runs the layout."""
    from dlojz.config.run_config import RunConfig
    from dlojz.planner.planned_model import OF_THE_LAB

    if "model" not in run.size or run.layout["engine"] not in OF_THE_LAB or run.columns.get("zero_shards"):
        return None  # hybrid sharding sends within a node, which no run of this lab does
    try:
        return messages_of(RunConfig.of(**run.run_fields()))
    except LabError:
        return None


TAKEN: Final = ("cluster", "model", "gpus", "batch", "figure", "top", "measure", "json")
ROUNDS: Final = 6
MEASURED: Final = 3
MOST_MEASURED: Final = 8


def plan_here_answer(args: Given, answer: Answer) -> int:
    """Plan for this machine, and show the plan.

    Raises:
        LabError: for a flag that has no meaning here, or without a calibration.
    """
    from dlojz.planner.this_machine import plan_here

    foreign = [name for name in args if name not in TAKEN]
    if foreign:
        flag = option_of(foreign[0])
        raise phrase.refused("option beside this machine", flag=flag)
    top, processes = args["top"], _numbers(args["gpus"] or "2")[0]
    result = plan_here(args["model"] or "coatnet_tiny", processes, args["batch"] or 16)
    # The first of the prediction are measured, so that its order is put to the test.
    kinds = result.kinds()[: min(top, MOST_MEASURED) if "top" in args else MEASURED]
    measured_s: list[float] = []
    if args["measure"]:
        from dlojz.running.measure import measure_steps

        if len(kinds) == 1:
            tell(en=f"Running 1 layout, {ROUNDS} steps…", fr=f"Exécution d’une configuration, {ROUNDS} itérations…")
        else:
            tell(phrase("layouts run in turns", layouts=len(kinds), rounds=ROUNDS))
        measured_s = measure_steps([kind.config for kind in kinds], ROUNDS)
    if args["figure"]:
        result.figure(measured_s or None, args["figure"])
        tell_written(args["figure"], "written", "écrit")
    if args["json"]:
        document = result.as_dict(top)
        # strict=False: the first rows only were measured, or none.
        for row, step_s in zip(document["rows"], measured_s, strict=False):
            row["measured_s"] = step_s
        answer(document)
        return main.DONE
    answer(facts(*result.lines()))
    answer(_table(result, top, measured_s))
    if measured_s:
        answer(_verdict([kind.title for kind in kinds], measured_s))
    return main.DONE


def _table(result: Any, top: int, measured_s: list[float]) -> Table:
    from dlojz.planner.answer import seconds

    head = phrase.titles("columns of layouts here")
    rows = []
    for index, row in enumerate(result.table(top)):
        measured_text = seconds(measured_s[index]) if index < len(measured_s) else ""
        rows.append((*row, measured_text) if measured_s else row)
    return Table(head if measured_s else head[:-1], tuple(rows))


def _verdict(layouts: list[str], measured_s: list[float]) -> str:
    if len(measured_s) == 1:
        return phrase("one choice measured")
    best = measured_s.index(min(measured_s))
    # How much longer the predicted best takes than the measured best, as a share.
    loss = spaced_percent(measured_s[0] / measured_s[best] - 1)
    if best == 0:
        return phrase("first choice wins", count=len(measured_s))
    return phrase("another choice wins", layout=layouts[best], loss=loss, count=len(measured_s))


@verb("validate")
def validate_command(args: Given, answer: Answer) -> None:
    """Show the errors of the cost model."""
    from dlojz.cost_model.validation import first_choices, validate, validate_memory, validated
    from dlojz.display import validation_tables as tables
    from dlojz.hardware import gpu

    names = args[WORDS]
    if len(names) != len(set(names)):
        raise phrase.refused("table named twice", names=", ".join(names))
    chip = gpu(args["device"]) if "device" in args else None
    results = [validate(name, chip) for name in names or validated()]
    memory = None if names or chip else validate_memory()
    if args["json"]:
        answer(tables.validation_document(results, memory, rows=bool(names)))
    else:
        for result in results if names else ():
            answer(tables.rows_table(result))
        answer(tables.validation_table(results))
        if any(map(first_choices, results)):
            answer(tables.regret_table(results))
        if memory is not None:
            answer(tables.interval_table(results))
            answer(tables.memory_table(memory))
