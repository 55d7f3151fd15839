"""A scheduler that says what a scenario tells it: this file, under the names sbatch, squeue, scancel, sacct, ….

The scenario is a JSON list in `$FAKESLURM`, of steps
    {"command": REGEX, "code": 0, "out": "", "err": "", "delay_s": 0, "times": 1}
in the order expected. A step serves `times` calls (0: any number, until a later step fits). A command that no step
expects is an error (exit code 99) and is written to `unexpected`, which the fixture looks at when the test ends.
"""

import fcntl
import json
import os
import re
import sys
import time
from pathlib import Path

Step = dict[str, object]


def step_of(folder: Path, command: str) -> Step | None:
    """The step that serves this call; every call is written to `calls` with the number of its step."""
    steps: list[Step] = json.loads((folder / "scenario.json").read_text(encoding="utf-8"))
    with open(folder / "calls", "a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # two processes may ask at once
        file.seek(0)
        served = [json.loads(line)["step"] for line in file]
        number = next_step(steps, served, command)
        file.write(json.dumps({"step": number, "command": command, "time_s": time.time()}) + "\n")
    return None if number is None else steps[number]


def next_step(steps: list[Step], served: list[int | None], command: str) -> int | None:
    """The first step from the last one served on that expects this command; none may be left out on the way."""
    first = max((one for one in served if one is not None), default=0)
    for number in range(first, len(steps)):
        times = steps[number].get("times", 1)
        left = times == 0 or served.count(number) < int(str(times))
        if left and re.search(str(steps[number]["command"]), command):
            return number
        if left and times:
            return None
    return None


def main() -> int:
    """Answer one call."""
    folder = Path(os.environ["FAKESLURM"])
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    step = step_of(folder, command)
    if step is None:
        with open(folder / "unexpected", "a", encoding="utf-8") as file:
            file.write(command + "\n")
        print(f"fakeslurm: nothing expects {command!r}", file=sys.stderr)
        return 99
    time.sleep(float(str(step.get("delay_s", 0))))
    sys.stdout.write(str(step.get("out", "")))
    sys.stderr.write(str(step.get("err", "")))
    return int(str(step.get("code", 0)))


if __name__ == "__main__":
    sys.exit(main())
