"""Ranks that live beside the notebook: cells run on all of them, variables stay there, values can be looked at.

Layer 5. Invariant: nothing starts before it is asked for, and all that was started ends with the program.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
from typing import Any

from dlojz.ranks import seat
from dlojz.ranks.carry import belongings as packed
from dlojz.ranks.cluster import LocalCluster
from dlojz.ranks.crew import Crew, all_lost
from dlojz.ranks.limits import Refused, number_of_ranks, refuse_too_many
from dlojz.ranks.line import Cluster
from dlojz.ranks.outcome import Answer, RanksError, still_to_do, unknown_names
from dlojz.ranks.show import Columns, Status
from dlojz.schema import one_of
from dlojz.text import say

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
        self._cluster: Cluster | None = None
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
    ) -> list[Answer]:
        """Run code on every rank and return what each says, by rank, also where it did not end well.

        Raises:
            Refused: if no ranks are running.
        """
        crew = self._running()
        try:
            return crew.run(code, limit_s, belongings or {})
        except Refused as refused:
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
        return {name: [_value(name, *item) for item in enumerate(crew.ask(seat.fetch, name))] for name in names}

    def push(self, **values: Any) -> None:
        """Give every rank a copy of these values (or functions, or classes), under these names.

        Raises:
            Refused: if a value cannot be sent.
        """
        answers = self.execute("", belongings=packed(values, {**self._namespace, **values}))
        if any(answer.trouble for answer in answers):
            raise RanksError(answers)

    def status(self) -> Status:
        """What each rank is: its process, device, memory and number of variables, as a table."""
        return Status(self._crew.ask(seat.describe) if self._crew else [])

    def _running(self) -> Crew:
        if self._crew is None:
            raise Refused(_none_running())
        return self._crew

    def _hint(self, answers: list[Answer]) -> str:
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


def _cluster() -> Cluster:
    from dlojz.ranks.slurm import SlurmCluster, inside_allocation

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
        raise Refused(one_of(what, name, answer["names"]))
    raise Refused(
        say(
            en=f"{name} cannot be brought back from rank {rank} ({answer['type']}: {answer['problem']}). Print it in a "
            "%%ranks cell, or bring back what it holds: numbers, strings, tensors, lists, dictionaries.",
            fr=f"{name} ne peut pas être rapporté du rang {rank} ({answer['type']} : {answer['problem']}). Affichez-le "
            "dans une cellule %%ranks, ou rapportez ce qu’il contient : nombres, chaînes, tenseurs, listes, "
            "dictionnaires.",
        )
    )
