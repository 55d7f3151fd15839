"""Pool of live ranks: start them, send them a cell with its values, collect their answers, time out.

The ranks at work: seated, joined in one group, asked, and stopped when they take too long.

A cell ends within its limit and a few seconds, whatever it does, and leaves ranks on which the next one can run; a rank
that still lives keeps its variables.

What goes along with a cell: `--with NAME` takes a function, a class or a value of the notebook to the ranks.

The ranks get source text for what was written in the notebook, the name of a module for what can be imported, and a
copy for any other value; nothing is sent that was not named, but what a named function needs to run: the functions,
classes and modules it mentions.

Ranks that live beside the notebook: cells run on all of them, variables stay there, values can be looked at.

Nothing starts before it is asked for, and all that was started ends with the program.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

from dlojz.base.language import language, one_of, say
from dlojz.ranks import rank_setup
from dlojz.ranks.cluster import Event, LocalCluster, RankCluster
from dlojz.ranks.rank_setup import RanksRefused, number_of_ranks, refuse_too_many
from dlojz.ranks.show import CellAnswer, Columns, RanksError, Status, Trouble, must_rejoin, still_to_do, unknown_names

GRACE_S = (1.0, 2.0)
"""Patience after the first interrupt (a rank that is late hears nothing yet) and after the second; then it is ended."""
_LOOK_EVERY_S = 0.2
_SHORTEST_PAUSE_S = 0.0002
_LONGEST_PAUSE_S = 0.005
_QUESTION_S = 60.0
_KILLS = 5


class Crew:
    """A number of ranks in a cluster.

    Args:
        cluster: where they live; started.
        size: number of ranks.
    """

    def __init__(self, cluster: RankCluster, size: int) -> None:
        self.size = size
        self._cluster = cluster
        self._seated: dict[int, str] = {}
        self._torn = False
        self._cells = 0

    def make_ready(self) -> None:
        """See that every rank is there and that all are members of one whole group.

        Raises:
            Refused: if that cannot be had.
        """
        while (event := self._next_event(0)) is not None:  # old ones: who has died meanwhile has been replaced
            if event.kind == "failed":
                raise RanksRefused(all_lost())
        names = self._cluster.names()
        fresh = [rank for rank, name in names.items() if self._seated.get(rank) != name]
        if not fresh and not self._torn:
            return
        self._torn = True
        places = {rank: (rank, self.size, *self._cluster.place(rank)) for rank in fresh}
        self._ask({rank: (names[rank], rank_setup.sit, *places[rank]) for rank in fresh})
        meeting = self._cluster.meeting_point()
        self._ask({rank: (name, rank_setup.join, *meeting) for rank, name in names.items()})
        self._seated, self._torn = names, False

    def ask(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What every rank answers to a question, by rank.

        Raises:
            Refused: if one does not answer.
        """
        self.make_ready()
        answers = self._ask({rank: (name, function, *arguments) for rank, name in self._seated.items()})
        return [answers[rank] for rank in range(self.size)]

    def run(self, code: str, limit_s: float, belongings: Mapping[str, Any]) -> list[CellAnswer]:
        """Run a cell and return what each rank says, by rank, also where it did not end well.

        Args:
            code: of the cell.
            limit_s: seconds after which ranks that still run are interrupted.
            belongings: what goes along (see `carry`).

        Raises:
            Refused: if no rank can be reached any more.
        """
        self.make_ready()
        self._cells += 1
        self._torn = True  # until all have answered
        arguments = (code, self._cells, limit_s, language(), dict(belongings))
        with _interrupts_become_events(self._cluster.events):
            tickets = {self._cluster.ask(name, rank_setup.run, *arguments): rank for rank, name in self._seated.items()}
            answers = self._collect(tickets, limit_s)
        self._torn = must_rejoin(answers)
        if not self._cluster.replaces_single_ranks and not all(answer.kept for answer in answers):
            answers = [replace(answer, kept=False) for answer in answers]
        return answers

    def _collect(self, tickets: Mapping[int, int], limit_s: float) -> list[CellAnswer]:
        answers: dict[int, CellAnswer] = {}
        rank_of = {name: rank for rank, name in self._seated.items()}
        # Why ranks are being stopped, once they are: a trouble that lacks only what each has to say.
        why: Trouble | None = None
        signals: list[int] = []
        deadline_s = time.monotonic() + limit_s
        while len(answers) < self.size:
            event = self._next_event(deadline_s - time.monotonic())
            if event is not None and event.kind == "failed":
                raise RanksRefused(all_lost())
            if event is not None and event.kind == "answer" and event.ticket in tickets:
                rank = tickets[event.ticket]
                answers[rank] = _answer(rank, event.value, why)
            elif event is not None and event.kind == "died" and event.name in rank_of:
                rank = rank_of[event.name]
                answers[rank] = _ended(rank, event.value, why if signal.SIGKILL in signals else None)
            by_student = event is not None and event.kind == "interrupt"
            if by_student or time.monotonic() > deadline_s:
                kind = "stopped" if by_student else "limit"
                why = why or Trouble("KeyboardInterrupt", kind=kind, limit_s=0 if by_student else limit_s)
                if signals.count(signal.SIGKILL) > _KILLS:  # who should tell of it is gone, or deaf
                    raise RanksRefused(all_lost())
                insists = by_student and bool(signals)
                signals.append(signal.SIGKILL if insists or len(signals) == len(GRACE_S) else signal.SIGINT)
                deadline_s = time.monotonic() + GRACE_S[min(len(signals), len(GRACE_S)) - 1]
                for rank in self._seated.keys() - answers.keys():
                    self._cluster.signal(rank, self._seated[rank], signals[-1])
        return [answers[rank] for rank in range(self.size)]

    def _next_event(self, timeout_s: float) -> Event | None:
        """What has happened meanwhile; None where nothing has after so long, or after a look's time.

        Asked again and again rather than waited for: `SimpleQueue.get(timeout=…)` of CPython 3.11 waits for ever where
        its time runs out between two of its steps (what is left, then negative, means no limit). No other queue can be
        filled from a signal's handler.
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


def _ended(rank: int, exit_code: int | None, why: Trouble | None) -> CellAnswer:
    """The answer that stands for a process that ended; `why` if it was ended because it did not stop."""
    trouble = Trouble("", kind="exit", exit_code=exit_code)
    if why is not None:
        trouble = replace(trouble, name=why.name, limit_s=why.limit_s)
    return CellAnswer(rank, trouble=trouble, kept=False)


def _answer(rank: int, value: Mapping[str, Any], why: Trouble | None) -> CellAnswer:
    """A rank's answer, as the notebook understands it."""
    if "failure" in value:
        return CellAnswer(rank, trouble=Trouble("", str(value["failure"])), torn=True)
    trouble = None
    if value["error"] is not None:
        error = value["error"]
        trouble = Trouble(
            error["name"], error["message"], error["kind"], tuple((n, t, f) for n, t, f in error["lines"])
        )
        if why is not None and trouble.name == why.name:
            trouble = Trouble(why.name, "", why.kind, trouble.lines, limit_s=why.limit_s)
    return CellAnswer(
        rank, tuple(value["parts"]), value["cut"], trouble, value["last"], value["torn"], dict(value["counts"])
    )


