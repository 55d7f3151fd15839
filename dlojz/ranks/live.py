"""Pool of live ranks: start them, send them a cell with its values, collect their answers, time out.

A cell ends within its limit and a few seconds, whatever it does, and leaves ranks on which the next one can run; a rank
that still lives keeps its variables. All ranks end with the program.

`payload` packs what `--with NAME` sends along: the source of what was written in the notebook, the module's name of
what can be imported, a copy of any other value, and the functions, classes and modules that a named function mentions.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import inspect
import linecache
import queue
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from dlojz.base.display_hook import in_notebook, wanted
from dlojz.base.language import Sentences, language, one_of, say
from dlojz.base.machine import patience
from dlojz.ranks import rank_setup, thread_ranks
from dlojz.ranks.cluster import Event, LocalCluster, RankCluster
from dlojz.ranks.rank_setup import LIVE_KEY, RanksRefused, RanksToDo, number_of_ranks, refuse_too_many
from dlojz.ranks.show import (
    CellAnswer,
    CellFailure,
    CellOutput,
    LiveOutput,
    RanksError,
    RankStatus,
    must_rejoin,
    still_to_do,
    unknown_names,
)

phrase = Sentences(Path(__file__).parent / "data" / "live.md")

GRACE_S = (1.0, 2.0)
"""Seconds after the first interrupt (a late rank hears nothing yet) and after the second, each times `patience()`; then
the rank is killed."""
_LOOK_EVERY_S = 0.2
_SHORTEST_PAUSE_S = 0.0002
_LONGEST_PAUSE_S = 0.005
_QUESTION_S = 60.0
_KILLS = 5


class RankPool:
    """Pool of ranks that are processes: initialise them, join them in one group, call them, interrupt them.

    Args:
        cluster: where they live; started.
    """

    def __init__(self, cluster: RankCluster, size: int) -> None:
        self.size = self._processes = size
        self._cluster = cluster
        self._members: dict[int, str] = {}
        self._torn = False
        self._cells = 0

    _runner = staticmethod(rank_setup.run)

    def make_ready(self) -> None:
        """Initialise ranks that are new, and join all in one group where it is not whole.

        Raises:
            RanksRefused: if a rank does not answer.
        """
        while (event := self._next_event(0)) is not None:  # old ones: who has died meanwhile has been replaced
            if event.kind == "failed":
                raise RanksRefused(all_lost())
        names = self._cluster.names()
        fresh = [rank for rank, name in names.items() if self._members.get(rank) != name]
        if not fresh and not self._torn:
            return
        self._torn = True
        self._join(names, fresh)
        self._members, self._torn = names, False

    def _join(self, names: Mapping[int, str], fresh: Sequence[int]) -> None:
        """Initialise the fresh processes; make the group of all anew: it cannot take in a rank."""
        init_arguments = {rank: (rank, self.size, *self._cluster.place(rank)) for rank in fresh}
        self._ask({rank: (names[rank], rank_setup.init_rank, *init_arguments[rank]) for rank in fresh})
        meeting = self._cluster.meeting_point()
        self._ask({rank: (name, rank_setup.init_group, *meeting) for rank, name in names.items()})

    def fetch(self, name: str) -> list[dict[str, Any]]:
        """Fetch a variable from every rank (see `rank_setup.fetch`)."""
        return self.ask(rank_setup.fetch, name)

    def describe(self) -> list[dict[str, Any]]:
        """Describe every rank (see `rank_setup.describe`)."""
        return self.ask(rank_setup.describe)

    def ask(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function on every rank; return the answers, by rank.

        Raises:
            RanksRefused: if one does not answer.
        """
        self.make_ready()
        answers = self._ask({rank: (name, function, *arguments) for rank, name in self._members.items()})
        return [answers[rank] for rank in range(self._processes)]

    def run(
        self,
        code: str,
        limit_s: float,
        packed: Mapping[str, Any],
        show_live: Callable[[Sequence[CellAnswer]], None] | None = None,
    ) -> list[CellAnswer]:
        """Run a cell; return the answers of all ranks, by rank, failures included.

        Args:
            limit_s: seconds after which ranks that still run are interrupted.
            packed: what is sent along (see `payload`).
            show_live: called meanwhile, several times a second, with the output of all ranks so far.

        Raises:
            RanksRefused: if no rank can be reached any more.
        """
        self.make_ready()
        self._cells += 1
        self._torn = True  # until all have answered
        arguments = (code, self._cells, limit_s, language(), dict(packed))
        with _interrupts_become_events(self._cluster.events):
            live = show_live is not None
            tickets = {
                self._cluster.ask(name, self._runner, *arguments, live=live): rank
                for rank, name in self._members.items()
            }
            answers = self._collect(tickets, limit_s, show_live)
        self._torn = must_rejoin(answers)
        # A step of SLURM starts anew as a whole, and with it the variables of the ranks that lived.
        if not self._cluster.replaces_single_ranks and not all(answer.kept for answer in answers):
            answers = [replace(answer, kept=False) for answer in answers]
        return answers

    def _collect(
        self, tickets: Mapping[int, int], limit_s: float, show_live: Callable[[Sequence[CellAnswer]], None] | None
    ) -> list[CellAnswer]:
        answers: dict[int, list[CellAnswer]] = {}  # of the ranks of each process
        rank_of = {name: rank for rank, name in self._members.items()}
        interruption: CellFailure | None = None  # of the ranks that are interrupted
        signals: list[int] = []
        deadline_s = time.monotonic() + limit_s
        while len(answers) < self._processes:
            event = self._next_event(deadline_s - time.monotonic())
            if event is not None and event.kind == "failed":
                raise RanksRefused(all_lost())
            if event is not None and event.kind == "answer" and event.ticket in tickets:
                rank = tickets[event.ticket]
                before = self._so_far(rank)
                values = event.value.get("ranks") or [event.value] * len(before)
                answers[rank] = [_answer(*pair, interruption) for pair in zip(before, values, strict=True)]
            elif event is not None and event.kind == "died" and event.name in rank_of:
                rank = rank_of[event.name]
                reason = interruption if signal.SIGKILL in signals else None
                answers[rank] = [_ended(before, event.value, reason) for before in self._so_far(rank)]
            elif show_live is not None:
                show_live(self._flat({rank: answers.get(rank) or self._so_far(rank) for rank in self._members}))
            by_student = event is not None and event.kind == "interrupt"
            if by_student or time.monotonic() > deadline_s:
                kind = "stopped" if by_student else "limit"
                interruption = interruption or CellFailure(
                    "KeyboardInterrupt", kind=kind, limit_s=0 if by_student else limit_s
                )
                if signals.count(signal.SIGKILL) > _KILLS:  # the supervisor that should report it is gone
                    raise RanksRefused(all_lost())
                # The student's second interrupt kills at once; the limit gives two SIGINT their time first (GRACE_S).
                insists = by_student and bool(signals)
                signals.append(signal.SIGKILL if insists or len(signals) == len(GRACE_S) else signal.SIGINT)
                deadline_s = time.monotonic() + GRACE_S[min(len(signals), len(GRACE_S)) - 1] * patience()
                for rank in self._members.keys() - answers.keys():
                    self._cluster.signal(rank, self._members[rank], signals[-1])
        return self._flat(answers)

    def _flat(self, answers: Mapping[int, list[CellAnswer]]) -> list[CellAnswer]:
        return [answer for process in range(self._processes) for answer in answers[process]]

    def _so_far(self, process: int) -> list[CellAnswer]:
        """Return what the ranks of a process have published while the cell ran."""
        return [_published(process, self._cluster.published(self._members[process]).get(LIVE_KEY, {}))]

    def _next_event(self, timeout_s: float) -> Event | None:
        """Return the next event; None if there is none within `timeout_s` and `_LOOK_EVERY_S` seconds.

        It polls, since `SimpleQueue.get(timeout=…)` of CPython 3.11 waits for ever where its time runs out between two
        of its steps (a negative rest means no limit), and no other queue can be filled from a signal's handler.
        """
        deadline_s = time.monotonic() + min(timeout_s, _LOOK_EVERY_S)
        pause_s = _SHORTEST_PAUSE_S
        while True:
            with suppress(queue.Empty):
                return self._cluster.events.get_nowait()
            if time.monotonic() >= deadline_s:
                return None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _ask(self, questions: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        tickets = {self._cluster.ask(*question): rank for rank, question in questions.items()}
        names = {question[0] for question in questions.values()}
        answers: dict[int, Any] = {}
        deadline_s = time.monotonic() + _QUESTION_S
        while len(answers) < len(questions):
            event = self._next_event(deadline_s - time.monotonic())
            if event is not None and event.kind == "answer" and event.ticket in tickets:
                answers[tickets[event.ticket]] = event.value
                if isinstance(event.value, dict) and "failure" in event.value:
                    raise RanksRefused(_no_answer(tickets[event.ticket], event.value["failure"]))
            elif event is not None and (event.kind == "failed" or (event.kind == "died" and event.name in names)):
                self._torn = True
                raise RanksRefused(all_lost() if event.kind == "failed" else _no_answer(-1, ""))
            elif time.monotonic() > deadline_s:
                self._torn = True
                raise RanksRefused(_no_answer(min(questions.keys() - answers.keys()), ""))
        return answers


class ThreadPool(RankPool):
    """Pool of ranks that are threads of one process; see `thread_ranks`.

    Args:
        cluster: with one process; started.
    """

    def __init__(self, cluster: RankCluster, size: int) -> None:
        super().__init__(cluster, 1)
        self.size = size

    _runner = staticmethod(thread_ranks.run)

    def _join(self, names: Mapping[int, str], fresh: Sequence[int]) -> None:
        self._ask({rank: (names[rank], thread_ranks.init_threads, self.size) for rank in fresh})

    def fetch(self, name: str) -> list[dict[str, Any]]:
        """Fetch a variable from every rank."""
        (answers,) = self.ask(thread_ranks.fetch, name)
        return list(answers)

    def describe(self) -> list[dict[str, Any]]:
        """Describe every rank."""
        (answers,) = self.ask(thread_ranks.describe)
        return list(answers)

    def _so_far(self, process: int) -> list[CellAnswer]:
        outputs = self._cluster.published(self._members[process]).get(LIVE_KEY, {}).get("ranks", [{}] * self.size)
        return [_published(rank, output) for rank, output in enumerate(outputs)]


def _published(rank: int, output: Mapping[str, Any]) -> CellAnswer:
    return CellAnswer(rank, tuple(output.get("parts", ())), bool(output.get("cut", False)))


def _ended(so_far: CellAnswer, exit_code: int | None, interruption: CellFailure | None) -> CellAnswer:
    """Return the answer that stands for a process that ended; `interruption` if it was killed since it did not stop."""
    interruption = interruption or CellFailure("")
    failure = CellFailure(interruption.name, kind="exit", exit_code=exit_code, limit_s=interruption.limit_s)
    return replace(so_far, trouble=failure, kept=False)


def _answer(so_far: CellAnswer, value: Mapping[str, Any], interruption: CellFailure | None) -> CellAnswer:
    """Return what a rank sent as its answer; an interrupt gets the reason `interruption` it was sent."""
    if "failure" in value:
        return replace(so_far, trouble=CellFailure("", str(value["failure"])), torn=True)
    trouble = None
    if value["error"] is not None:
        error = value["error"]
        lines = tuple((number, text, function) for number, text, function in error["lines"])
        trouble = CellFailure(error["name"], error["message"], error["kind"], lines)
        # The rank saw a KeyboardInterrupt; that it came from the student or from the limit is known here alone.
        if interruption is not None and trouble.name == interruption.name:
            trouble = replace(interruption, lines=lines)
    return CellAnswer(
        so_far.rank, tuple(value["parts"]), value["cut"], trouble, value["last"], value["torn"], dict(value["counts"])
    )


def all_lost() -> str:
    """Return the message for ranks whose supervisor is gone."""
    return phrase("all ranks lost")


def _no_answer(rank: int, reason: str) -> str:
    who = say(en=f"rank {rank}" if rank >= 0 else "a rank", fr=f"le rang {rank}" if rank >= 0 else "un rang")
    cause = f" ({reason})" if reason else ""
    return phrase("no answer", who=who, cause=cause)


@contextmanager
def _interrupts_become_events(events: queue.SimpleQueue[Event]) -> Iterator[None]:
    """Turn an interrupt of the notebook into an event while ranks run."""
    # Python lets only the main thread set a handler.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handler = signal.signal(signal.SIGINT, lambda *_: events.put(Event("interrupt")))
    try:
        yield
    finally:
        with suppress(TypeError):  # None where it was not set from Python
            signal.signal(signal.SIGINT, previous_handler)


# Names that every rank defines itself.
_OWN = frozenset({"rank", "world_size", "torch", "dist", "device", "ranks", "get_ipython"})


def payload(names: Iterable[str], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Pack variables of the notebook for the ranks.

    Returns:
        `modules` (name to module and attribute), `sources` (in the order in which they must run) and `values`.

    Raises:
        RanksRefused: if a name is unknown or cannot be sent.
    """
    packed: dict[str, Any] = {"modules": {}, "sources": [], "values": {}}
    packed_names: set[str] = set()
    names = list(dict.fromkeys(names))
    for name in names:
        if name not in namespace:
            raise RanksRefused(one_of(say(en="name", fr="nom"), name, _visible(namespace)))
        _pack(name, namespace, packed, packed_names, names)
    return packed


def _visible(namespace: Mapping[str, Any]) -> list[str]:
    hidden = {"In", "Out", "exit", "quit", "open"} | _OWN
    return [name for name in namespace if not name.startswith("_") and name not in hidden]


def _pack(
    name: str, namespace: Mapping[str, Any], packed: dict[str, Any], packed_names: set[str], requested_names: list[str]
) -> None:
    if name in packed_names or name not in namespace:
        return
    packed_names.add(name)
    variable = namespace[name]
    if isinstance(variable, ModuleType):
        packed["modules"][name] = (variable.__name__, "")
    elif isinstance(variable, type | FunctionType) and variable.__module__ == "__main__":
        source = _source(name, variable)
        # What a definition mentions is packed before it: the sources run in this order.
        for mentioned in sorted(_mentioned(source)):
            _pack(mentioned, namespace, packed, packed_names, requested_names)
        # An alias: it is defined under its own name, then bound to the other one.
        packed["sources"].append(
            source if variable.__name__ in (name, "<lambda>") else f"{source}\n{name} = {variable.__name__}"
        )
    elif _importable(variable):
        packed["modules"][name] = (variable.__module__, variable.__qualname__)
    elif name in requested_names:
        _refuse_what_cannot_travel(name, variable)
        packed["values"][name] = variable


def _importable(variable: Any) -> bool:
    module = sys.modules.get(getattr(variable, "__module__", None) or "")
    # Followed down from the module, as the rank will import it.
    attribute: Any = module
    for part in str(getattr(variable, "__qualname__", "")).split("."):
        attribute = getattr(attribute, part, None)
    return module is not None and module.__name__ != "__main__" and attribute is variable and callable(variable)


def _mentioned(source: str) -> set[str]:
    """Return the names that a piece of source mentions, but for Python's and the ranks' own."""
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    return {name for name in names if not hasattr(builtins, name)} - _OWN


def _source(name: str, definition: Any) -> str:
    try:
        source = _class_source(definition) if isinstance(definition, type) else inspect.getsource(definition)
        source = textwrap.dedent(source)
        if isinstance(definition, FunctionType) and definition.__closure__:
            raise OSError("a function made by a function")
        defined = {
            target
            for node in ast.parse(source).body
            for target in (
                [node.name]
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                else [target.id for target in node.targets if isinstance(target, ast.Name)]
                if isinstance(node, ast.Assign)
                else []
            )
        }
        if not defined & {name, definition.__name__}:
            raise OSError("not a definition")
    except (OSError, TypeError, SyntaxError):
        raise RanksRefused(
            en=f"{name} cannot be sent to the ranks: its source is not known or not whole. Define it with def or "
            "class in a separate cell, or inside the %%ranks cell.",
            fr=f"{name} ne peut pas être envoyé aux rangs : son code source n’est pas connu ou pas entier. "
            "Définissez-le par def ou class dans une cellule à part, ou dans la cellule %%ranks.",
        ) from None
    return source


def _class_source(notebook_class: type) -> str:
    """Return the source of a class of a cell, found through one of its methods: `inspect` looks for a file."""
    # An `autograd.Function` has static methods only.
    methods = [getattr(value, "__func__", value) for value in vars(notebook_class).values()]
    for method in (value for value in methods if isinstance(value, FunctionType)):
        lines = linecache.getlines(method.__code__.co_filename)
        for node in ast.walk(ast.parse("".join(lines))):
            if isinstance(node, ast.ClassDef) and node.name == notebook_class.__name__:
                # Decorators stand above the line of `class`.
                first_line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                return "".join(lines[first_line - 1 : node.end_lineno])
    raise OSError("no method tells where the class was written")


def _refuse_what_cannot_travel(name: str, variable: Any) -> None:
    from ipyparallel.serialize import serialize_object

    try:
        if type(variable).__module__ == "__main__" or isinstance(variable, FunctionType):
            raise TypeError(f"{type(variable).__name__} is a class of the notebook")
        serialize_object(variable)
    except Exception as error:
        raise RanksRefused(
            en=f"{name} ({type(variable).__name__}) cannot be sent to the ranks: {error}. Make it inside the %%ranks "
            "cell.",
            fr=f"{name} ({type(variable).__name__}) ne peut pas être envoyé aux rangs : {error}. Créez-le dans la "
            "cellule %%ranks.",
        ) from None


LIMIT_S = 60.0


class Ranks:
    """Live ranks of a notebook or of a program.

    Args:
        size: number of ranks to start at once; without it, `start` does.
        force: whether to start more than the machine bears.
        threads: whether they are threads of one process.
        namespace: the notebook's variables, named in a hint where a rank does not know a name.

    Example:
        with Ranks(4) as ranks:
            ranks.run("x = torch.ones(1) * rank; dist.all_reduce(x)")
            ranks["x"]
    """

    def __init__(
        self,
        size: int | None = None,
        *,
        force: bool = False,
        threads: bool = False,
        namespace: Mapping[str, Any] | None = None,
    ) -> None:
        self._cluster: RankCluster | None = None
        self._pool: RankPool | None = None
        self._namespace: Mapping[str, Any] = {} if namespace is None else namespace
        self.advice: Callable[[Iterable[object]], str] = lambda _: ""
        """What to say, of the values that a cell is sent, where it fails."""
        self.threads = False
        """Whether the ranks are threads of one process."""
        if size is not None:
            self.start(size, force=force, threads=threads)

    def start(
        self, size: int, *, force: bool = False, threads: bool = False, progress: Callable[[], None] = lambda: None
    ) -> None:
        """Start `size` ranks; others that run end first, with their variables.

        Args:
            size: number of ranks, 1 to 256.
            force: whether to start more than the machine bears.
            threads: whether they are threads of one process on this machine, one of which runs at a time.

        Raises:
            RanksRefused: if the number is illegal, or more than the machine bears.
            LabError: if they do not start.
        """
        size = number_of_ranks(size)
        if not force and not threads:
            refuse_too_many(size)
        try:
            if self._cluster is not None and self.threads != threads:
                self.stop()
            if self._cluster is None:
                self._cluster = LocalCluster() if threads else _cluster()
                atexit.register(self.stop)
            # No pool meanwhile: where the start fails, none seems to run.
            self._pool = None
            self.threads = threads
            self._cluster.start(1 if threads else size, progress)
            pool = (ThreadPool if threads else RankPool)(self._cluster, size)
            pool.make_ready()
            self._pool = pool
        except BaseException:  # an interrupt too
            self.stop()
            raise

    def stop(self) -> None:
        """End all ranks and what they have started; their variables are lost."""
        cluster, self._cluster, self._pool = self._cluster, None, None
        atexit.unregister(self.stop)
        if cluster is not None:
            cluster.stop()

    def restart(self, *, progress: Callable[[], None] = lambda: None) -> None:
        """Replace all ranks by fresh ones, without variables."""
        self.start(self._running().size, force=True, threads=self.threads, progress=progress)

    @property
    def size(self) -> int:
        """Number of ranks; 0 where none is running."""
        return self._pool.size if self._pool else 0

    def __len__(self) -> int:
        return self.size

    def __bool__(self) -> bool:
        return self._pool is not None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        if not self:
            return phrase("no ranks running")
        return say(en=f"ranks 0 to {self.size - 1}", fr=f"rangs 0 à {self.size - 1}")

    def run(
        self, code: str, *, limit_s: float = LIMIT_S, packed: Mapping[str, Any] | None = None, hint: str = ""
    ) -> None:
        """Run code on every rank and show the output; a notebook shows it while it runs, too.

        Args:
            limit_s: seconds after which ranks that still run are interrupted.
            packed: what is sent along (see `payload`).
            hint: the last sentence of an error.

        Raises:
            RanksRefused: if no ranks are running.
            RanksToDo: if it needs an exercise that is still to do.
            RanksError: if it failed on a rank.
        """
        # None where a notebook is built or compared: its stored output is made by one message.
        live = LiveOutput() if in_notebook() and wanted(None) else None
        answers = self.execute(code, limit_s=limit_s, packed=packed, show_live=live)
        if live is None or not live.settle(answers):
            show(CellOutput(answers))
        if to_do := still_to_do(answers):
            raise RanksToDo(to_do)
        if any(answer.trouble for answer in answers):
            raise RanksError(answers, self._hint(answers) or hint)

    def execute(
        self,
        code: str,
        *,
        limit_s: float = LIMIT_S,
        packed: Mapping[str, Any] | None = None,
        show_live: Callable[[Sequence[CellAnswer]], None] | None = None,
    ) -> list[CellAnswer]:
        """Run code on every rank; return the answers, by rank, failures included.

        Args:
            show_live: called meanwhile, several times a second, with the output of all ranks so far.

        Raises:
            RanksRefused: if no ranks are running.
        """
        pool = self._running()
        try:
            return pool.run(code, limit_s, packed or {}, show_live)
        except RanksRefused as refused:
            if str(refused) == all_lost():
                self.stop()
            raise

    def __getitem__(self, name: str) -> list[Any]:
        return self.pull(name)[name]

    def pull(self, *names: str) -> dict[str, list[Any]]:
        """Fetch the values of variables, one per rank; tensors come back in main memory, without their history.

        Raises:
            RanksRefused: if a rank does not know the name, or the value cannot be brought back.
        """
        pool = self._running()
        return {name: [_value(name, *item) for item in enumerate(pool.fetch(name))] for name in names}

    def status(self) -> RankStatus:
        """Table of the ranks: process, device, memory and number of variables."""
        return RankStatus(self._pool.describe() if self._pool else [])

    def _running(self) -> RankPool:
        if self._pool is None:
            raise RanksRefused(phrase("no ranks running"))
        return self._pool

    def _hint(self, answers: list[CellAnswer]) -> str:
        missing = sorted(name for name in unknown_names(answers) if name in self._namespace)
        if not missing:
            return ""
        names = ",".join(missing)
        return phrase("names of the notebook", missing=", ".join(missing), names=names)


def _cluster() -> RankCluster:
    from dlojz.ranks.cluster import SlurmCluster, inside_allocation

    return SlurmCluster() if inside_allocation() else LocalCluster()


def show(output: CellOutput | RankStatus) -> None:
    """Show it in the notebook, or print it where there is none; nothing where it is empty."""
    from IPython.core.getipython import get_ipython
    from IPython.display import display

    if not output:
        return
    if get_ipython() is None:
        print(output)
    else:
        display(output)


def _value(name: str, rank: int, answer: Mapping[str, Any]) -> Any:
    if "problem" not in answer:
        return answer["value"]
    if answer["problem"] == "unknown":
        description = say(en=f"name on rank {rank}", fr=f"nom sur le rang {rank}")
        # After a cell that failed, what it should have left is missing: its name is right.
        unmade = phrase("run the cell to its end")
        raise RanksRefused(one_of(description, name, answer["names"]) + unmade)
    raise RanksRefused(
        en=f"{name} cannot be brought back from rank {rank} ({answer['type']}: {answer['problem']}). Print it in a "
        "%%ranks cell, or bring back what it holds: numbers, strings, tensors, lists, dictionaries.",
        fr=f"{name} ne peut pas être rapporté du rang {rank} ({answer['type']} : {answer['problem']}). Affichez-le "
        "dans une cellule %%ranks, ou rapportez ce qu’il contient : nombres, chaînes, tenseurs, listes, "
        "dictionnaires.",
    )
