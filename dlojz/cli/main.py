"""Dispatch the command `dlojz`: verbs, help, exit codes.

An error is one sentence on stderr, never a traceback. Exit codes: 0 done, 1 a run or a check did not succeed, 2 the
request was refused, 130 interrupted. `dlojz --help` loads no torch.
"""

import errno
import gc
import importlib
import io
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, one_of, say
from dlojz.base.requirements import distribution_of, missing_library

phrase = Sentences(Path(__file__).parent / "data" / "sentences.md")

DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
COLLECTED = (20_000, 10, 10)
"""Thresholds of the garbage collector: what a command imports and traces lives to its end, and with Python's own
threshold of 700 objects, searching for cycles takes a tenth of the processor time."""


class Subcommand(NamedTuple):
    """A subcommand: its module, and what it does in one line, in both languages."""

    module: str
    en: str
    fr: str


def _subcommands() -> dict[str, Subcommand]:
    """Read the subcommands from lines `NAME  MODULE  English // français`."""
    subcommands = {}
    for line in (Path(__file__).parent / "data" / "commands.txt").read_text(encoding="utf-8").splitlines():
        name, module, summary = line.split(maxsplit=2)
        en, _, fr = summary.partition(" // ")
        subcommands[name] = Subcommand(module, en, fr)
    return subcommands


SUBCOMMANDS = _subcommands()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        argv: words after `dlojz`; by default those of this process.

    Returns:
        The exit code.
    """
    if argv is None:
        gc.set_threshold(*COLLECTED)
        _reopen()
        # What torch and torchao tell their own developers stands in no answer.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch(ao)?\b")
        logging.getLogger("torchao").setLevel(logging.ERROR)
        _end_as_by_interrupt()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a sign that the terminal cannot write becomes a question mark
                stream.reconfigure(errors="replace")
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()  # here, so that a reader who has gone is noticed here
        return code
    except LabError as error:
        print(f"dlojz: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        _complain(
            en="dlojz: interrupted; finished runs and records are kept.",
            fr="dlojz : interrompu ; les exécutions et mesures terminées sont gardées.",
        )
        return INTERRUPTED
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "dlojz"):
            raise
        command = f"`dlojz {words[0]}`"
        sentence = missing_library(distribution_of(missing), en=command, fr=command)
        _complain(en=f"dlojz: {sentence}", fr=f"dlojz : {sentence}")
        return FAILED
    except BrokenPipeError:  # the reader (`| head`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return DONE
    except Exception as error:
        return _tell_system(error, words)


_WRONG_NAMES = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EILSEQ)


def _tell_system(error: BaseException, words: Sequence[str]) -> int:
    """Say what the system did not give or do, and return the exit code; raise what is a mistake of the program.

    A name that no file can have is a wrong argument, hence a refusal.
    """
    blind = sys.platform.startswith("linux") and not os.path.exists("/proc/self/stat")  # noqa: PTH110 - light
    if blind or _is_starved(error):
        reason = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
        reason = say(en="/proc is not mounted", fr="/proc n’est pas monté") if blind else reason
        _complain(
            en=f"dlojz: this system does not give `dlojz {words[0]}` what it needs ({reason}): see its limits "
            "(ulimit -a) of memory, threads and processes.",
            fr=f"dlojz : ce système ne donne pas à `dlojz {words[0]}` ce qu’il lui faut ({reason}) : voyez ses limites "
            "(ulimit -a) de mémoire, de threads et de processus.",
        )
        return FAILED
    if not isinstance(error, OSError):
        raise error
    from dlojz.base.table import visible

    file_text = f" ({visible(error.filename)})" if error.filename else ""
    _complain(
        en=f"dlojz: the system refused: {error.strerror or error}{file_text}.",
        fr=f"dlojz : le système a refusé : {error.strerror or error}{file_text}.",
    )
    return REFUSED if error.errno in _WRONG_NAMES else FAILED


def _end_as_by_interrupt() -> None:
    """Let SIGTERM and SIGHUP end this process as Ctrl-C does, which cancels the run that it follows.

    A signal that is ignored, as SIGHUP is under `nohup`, stays so. A forked child ends as by default.
    """
    maker = os.getpid()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() != maker:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        handler = signal.getsignal(signal.SIGINT)  # ignored in a shell's background
        (handler if callable(handler) else signal.default_int_handler)(number, frame)

    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, interrupt)


def _reopen() -> None:
    """Open /dev/null for each of the three streams that is closed, as a daemon's are, and say so of stdout.

    Else the first file that is opened would get its number, and be written to by whoever prints.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - lives as long as the process
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        _complain(
            en="dlojz: the standard output is closed: what would be printed there is lost.",
            fr="dlojz : la sortie standard est fermée : ce qui s’y imprimerait est perdu.",
        )


_STARVED = ("start new thread", "allocate memory", "failed to map segment", "Resource temporarily unavailable")


def _is_starved(error: BaseException) -> bool:
    """Return whether an error, or what it came from, says that the system gave no memory, thread or file."""
    while True:
        if isinstance(error, MemoryError) or any(words in str(error) for words in _STARVED):
            return True
        if isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE):
            return True
        cause = error.__cause__ or error.__context__
        if cause is None:
            return False
        error = cause


def _complain(*, en: str, fr: str) -> None:
    print(say(en=en, fr=fr), file=sys.stderr)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return DONE
    if words[0] == "--version":
        import dlojz

        print(f"dlojz {dlojz.__version__}")
        return DONE
    if sys.platform == "win32":
        from dlojz.base.machine import refuse_windows

        refuse_windows()
    name, arguments = words[0], words[1:]
    if name not in SUBCOMMANDS:
        raise LabError(one_of("command", name, SUBCOMMANDS))
    module = importlib.import_module(f"dlojz.cli.{SUBCOMMANDS[name].module}")
    # The verb NAME is `NAME_command` of its module.
    command: Callable[[list[str]], int] = getattr(module, f"{name}_command")
    return command(arguments)


def overview() -> str:
    """Write the help of `dlojz` itself."""
    width = max(map(len, SUBCOMMANDS))
    lines = "\n".join(
        f"  {name:<{width}}  {say(en=subcommand.en, fr=subcommand.fr)}" for name, subcommand in SUBCOMMANDS.items()
    )
    return phrase("overview", lines=lines)
