"""Goes on until SIGTERM, with a helper process beside it as a data loader has, and then says that it was cancelled."""

import signal
import subprocess
import sys
import time

from workers import stage

stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
log = stage.begin()
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
log.write("helper", pid=helper.pid)
index = 0
while not stopped:
    stage.step(log, index)
    index += 1
    time.sleep(0.05)
log.write("end", status="cancelled", reason="stopped by SIGTERM")
sys.exit(1)
