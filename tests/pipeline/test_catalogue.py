"""The catalogue: names, aliases, what an entry tells, and that building chooses what was asked for."""

import subprocess
import sys

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import LANGUAGES, language, use_language
from dlojz.pipeline.schedule import Costs
from dlojz.pipeline.schedule_catalogue import ALIASES, ENTRIES, SCHEDULES, build, entry
from dlojz.pipeline.simulator import peak_activations

ASKED_FOR = (
    "naive gpipe 1f1b eager-1f1b interleaved looped-bfs interleaved-zb chimera zb-h1 zb-h2 zb-1p zb-2p zb-v dualpipe "
    "dualpipe-v hanayo terapipe bpipe pipedream pipedream-2bw pipemare ampnet"
)


def test_every_schedule_is_there_once() -> None:
    assert sorted(SCHEDULES) == sorted(ASKED_FOR.split())
    assert len(ENTRIES) == len(SCHEDULES)
    assert not set(ALIASES) & set(SCHEDULES)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        *ALIASES.items(),
        ("DAPPLE", "1f1b"),
        ("PipeDream_Flush", "1f1b"),
        ("Interleaved1F1B", "interleaved"),
        ("GPipe", "gpipe"),
        ("LoopedBFS", "looped-bfs"),
        ("InterleavedZeroBubble", "interleaved-zb"),
        ("ZBVZeroBubble", "zb-v"),
        ("DualPipeV", "dualpipe-v"),
        ("ZB H1", "zb-h1"),
    ],
)
def test_other_names_lead_to_the_same_schedule(said: str, meant: str) -> None:
    assert entry(said) is SCHEDULES[meant]


def test_build_refuses_an_unknown_name_with_all_names() -> None:
    with pytest.raises(LabError, match="unknown schedule 'gpip': did you mean 'gpipe'") as refusal:
        build("gpip", 4, 8)
    assert all(name in str(refusal.value) for name in SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_entry_speaks_both_languages(name: str) -> None:
    chosen, said = language(), []
    try:
        for each in LANGUAGES:
            use_language(each)
            said.append((SCHEDULES[name].title(), SCHEDULES[name].limits()))
    finally:
        use_language(chosen)
    (title, limit), (titre, limite) = said
    assert title
    assert titre
    assert limit != limite
    assert "'" not in limite, "typographic apostrophes in French"
    assert not limit.endswith(".")
    assert SCHEDULES[name].source


def test_classes_that_torch_ships_are_named_rightly() -> None:
    from torch.distributed.pipelining import schedules

    for one in ENTRIES:
        assert one.torch_class is None or hasattr(schedules, one.torch_class)


def test_even_ranks_are_what_the_schedule_refuses() -> None:
    for one in ENTRIES:
        if one.even_ranks:
            with pytest.raises(LabError, match="even number of ranks"):
                build(one.name, 3, 12)
        else:
            build(one.name, 3, 12)


def test_build_passes_options_on() -> None:
    assert build("interleaved", 2, 4, chunks=3).stages == 6
    assert build("interleaved", 2, 6, group=3).orders != build("interleaved", 2, 6).orders
    # Groups as small as they may be: one micro-batch for each rank.
    assert build("interleaved", 4, 8, group=4).orders == build("interleaved", 4, 8).orders
    assert build("hanayo", 2, 4, waves=2) == build("hanayo", 2, 4, chunks=4)
    assert build("hanayo", 2, 4).stages == 4
    assert build("zb-v", 2, 4, chunks=2) == build("zb-v", 2, 4)
    assert build("gpipe", 2, 4, lifo=True) != build("gpipe", 2, 4)
    assert build("terapipe", 2, 4).token_slices == 4
    assert build("terapipe", 2, 4, token_slices=2).token_slices == 2
    assert build("pipedream", 2, 4, stashing="vertical").asynchronous
    slow = Costs(backward_input=3, backward_weight=3)
    assert build("hanayo", 4, 8, costs=slow).orders != build("hanayo", 4, 8, costs=Costs(backward=0.5)).orders


def test_build_keeps_the_automatic_schedules_to_p_and_2p() -> None:
    assert max(peak_activations(build("zb-1p", 4, 12))) <= 4
    assert 4 < max(peak_activations(build("zb-2p", 4, 12))) <= 8
    assert max(peak_activations(build("zb-2p", 4, 12, memory_limit=6))) <= 6
    heavy = Costs(kept_for_input=3, kept_for_weight=1)
    assert max(peak_activations(build("zb-1p", 4, 12, costs=heavy), heavy)) <= 4 * 3


def test_schedule_catalogue_loads_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys; from dlojz.pipeline.schedule_catalogue import SCHEDULES, build\n"
        "[build(name, 4, 8) for name in SCHEDULES]\n"
        "print([name for name in ('torch', 'matplotlib', 'deepspeed', 'ortools') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
