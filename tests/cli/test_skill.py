"""`dlojz skill`: each command of the texts answers, with the fields that they name; the tutor's text solves nothing."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dlojz.base.language import use_language
from dlojz.cli.labs import labs_command, read_skills
from dlojz.cli.main import DONE, REFUSED, SUBCOMMANDS, main
from dlojz.config.run_config import RunConfig
from dlojz.pipeline.schedule import Costs
from dlojz.pipeline.schedule_catalogue import build
from dlojz.pipeline.simulator import simulate
from dlojz.results.record import RunRecord, write_record
from tests.cli.test_help import options_in, verb_of
from tests.cli.test_trace import replicas
from tests.profiled import stream_times, stream_traces, timeline_traces, with_messages, write_trace
from tests.results.test_memory_snapshot import step as snapshot
from tests.results.test_memory_snapshot import written
from tests.results.test_rank_profile import gpu_steps

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "dlojz" / "cli" / "data" / "skills"
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}
TUTORS = ("tutor.md", "tutor.fr.md")
INLINE = re.compile(r"`(dlojz [^`\n]+)`")


class Block(NamedTuple):
    """Commands that stand together in a text, and the fields of their answers that the tables below them name."""

    where: str
    commands: tuple[str, ...]
    fields: tuple[str, ...]


def blocks_of(name: str) -> list[Block]:
    """The blocks of a text, in their order."""
    # Text before the first, then by turns: what stands in a fence, and what follows it.
    _, *parts = re.split(r"^```\n", TEXTS[name], flags=re.MULTILINE)
    pairs = list(zip(parts[::2], parts[1::2], strict=True))
    return [
        Block(
            f"{name}: {fenced.splitlines()[0]}",
            tuple(fenced.splitlines()),
            tuple(field for field in re.findall(r"^\| `([^`]+)` \|", below, re.MULTILINE)),
        )
        for fenced, below in pairs
    ]


BLOCKS = [block for name in TEXTS for block in blocks_of(name)]
COMMANDS = sorted({command for block in BLOCKS for command in block.commands})
TRAINED = "dlojz run train.py --nproc 2 --json"
MORE_TRAININGS = [command for command in COMMANDS if command.startswith("dlojz run ") and command != TRAINED]
SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
model = torch.nn.Linear(8, 4)
model = DistributedDataParallel(model) if dist.is_initialized() else model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(5):
    loss = model(torch.randn(16, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
MODEL = """
import torch

def build():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 10))

def example_inputs():
    return torch.zeros(4, 3, 8, 8)
"""
CONFIGURATION = {
    **{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 256},
    **{"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2},
}
LOG = (
    '[rank1]: Traceback (most recent call last):\n[rank1]:   File "train.py", line 3, in main\n[rank1]: ValueError: x\n'
)
COSTS = Costs(forward=(1.0, 1.0, 3.0, 1.0), backward=(2.0, 2.0, 6.0, 2.0), latency=0.1)


def ended_run(root: Path, status: Any, reason: str) -> str:
    """Write a run of which a record and one log are left; returns its name."""
    config = RunConfig.of(model="gpt_tiny", dp=2, micro_batch=4 if status == "oom" else 8)
    name = f"20250101-120000-{config.hash}-0000"
    (root / name / "logs").mkdir(parents=True)
    (root / name / "config.json").write_text(config.to_json())
    (root / name / "logs" / "rank-1.log").write_text("Traceback (most recent call last):\nValueError: bad batch\n")
    environment = {"device": "CPU", "memory_limit_bytes": str(2**20)}
    record = RunRecord(run_id=name, config=config, status=status, reason=reason, environment=environment)
    write_record(root / name / "record.json", record)
    return name


class Workshop:
    """A user's folder with all that the texts' commands name, and what they have answered so far."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.answers = folder, dict[str, str]()
        (folder / "train.py").write_text(SCRIPT)
        (folder / "my_file.py").write_text(MODEL)
        (folder / "train.log").write_text(LOG)
        (folder / "FOLDER").mkdir()
        (folder / "FOLDER" / "config.json").write_text(json.dumps(CONFIGURATION))
        for kind in ("late", "pipeline", "blocked"):
            (folder / kind).mkdir()
        replicas(folder / "late")
        timeline_traces(folder / "pipeline", simulate(build("1f1b", 4, 8), COSTS))
        interleaved = with_messages(build("interleaved", 4, 8))
        stream_traces(folder / "blocked", stream_times(interleaved, {"F": 2e-3, "B": 4e-3}, 0.1e-3))
        for name, gemm_ms in (("rank0", 2.0), ("before", 2.0), ("after", 3.0)):
            write_trace(folder / f"{name}.json", 0, gpu_steps(gemm_ms=gemm_ms), 8)
        for name, forward in (("step", 5), ("before", 5), ("after", 9)):
            written(folder / f"{name}.pickle", snapshot(forward * 2**20))
        self.failed = ended_run(folder / "runs", "diverged", "rank 1: the loss became nan at step 3")
        self.starved = ended_run(folder / "runs", "oom", "rank 0: MemoryError")

    def cases(self, command: str) -> list[str]:
        """The command for each thing here that it may be asked about: a run of each ending, a trace of each kind."""
        if " traces/ " in command:
            return [command.replace("traces/", kind) for kind in ("late", "pipeline", "blocked")]
        if " RUN" not in command:
            return [command]
        trained = [
            path.name for path in (self.folder / "runs").iterdir() if path.name not in (self.failed, self.starved)
        ]
        names = {"doctor": (self.failed, self.starved), "logs": (self.failed,), "compare": tuple(trained[:1])}
        return [re.sub(r"\bRUN\b", name, command) for name in names[command.split()[1]]]


