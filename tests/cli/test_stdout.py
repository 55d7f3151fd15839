"""With `--json` stdout is protected at the level of the file descriptor, for child processes too."""

import json
import subprocess
import sys

NOISY = """
import os, subprocess, sys
from dlojz.cli.options import answering
with answering(True) as answer:
    print("a library prints")
    os.write(1, b"native code writes\\n")
    subprocess.run([sys.executable, "-c", "print('a child prints')"])
    answer({"a": 1})
    print("after the answer")
"""


def test_only_the_answer_reaches_stdout() -> None:
    done = subprocess.run([sys.executable, "-c", NOISY], capture_output=True, text=True, timeout=240, check=True)
    assert json.loads(done.stdout) == {"a": 1}
    for noise in ("a library prints", "native code writes", "a child prints", "after the answer"):
        assert noise in done.stderr
