"""Places at which writing code may be made to fail: for the tests that prove nothing is lost.

Without `$DLOJZ_FAULTPOINT` a fault point does nothing; every place that writes what must survive has one, and `POINTS`
lists them all, so that a test can visit each.

`DLOJZ_FAULTPOINT=checkpoint.write:2:kill` ends the process there (SIGKILL), `…:enospc` lets the system refuse the write
for want of space, `…:sleep` waits there until somebody ends the process.
"""

from __future__ import annotations

import errno
import os
import signal
import time

from dlojz.base.errors import LabError
from dlojz.base.language import one_of

VARIABLE = "DLOJZ_FAULTPOINT"
POINTS = (
    "checkpoint.write:1",  # the temporary folder is there, and empty
    "checkpoint.write:2",  # before each file of tensors
    "checkpoint.write:3",  # a file of tensors is written, and not known to be on the disk
    "checkpoint.manifest:1",  # all tensors are there, the manifest is not
    "checkpoint.manifest:2",  # the manifest is there, under the temporary name of the folder
    "checkpoint.rename:1",  # before the folder gets its name
    "checkpoint.rename:2",  # it has its name, and is not committed
    "checkpoint.commit:1",  # before the file that commits it
    "checkpoint.commit:2",  # committed; older ones are still there
    "checkpoint.clean:1",  # before one that is no longer wanted is deleted
    "record.write:1",  # before the temporary file
    "record.write:2",  # the temporary file is written; the old one has its name
    "record.write:3",  # it has its name
    "events.write:1",  # before an event
    "events.write:2",  # an event is with the operating system
    "store.create:1",  # a run's folder is hidden and empty
    "store.create:2",  # it is whole, under its hidden name
    "store.reopen:1",  # a run is to go on; nothing has changed
    "store.reopen:2",  # it names its new owner; what its first attempt left is there
    "store.reopen:3",  # all but the record is set aside
    "store.reopen:4",  # the record is, too
)
"""Every fault point of the package, in the order in which a run meets them."""
ACTIONS = ("kill", "enospc", "sleep")
_FOR_EVER_S = 3600.0


def faultpoint(name: str) -> None:
    """Do here what `$DLOJZ_FAULTPOINT` says, if it names this point.

    Args:
        name: one of `POINTS`.

    Raises:
        OSError: ENOSPC, where that was asked for.
        LabError: if the variable names no point, or nothing that can be done.
    """
    setting = os.environ.get(VARIABLE)
    if not setting:
        return
    point, _, action = setting.rpartition(":")
    if point not in POINTS:
        raise LabError(one_of("fault point", point, POINTS))
    if action not in ACTIONS:
        raise LabError(one_of("fault", action, ACTIONS))
    if point != name:
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    time.sleep(_FOR_EVER_S)