Ask = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("workshop"))


@pytest.fixture
def ask(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Ask:
    """What a command of a text prints on stdout in each of its cases; it has to succeed."""
    monkeypatch.chdir(workshop.folder)
    monkeypatch.setenv("DLOJZ_RUNS", str(workshop.folder / "runs"))

    def asked(command: str) -> list[str]:
        if command.startswith("dlojz compare"):
            asked(TRAINED)
        for case in workshop.cases(command):
            if case not in workshop.answers:
                code = main(shlex.split(case)[1:])
                printed = capfd.readouterr()
                assert code == DONE, f"{case}: {printed.err}"
                workshop.answers[case] = printed.out
        return [workshop.answers[case] for case in workshop.cases(command)]

    return asked


def has(answer: Any, field: str) -> bool:
    """Whether a JSON answer has a field: `a.b` within `a`, `a[].b` in one of a list."""
    step, _, deeper = field.partition(".")
    name = step.removesuffix("[]")
    if name:
        if not isinstance(answer, dict) or name not in answer:
            return False
        answer = answer[name]
    if step.endswith("[]"):
        return isinstance(answer, list) and any(has(element, deeper) for element in answer)
    return not deeper or has(answer, deeper)


def test_has_finds_fields_in_lists_and_misses_those_that_are_not_there() -> None:
    answer = {"a": [{"b": None}, {"c": {"d": 0}}], "e": []}
    assert all(has(answer, field) for field in ("a", "a[].b", "a[].c.d", "e")) and has([{"b": 1}], "[].b")
    assert not any(has(answer, field) for field in ("b", "a.b", "a[].d", "e[].b", "a[].b.c"))


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.where)
def test_skill_commands_answer_with_the_fields_that_their_text_names(block: Block, ask: Ask) -> None:
    answers = []
    for command in block.commands:
        if command not in MORE_TRAININGS:
            printed = ask(command)
            answers += [json.loads(text) for text in printed if command.partition(" -- ")[0].endswith(" --json")]
    unknown = [field for field in block.fields if not any(has(answer, field) for answer in answers)]
    assert unknown == []


@pytest.mark.nightly
@pytest.mark.parametrize("command", MORE_TRAININGS)
def test_skill_commands_that_train_once_more_succeed(command: str, ask: Ask) -> None:
    assert json.loads(ask(command)[0])["status"] == "completed"


@pytest.mark.parametrize("name", TEXTS)
def test_skill_texts_name_commands_and_options_that_exist(name: str) -> None:
    fenced = [command for block in BLOCKS if block.where.startswith(f"{name}:") for command in block.commands]
    inline = INLINE.findall(TEXTS[name])
    assert inline and (fenced or name in TUTORS)
    actions = {action.name for action in labs_command.actions}
    for line in (*fenced, *inline):
        subcommand, *words = line.split()[1:]
        assert subcommand in SUBCOMMANDS, line
        if subcommand == "labs" and words:
            subcommand = f"labs {words[0]}"
            assert subcommand in actions, line
        if subcommand == "skill" and words:
            assert words[0] in read_skills(), line
        spellings = {spelling for flag in verb_of(subcommand).options for spelling in flag.spellings}
        assert {*options_in(line)} <= spellings | {"--help"}, line


