"""Three steps, then rank 1 fills the file system and fails as any program does on a full disk."""

import stage

stage.begin()
for index in range(3):
    stage.step(index)
if stage.RANK == 1:
    with open(stage.FOLDER / "ballast", "wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
while True:
    stage.step(index)
