"""Checkpoints: the state of a training, kept so that it goes on after a time limit, a crash or a full disk.

Layer 3. Invariant: what is kept is the *logical* state, whole tensors by the names of one process, whatever the layout;
so a run of two ranks goes on with four, or with another engine, by reading. Folders of a run:

    checkpoints/step-000120/tensors-0000.safetensors …   the tensors, in files of at most 1 GiB (or one tensor)
    checkpoints/step-000120/manifest.json                every file's size and sha256, every tensor's shape and type
    checkpoints/step-000120/COMMIT                       written last, with the manifest's sha256: without it, nothing

Only safetensors and JSON are written and read; a file of another kind is never opened. torch is loaded to read or
write tensors, not to list or verify.

Source: the order of writing is that of a transaction's log (write, flush, rename, commit); that a torn or altered
checkpoint is to be told by a checksum: safetensors and torch's own formats load a flipped byte without a word.
"""

from __future__ import annotations

from dlojz.checkpoint.folders import CHECKPOINTS, Checkpoint, listing, newest, verify
from dlojz.checkpoint.manifest import Manifest

__all__ = ["CHECKPOINTS", "Checkpoint", "Manifest", "listing", "newest", "verify"]
