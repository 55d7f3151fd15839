"""One training, one program per library: each runs alone under torchrun, without the lab's probes."""