def all_lost() -> str:
    """The sentence for ranks whose keeper is gone."""
    return say(
        en="the ranks have ended, all of them, with their variables: start them again, e.g. with %%ranks 4.",
        fr="les rangs se sont tous arrêtés, et leurs variables sont perdues : redémarrez-les, par exemple avec "
        "%%ranks 4.",
    )


def _no_answer(rank: int, why: str) -> str:
    who = say(en=f"rank {rank}" if rank >= 0 else "a rank", fr=f"le rang {rank}" if rank >= 0 else "un rang")
    cause = f" ({why})" if why else ""
    return say(
        en=f"{who} does not answer{cause}: run the cell again, or %ranks restart.",
        fr=f"{who} ne répond pas{cause} : relancez la cellule, ou %ranks restart.",
    )


@contextmanager
def _interrupts_become_events(events: queue.SimpleQueue[Event]) -> Iterator[None]:
    """While ranks run, an interrupt of the notebook is one for them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGINT, lambda *_: events.put(Event("interrupt")))
    try:
        yield
    finally:
        with suppress(TypeError):  # None where it was not set from Python
            signal.signal(signal.SIGINT, former)


# Every rank has its own.
_OWN = frozenset({"rank", "world_size", "torch", "dist", "device", "ranks", "get_ipython"})


def belongings(names: Iterable[str], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """All that goes to the ranks with a cell.

    Args:
        names: of the notebook.
        namespace: of the notebook.

    Returns:
        `modules` (name to module and attribute), `sources` (in the order in which they must run) and `values`.

    Raises:
        Refused: if a name is unknown or cannot be sent.
    """
    packed: dict[str, Any] = {"modules": {}, "sources": [], "values": {}}
    seen: set[str] = set()
    names = list(dict.fromkeys(names))
    for name in names:
        if name not in namespace:
            raise RanksRefused(one_of(say(en="name", fr="nom"), name, _visible(namespace)))
        _pack(name, namespace, packed, seen, names)
    return packed


def _visible(namespace: Mapping[str, Any]) -> list[str]:
    hidden = {"In", "Out", "exit", "quit", "open"} | _OWN
    return [name for name in namespace if not name.startswith("_") and name not in hidden]


def _pack(name: str, namespace: Mapping[str, Any], packed: dict[str, Any], seen: set[str], named: list[str]) -> None:
    if name in seen or name not in namespace:
        return
    seen.add(name)
    thing = namespace[name]
    if isinstance(thing, ModuleType):
        packed["modules"][name] = (thing.__name__, "")
    elif isinstance(thing, type | FunctionType) and thing.__module__ == "__main__":
        source = _source(name, thing)
        for mentioned in sorted(_mentioned(source)):
            _pack(mentioned, namespace, packed, seen, named)
        packed["sources"].append(
            source if thing.__name__ in (name, "<lambda>") else f"{source}\n{name} = {thing.__name__}"
        )
    elif _importable(thing):
        packed["modules"][name] = (thing.__module__, thing.__qualname__)
    elif name in named:
        _refuse_what_cannot_travel(name, thing)
        packed["values"][name] = thing


def _importable(thing: Any) -> bool:
    module = sys.modules.get(getattr(thing, "__module__", None) or "")
    found: Any = module
    for part in str(getattr(thing, "__qualname__", "")).split("."):
        found = getattr(found, part, None)
    return module is not None and module.__name__ != "__main__" and found is thing and callable(thing)


def _mentioned(source: str) -> set[str]:
    """Names a piece of source reads, those of its own arguments and of Python itself aside."""
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    return {name for name in names if not hasattr(builtins, name)} - _OWN


def _source(name: str, thing: Any) -> str:
    try:
        source = _class_source(thing) if isinstance(thing, type) else inspect.getsource(thing)
        source = textwrap.dedent(source)
        if isinstance(thing, FunctionType) and thing.__closure__:
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
        if not defined & {name, thing.__name__}:
            raise OSError("not a definition")
    except (OSError, TypeError, SyntaxError):
        raise RanksRefused(
            say(
                en=f"{name} cannot be sent to the ranks: its source is not known or not whole. Define it with def or "
                "class in a cell of its own, or inside the %%ranks cell.",
                fr=f"{name} ne peut pas être envoyé aux rangs : son code source n’est pas connu ou pas entier. "
                "Définissez-le par def ou class dans une cellule à part, ou dans la cellule %%ranks.",
            )
        ) from None
    return source


def _class_source(thing: type) -> str:
    """The source of a class of a cell, which `inspect` looks for in a file: found through one of its methods."""
    # An `autograd.Function` has static methods only.
    methods = [getattr(value, "__func__", value) for value in vars(thing).values()]
    for method in (value for value in methods if isinstance(value, FunctionType)):
        lines = linecache.getlines(method.__code__.co_filename)
        for node in ast.walk(ast.parse("".join(lines))):
            if isinstance(node, ast.ClassDef) and node.name == thing.__name__:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                return "".join(lines[first - 1 : node.end_lineno])
    raise OSError("no method tells where the class was written")


def _refuse_what_cannot_travel(name: str, thing: Any) -> None:
    from ipyparallel.serialize import serialize_object

    try:
        if type(thing).__module__ == "__main__" or isinstance(thing, FunctionType):
            raise TypeError(f"{type(thing).__name__} is a class of the notebook")
        serialize_object(thing)
    except Exception as error:
        raise RanksRefused(
            say(
                en=f"{name} ({type(thing).__name__}) cannot be sent to the ranks: {error}. Make it inside the %%ranks "
                "cell.",
                fr=f"{name} ({type(thing).__name__}) ne peut pas être envoyé aux rangs : {error}. Créez-le dans la "
                "cellule %%ranks.",
            )
        ) from None


LIMIT_S = 60.0


class Ranks:
    """The ranks of a notebook or of a program.

    Args:
        size: number of ranks to start at once; without it, `start` does.
        force: whether to start more than the machine bears.
        namespace: the notebook's variables, named in a hint where a rank does not know a name.

    Example:
        with Ranks(4) as ranks:
            ranks.run("x = torch.ones(1) * rank; dist.all_reduce(x)")
            ranks["x"]
    """

    def __init__(
        self, size: int | None = None, *, force: bool = False, namespace: Mapping[str, Any] | None = None
    ) -> None:
        self._cluster: RankCluster | None = None
        self._crew: Crew | None = None
        self._namespace: Mapping[str, Any] = {} if namespace is None else namespace
        if size is not None:
            self.start(size, force=force)

    def start(self, size: int, *, force: bool = False, progress: Callable[[], None] = lambda: None) -> None:
        """Start `size` ranks; others that run end first, with their variables.

        Args:
            size: number of ranks, 1 to 256.
            force: whether to start more than the machine bears.
            progress: called again and again meanwhile.

        Raises:
            Refused: if the number is none, or more than the machine bears.
            LabError: if they do not start.
        """
        size = number_of_ranks(size)
        if not force:
            refuse_too_many(size)
        try:
            if self._cluster is None:
                self._cluster = _cluster()
                atexit.register(self.stop)
            self._crew = None
            self._cluster.start(size, progress)
            crew = Crew(self._cluster, size)
            crew.make_ready()
            self._crew = crew
        except BaseException:  # an interrupt too: half started is of no use
            self.stop()
            raise

    def stop(self) -> None:
        """End all ranks and what they have started; their variables are lost."""
        cluster, self._cluster, self._crew = self._cluster, None, None
        atexit.unregister(self.stop)
        if cluster is not None:
            cluster.stop()

    def restart(self, *, progress: Callable[[], None] = lambda: None) -> None:
        """As many fresh ranks as there are, without variables."""
        self.start(self._running().size, force=True, progress=progress)

    @property
    def size(self) -> int:
        """Number of ranks; 0 where none is running."""
        return self._crew.size if self._crew else 0

    def __len__(self) -> int:
        return self.size

    def __bool__(self) -> bool:
        return self._crew is not None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        if not self:
            return _none_running()
        return say(en=f"ranks 0 to {self.size - 1}", fr=f"rangs 0 à {self.size - 1}")

    def run(self, code: str, *, limit_s: float = LIMIT_S, belongings: Mapping[str, Any] | None = None) -> None:
        """Run code on every rank and show what they say.

        Args:
            code: as in a cell.
            limit_s: seconds after which ranks that still run are interrupted.
            belongings: what goes along (see `carry`).

        Raises:
            Refused: if no ranks are running.
            RanksError: if it did not end well on every rank.
        """
        answers = self.execute(code, limit_s=limit_s, belongings=belongings)
        show(Columns(answers))
        to_do = still_to_do(answers)
        if to_do:
            print(to_do)
        elif any(answer.trouble for answer in answers):
            raise RanksError(answers, self._hint(answers))

    def execute(
        self, code: str, *, limit_s: float = LIMIT_S, belongings: Mapping[str, Any] | None = None
    ) -> list[CellAnswer]:
        """Run code on every rank and return what each says, by rank, also where it did not end well.

        Raises:
            Refused: if no ranks are running.
        """
        crew = self._running()
        try:
            return crew.run(code, limit_s, belongings or {})
        except RanksRefused as refused:
            if str(refused) == all_lost():
                self.stop()
            raise

    def __getitem__(self, name: str) -> list[Any]:
        return self.pull(name)[name]

    def pull(self, *names: str) -> dict[str, list[Any]]:
        """The values of variables, one per rank; tensors come back in main memory, without their history.

        Raises:
            Refused: if a rank does not know the name, or the value cannot be brought back.
        """
        crew = self._running()
        return {name: [_value(name, *item) for item in enumerate(crew.ask(rank_setup.fetch, name))] for name in names}

    def push(self, **values: Any) -> None:
        """Give every rank a copy of these values (or functions, or classes), under these names.

        Raises:
            Refused: if a value cannot be sent.
        """
        answers = self.execute("", belongings=belongings(values, {**self._namespace, **values}))
        if any(answer.trouble for answer in answers):
            raise RanksError(answers)

    def status(self) -> Status:
        """What each rank is: its process, device, memory and number of variables, as a table."""
        return Status(self._crew.ask(rank_setup.describe) if self._crew else [])

    def _running(self) -> Crew:
        if self._crew is None:
            raise RanksRefused(_none_running())
        return self._crew

    def _hint(self, answers: list[CellAnswer]) -> str:
        missing = sorted(name for name in unknown_names(answers) if name in self._namespace)
        if not missing:
            return ""
        names = ",".join(missing)
        return say(
            en=f"{', '.join(missing)}: known in the notebook, not on the ranks, which have variables of their own; "
            f"%%ranks --with {names} sends a copy along.",
            fr=f"Le notebook connaît {', '.join(missing)}, mais pas les rangs, qui ont leurs propres variables ; "
            f"%%ranks --with {names} en envoie une copie.",
        )


def _cluster() -> RankCluster:
    from dlojz.ranks.slurm_ranks import SlurmCluster, inside_allocation

    return SlurmCluster() if inside_allocation() else LocalCluster()


def _none_running() -> str:
    return say(
        en="no ranks are running: start some, e.g. with %%ranks 4.",
        fr="aucun rang n’est en cours : démarrez-en, par exemple avec %%ranks 4.",
    )


def show(said: Columns | Status) -> None:
    """Show it in the notebook, or print it where there is none; nothing where nothing was said."""
    from IPython.core.getipython import get_ipython
    from IPython.display import display

    if not said:
        return
    if get_ipython() is None:
        print(said)
    else:
        display(said)


def _value(name: str, rank: int, answer: Mapping[str, Any]) -> Any:
    if "problem" not in answer:
        return answer["value"]
    if answer["problem"] == "unknown":
        what = say(en=f"name on rank {rank}", fr=f"nom sur le rang {rank}")
        raise RanksRefused(one_of(what, name, answer["names"]))
    raise RanksRefused(
        say(
            en=f"{name} cannot be brought back from rank {rank} ({answer['type']}: {answer['problem']}). Print it in a "
            "%%ranks cell, or bring back what it holds: numbers, strings, tensors, lists, dictionaries.",
            fr=f"{name} ne peut pas être rapporté du rang {rank} ({answer['type']} : {answer['problem']}). Affichez-le "
            "dans une cellule %%ranks, ou rapportez ce qu’il contient : nombres, chaînes, tenseurs, listes, "
            "dictionnaires.",
        )
    )