@pytest.mark.parametrize("name", TEXTS)
def test_skill_texts_have_the_front_matter_that_assistants_read(name: str) -> None:
    head = re.match(r"---\nname: (.+)\ndescription: (.+)\n---\n\n# .+ // .+\n", TEXTS[name])
    assert head is not None and head[1] == f"dlojz-{name.partition('.')[0]}"
    # Limits of Agent Skills (agentskills.io/specification): 64 and 1024 characters, no colon that YAML would read.
    assert len(head[1]) <= 64 and re.fullmatch(r"[a-z0-9-]+", head[1])
    assert 100 < len(head[2]) <= 1024 and ": " not in head[2]


@pytest.mark.parametrize("name", sorted({*TEXTS} - {*TUTORS}))
def test_skill_texts_of_researchers_say_what_is_unknown_and_what_not_to_claim(name: str) -> None:
    text = " ".join(TEXTS[name].replace("**", "").split())
    headings = re.findall(r"^## (.+)$", TEXTS[name], re.MULTILINE)
    assert headings[0] == "How to read any answer" and headings[-2:] == ["How to say it", "What not to claim"]
    assert "A field that is `null`, or missing, is unknown" in text and "never 0" in text and "xit code" in text


@pytest.mark.parametrize("name", TUTORS)
def test_skill_of_the_tutor_holds_no_solution(name: str) -> None:
    text = TEXTS[name]
    assert "```" not in text and "def " not in text and "return " not in text and "import " not in text
    solved = set()
    for path in sorted((ROOT / "solutions").glob("[0-9][0-9]_*.py")):
        for part in re.findall(r"### BEGIN SOLUTION\n(.*?)### END SOLUTION", path.read_text("utf-8"), re.DOTALL):
            solved |= {line.strip() for line in part.splitlines() if len(line.strip()) > 12}
    assert len(solved) > 300
    assert [line for line in solved if line in text] == []


def test_skill_of_the_tutor_is_the_same_in_both_languages() -> None:
    english, french = (TEXTS[name] for name in TUTORS)
    for shape in (r"^## ", r"^- ", r"^\d\. ", r"`dlojz[ /][\w-]+(?: [a-z]+\b)?", r"`lab\.\w+"):
        counts = [len(re.findall(shape, text, re.MULTILINE)) for text in (english, french)]
        assert counts[0] == counts[1] > 0, shape


def test_skill_command_lists_prints_and_writes_the_texts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["skill"]) == DONE
    listed = capfd.readouterr().out
    assert all(re.search(rf"^{name} ", listed, re.MULTILINE) for name in read_skills()) and "Will it fit?" in listed
    assert main(["skill", "memory"]) == DONE
    assert capfd.readouterr().out == TEXTS["memory.md"]
    assert main(["skill", "--write", str(tmp_path), "--json"]) == DONE
    document = json.loads(capfd.readouterr().out)
    assert [entry["name"] for entry in document] == [*read_skills()]
    for entry in document:
        file = Path(entry["file"])
        assert file == tmp_path / f"dlojz-{entry['name']}" / "SKILL.md"
        assert file.read_text("utf-8") == entry["text"] == TEXTS[f"{entry['name']}.md"]
    assert main(["skill", "trace", "--write", str(tmp_path / "new")]) == DONE
    assert [path.parent.name for path in (tmp_path / "new").glob("*/SKILL.md")] == ["dlojz-trace"]


def test_skill_command_speaks_french_and_refuses_a_text_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    use_language("fr")
    assert main(["skill"]) == DONE and "Est-ce que ça tient ?" in capfd.readouterr().out
    assert main(["skill", "tutor"]) == DONE
    assert capfd.readouterr().out == TEXTS["tutor.fr.md"]
    assert main(["skill", "memroy"]) == REFUSED
    assert "peut-être 'memory'" in capfd.readouterr().err


def test_agents_page_is_short_and_leaves_the_table_to_contributing() -> None:
    page = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 120 and "CONTRIBUTING.md#the-house" in page
    assert "\n|" not in page
